"""Creates tables for the tests in this folder."""

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import ShardedVariable


def make_table(values, sizes, name="emb", **options):
    """Returns a table of `values` with shards of `sizes` rows."""
    offsets = np.cumsum([0, *sizes])
    return ShardedVariable(
        [
            tf.Variable(values[start:stop], **options)
            for start, stop in zip(offsets, offsets[1:])
        ],
        name=name,
    )


def backwards(num_rows, num_shards):
    """Assigns rows to shards cyclically, starting with the last shard."""
    return RowPartition.from_callable(
        lambda rows: (num_shards - 1 - rows % num_shards, rows // num_shards),
        RowPartition.mod(num_rows, num_shards).sizes[::-1],
    )


PLACEMENTS = {
    "div": lambda size, num_shards: RowPartition.div(size, num_shards),
    "mod": lambda size, num_shards: RowPartition.mod(size, num_shards),
    "callable": backwards,
}


def placed(values, placement, num_shards=3, **options):
    """Returns a table of `values` with a placement, or sharded by columns."""
    values = np.asarray(values)
    axis = int(placement == "columns")
    rule = PLACEMENTS["div" if axis else placement]
    return ShardedVariable.create(
        values,
        axis=axis,
        placement=rule(values.shape[axis], num_shards),
        **{"name": "emb", **options},
    )


@st.composite
def cuts(draw, shape):
    """Draws arguments of `ShardedVariable.create` for a table of `shape`."""
    axis = draw(st.integers(0, 1)) if len(shape) > 1 else 0
    size = shape[axis]
    num_shards = draw(st.integers(1, 5))
    kind = draw(
        st.sampled_from(
            ["sizes", "div"] if axis else ["sizes", "div", "mod", "callable"]
        )
    )
    if kind == "sizes":
        bounds = draw(
            st.lists(
                st.integers(0, size),
                min_size=num_shards - 1,
                max_size=num_shards - 1,
            ).map(sorted)
        )
        return {"axis": axis, "placement": [0, *bounds, size]}
    return {"axis": axis, "placement": PLACEMENTS[kind](size, num_shards)}
