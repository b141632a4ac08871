"""Checks the arguments of a `ShardedEmbedding`, and reads its ids.

Dense ids can have any dtype that represents them exactly. For sparse ids, a
layer looks up the values of a `tf.SparseTensor` and writes the rows to the
positions of the values in a dense tensor. Positions without an id are zeros.
The result is therefore equal to the lookup of a ragged tensor that is then
padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import user_warnings
from tf_layoutmap.sharded.routing import assertions

if TYPE_CHECKING:
    from tf_layoutmap._core.types import ShardCounts


def count_shards(
    num_shards: Any,
    partitioner: ShardCounts | None,
    max_shards: int,
    shape: tuple[int, int],
    dtype: str,
    where: str,
) -> int:
    """Returns the number of shards that the arguments specify.

    Args:
      num_shards: Maximum number of shards, or None.
      partitioner: Callable of shape and dtype that returns the number of
        shards, an alternative to `num_shards`.
      max_shards: Maximum number of shards of the table.
      shape: Shape of the table, `[input_dim, output_dim]`.
      dtype: Dtype of the rows.
      where: The layer, for messages.

    Raises:
      TypeError, ValueError: If both `num_shards` and `partitioner` are set, or
        one of them is invalid.
    """
    if num_shards is not None and partitioner is not None:
        raise ValueError(
            "Arguments `num_shards` and `partitioner` must not both be "
            f"given. Received: {num_shards!r} and {partitioner!r} "
            f"({where})."
        )
    if partitioner is None:
        num_shards = _core_checks.check_int(
            "num_shards",
            1 if num_shards is None else num_shards,
            lowest=1,
            where=where,
        )
        if num_shards > max_shards:
            user_warnings.warn(
                f"The table of {shape[0]} rows has {max_shards} shards instead "
                f"of num_shards={num_shards}, because each shard requires at "
                f"least one row, or one bucket of keys ({where})."
            )
        return min(max_shards, num_shards)
    _core_checks.check_partitioner(partitioner, where)
    counts = list(partitioner(tf.TensorShape(shape), tf.as_dtype(dtype)))
    if len(counts) != 2 or counts[1] != 1:
        raise ValueError(
            "Argument `partitioner` must partition the rows only, "
            f"[num_shards, 1]. Received: {counts} ({where})."
        )
    return _core_checks.check_int(
        "num_shards", counts[0], lowest=1, highest=max_shards, where=where
    )


def check_inputs(inputs: Any, layer: str) -> None:
    """Checks that no input is a Python value; Keras' own error is less clear.

    Args:
      inputs: Inputs of a call of a Keras 3 layer, nested or not.
      layer: Name of the layer.

    Raises:
      TypeError: If a leaf is a Python number or string.
    """
    for value in tf.nest.flatten(inputs):
        if isinstance(value, bool | int | float | str | bytes):
            raise TypeError(
                "Ids must be a tensor or an array, such as "
                "tf.constant([1, 2]), not Python numbers, strings or lists of "
                f"them. Received: {value!r} (layer {layer!r})."
            )


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
