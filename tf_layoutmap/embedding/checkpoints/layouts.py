"""Layouts of tables in the stacked variables of SparseCores.

A stacked variable has one block of rows per SparseCore. A block contains rows
of all tables of the stack, one table after the other. Row `r` of a table is in
the block of SparseCore `(r + rotation) % num_sparse_cores`. Rows and columns
are padded. TensorFlow's `SparseCoreTableLayout` describes one table.

A table that is not stacked is a stack for one SparseCore, without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2

Array = np.ndarray[Any, Any]
TableLayout = sparse_core_layout_pb2.SparseCoreTableLayout
Layouts = Mapping[str, TableLayout]


def of_table(name: str, shape: Sequence[int]) -> TableLayout:
    """Returns the layout of a table that is not stacked."""
    return TableLayout(
        table_name=name,
        stacked_table_name=name,
        num_sparse_cores=1,
        num_partitions=1,
        unsharded_shape=shape,
        unsharded_padded_shape=shape,
        total_rows_per_sparse_core_shard=shape[0],
    )


def by_stack(layouts: Iterable[TableLayout]) -> dict[str, list[TableLayout]]:
    """Returns the layouts by stack, in the order of the rows of a stack."""
    stacks: dict[str, list[TableLayout]] = {}
    for layout in sorted(
        layouts, key=lambda layout: layout.sparse_core_shard_row_offset
    ):
        stacks.setdefault(layout.stacked_table_name, []).append(layout)
    return stacks


def same_rows(layouts: Layouts, others: Layouts) -> bool:
    """Returns whether the same rows of the same stacks belong to all tables.

    A layout also contains the number of samples and features of its table.
    """
    return {name: _rows(layout) for name, layout in layouts.items()} == {
        name: _rows(layout) for name, layout in others.items()
    }


def _rows(layout: TableLayout) -> tuple[Any, ...]:
    return (
        layout.stacked_table_name,
        layout.num_sparse_cores,
        layout.num_partitions,
        layout.total_rows_per_sparse_core_shard,
        layout.sparse_core_shard_row_offset,
        layout.sparse_core_shard_rotation,
        *layout.unsharded_shape,
        *layout.unsharded_padded_shape,
    )


def stack_shape(layout: TableLayout, is_per_row: bool) -> tuple[int, int]:
    """Returns the shape of the stacked variable that contains a table.

    Args:
      layout: Layout of the table.
      is_per_row: Whether the variable has one number per row, which is not
        padded.
    """
    return (
        layout.num_sparse_cores * layout.total_rows_per_sparse_core_shard,
        1 if is_per_row else layout.unsharded_padded_shape[1],
    )


def unstacked(stack: Array, layout: TableLayout) -> Array:
    """Returns one table of a stacked variable, without padding.

    If the variable has one number per row, so does the result.

    >>> layout = TableLayout(
    ...     num_sparse_cores=2, sparse_core_shard_row_offset=1,
    ...     sparse_core_shard_rotation=1, unsharded_shape=[3, 1],
    ...     unsharded_padded_shape=[4, 2])
    >>> stack = [[9, 9], [1, 0], [0, 0], [9, 9], [0, 0], [2, 0]]
    >>> unstacked(np.array(stack), layout).tolist()
    [[0], [1], [2]]
    """
    num_rows, dim = layout.unsharded_shape
    blocks = stack.reshape(layout.num_sparse_cores, -1, stack.shape[1])
    blocks = np.roll(
        blocks[:, _rows_in_block(layout), :dim],
        -layout.sparse_core_shard_rotation,
        axis=0,
    )
    return blocks.swapaxes(0, 1).reshape(-1, blocks.shape[2])[:num_rows]


def stacked(
    tables: Iterable[tuple[Array, float]],
    layouts: Sequence[TableLayout],
    is_per_row: bool = False,
) -> Array:
    """Returns the stacked variable of several tables.

    Args:
      tables: The rows of each table, and the value of its padding.
      layouts: Layouts of the tables.
      is_per_row: Whether the variable has one number per row.
    """
    stack = np.zeros(stack_shape(layouts[0], is_per_row), np.float32)
    blocks = stack.reshape(layouts[0].num_sparse_cores, -1, stack.shape[1])
    for (rows, padding), layout in zip(tables, layouts, strict=True):
        padded = np.full(
            (layout.unsharded_padded_shape[0], stack.shape[1]),
            padding,
            np.float32,
        )
        padded[: rows.shape[0], : rows.shape[1]] = rows
        blocks[:, _rows_in_block(layout)] = np.roll(
            padded.reshape(-1, len(blocks), stack.shape[1]).swapaxes(0, 1),
            layout.sparse_core_shard_rotation,
            axis=0,
        )
    return stack


def replace(stack: Array, rows: Array, layout: TableLayout) -> None:
    """Writes the rows of a table to a stacked variable, except its padding."""
    ids = np.arange(len(rows))
    cores = layout.num_sparse_cores
    blocks = stack.reshape(cores, -1, stack.shape[1])
    blocks[
        (ids + layout.sparse_core_shard_rotation) % cores,
        layout.sparse_core_shard_row_offset + ids // cores,
        : rows.shape[1],
    ] = rows


def _rows_in_block(layout: TableLayout) -> slice:
    first = layout.sparse_core_shard_row_offset
    size = layout.unsharded_padded_shape[0] // layout.num_sparse_cores
    return slice(first, first + size)
