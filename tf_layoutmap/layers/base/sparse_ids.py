"""Lookups of sparse ids in `ShardedEmbedding`.

A layer looks up the values of a `tf.SparseTensor` and writes the rows to the
positions of the values in a dense tensor. Positions without an id are zeros.
The result is therefore equal to the lookup of a ragged tensor that is then
padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.sharded.routing import assertions


def look_up(
    ids: tf.SparseTensor,
    look_up_values: Callable[[tf.Tensor], Any],
    dim: int,
    layer: str,
) -> tf.Tensor:
    """Returns the rows of ids as a dense tensor, with zeros for missing ids.

    Args:
      ids: Sparse ids.
      look_up_values: Function that returns the rows of ids `[num_ids]`.
      dim: Number of columns of the rows.
      layer: Name of the layer, for messages.

    Returns:
      Tensor of the shape `ids.shape + [dim]`.

    Raises:
      tf.errors.InvalidArgumentError: If indices are outside the shape, repeated
        or not in row-major order.
    """
    indices = _checked_indices(ids, layer)
    rows = look_up_values(ids.values)
    found = tf.scatter_nd(
        indices, rows, tf.concat([ids.dense_shape, [dim]], axis=0)
    )
    return tf.ensure_shape(found, ids.shape.concatenate([dim]))


def to_dense_mask(ids: tf.SparseTensor, is_id: tf.Tensor) -> tf.Tensor:
    """Returns a dense mask; False for positions without an id.

    Args:
      ids: Sparse ids.
      is_id: For each value of `ids`, whether it is an id and not padding.
    """
    counts = tf.scatter_nd(
        ids.indices, tf.cast(is_id, tf.int32), ids.dense_shape
    )
    return tf.ensure_shape(counts > 0, ids.shape)


def _checked_indices(ids: tf.SparseTensor, layer: str) -> tf.Tensor:
    """Returns the indices after a check of their order and their range.

    `tf.scatter_nd` would add the rows of repeated indices.
    """
    indices = ids.indices
    before, after = indices[:-1], indices[1:]
    # The first dimension in which two consecutive indices differ must increase.
    first = tf.argmax(tf.not_equal(before, after), axis=1)
    change = tf.gather(after - before, first, axis=1, batch_dims=1)
    checks = [
        *assertions.require(
            tf.reduce_all((indices >= 0) & (indices < ids.dense_shape)),
            f"The indices of a tf.SparseTensor must be inside its shape (layer "
            f"{layer!r}).",
        ),
        *assertions.require(
            tf.reduce_all(change > 0),
            "The indices of a tf.SparseTensor must be in row-major order and "
            "must not be repeated; tf.sparse.reorder sorts them (layer "
            f"{layer!r}).",
        ),
    ]
    with tf.control_dependencies(checks):
        return tf.identity(indices)
