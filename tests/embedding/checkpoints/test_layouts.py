"""Rows of tables in stacked variables."""

import numpy as np
import pytest

from tests.embedding.checkpoints import stacks
from tf_layoutmap.embedding.checkpoints import layouts as table_layouts

TABLES = {"b": (70, 6), "a": (1, 6), "c": (64, 6)}


def reference(tables, layouts):
    """Writes one row at a time."""
    any_layout = layouts[0]
    stack = np.zeros(
        [
            any_layout.num_sparse_cores,
            any_layout.total_rows_per_sparse_core_shard,
            any_layout.unsharded_padded_shape[1],
        ],
        np.float32,
    )
    for (rows, padding), layout in zip(tables, layouts, strict=True):
        for row in range(layout.unsharded_padded_shape[0]):
            core = row + layout.sparse_core_shard_rotation
            place = stack[
                core % layout.num_sparse_cores,
                layout.sparse_core_shard_row_offset
                + row // layout.num_sparse_cores,
            ]
            place[:] = padding
            if row < len(rows):
                place[: rows.shape[1]] = rows[row]
    return stack.reshape(-1, stack.shape[-1])


@pytest.mark.parametrize("num_cores", [1, 2, 4, 16])
def test_rows_are_where_the_layouts_place_them(num_cores):
    generator = np.random.default_rng(num_cores)
    layouts = list(stacks.layouts_of({"s": TABLES}, num_cores, 1).values())
    tables = [
        (generator.normal(size=TABLES[one.table_name]).astype(np.float32), pad)
        for pad, one in enumerate(layouts)
    ]
    stack = table_layouts.stacked(tables, layouts)
    np.testing.assert_array_equal(stack, reference(tables, layouts))
    for (rows, _), layout in zip(tables, layouts, strict=True):
        np.testing.assert_array_equal(
            table_layouts.unstacked(stack, layout), rows
        )


def test_layouts_are_grouped_by_stack_in_the_order_of_rows():
    layouts = stacks.layouts_of({"s": TABLES, "d": {"d": (5, 8)}}, 2)
    found = table_layouts.by_stack(reversed(layouts.values()))
    assert {
        stack: [one.table_name for one in group]
        for stack, group in found.items()
    } == {"s": ["b", "a", "c"], "d": ["d"]}
