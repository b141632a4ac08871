"""Reads the ids of a `ShardedEmbedding`.

Dense ids can have any dtype that represents them exactly. For sparse ids, a
layer looks up the values of a `tf.SparseTensor` and writes the rows to the
positions of the values in a dense tensor. Positions without an id are zeros.
The result is therefore equal to the lookup of a ragged tensor that is then
padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap.sharded.routing import assertions

# A dtype represents all integers exactly up to this number.
_LARGEST_EXACT = {
    "bfloat16": 2**8,
    "float16": 2**11,
    "float32": 2**24,
    "float64": 2**53,
}


def read_ids(
    inputs: Any, num_rows: int, name: str, compute_dtypes: Iterable[str] = ()
) -> tf.Tensor:
    """Returns ids as int32 or int64.

    Args:
      inputs: Dense tensor of numbers.
      num_rows: Number of rows of the table.
      name: Name of the layer.
      compute_dtypes: Compute dtypes of the layer and of the layers that call
        it. Keras converts floats of a model's inputs to these dtypes, and back
        to the dtype of the `Input`.

    Raises:
      TypeError: If a dtype cannot represent all row numbers exactly.
      tf.errors.InvalidArgumentError: If a number is not an integer.
    """
    ids = tf.convert_to_tensor(inputs)
    if ids.dtype in (tf.int32, tf.int64):
        return ids
    if ids.dtype.is_integer and ids.dtype != tf.uint64:
        return tf.cast(ids, tf.int64 if ids.dtype.size > 2 else tf.int32)
    # Ids can be floats, because a Keras Sequential model without an Input casts
    # all numbers to floats.
    if ids.dtype == tf.string:
        raise TypeError(
            f"Ids of layer {name!r} must be integers in [0, {num_rows}). "
            "Received: strings. To look up strings, create the layer with "
            "`input_dim=tlm.vocabulary.OpenVocabulary(capacity)` and an "
            "`optimizer`."
        )
    for dtype in (ids.dtype.name, *compute_dtypes):
        if num_rows <= _LARGEST_EXACT.get(dtype, 0):
            continue
        raise TypeError(
            "Ids must be integers; declare them, as by "
            'keras.Input(shape, dtype="int64"). Received: dtype '
            + (
                f"{dtype}, which does"
                if dtype == ids.dtype.name
                else f"{ids.dtype.name} in a layer or model with compute dtype "
                f"{dtype}, to which Keras converts the inputs, and which does"
            )
            + f" not represent all ids below {num_rows} exactly (layer "
            f"{name!r})."
        )
    flat = tf.reshape(ids, [-1])
    is_integer = tf.equal(flat, tf.round(flat))
    checks = assertions.require(
        tf.reduce_all(is_integer),
        f"Ids of layer {name!r} must be integers. Received: ",
        tf.boolean_mask(flat, tf.logical_not(is_integer))
        if tf.executing_eagerly()
        else flat,
    )
    with tf.control_dependencies(checks):
        return tf.cast(ids, tf.int64)


def look_up_sparse(
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
    dense = tf.scatter_nd(
        indices, rows, tf.concat([ids.dense_shape, [dim]], axis=0)
    )
    return tf.ensure_shape(dense, ids.shape.concatenate([dim]))


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
