"""What `ShardedEmbedding` reads of its arguments, and of ids."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.sharded.routing import assertions


def count_shards(
    num_shards: Any,
    partitioner: Callable[..., list[int]] | None,
    most: int,
    shape: tuple[int, int],
    dtype: str,
    where: str,
) -> int:
    """Returns the number of shards that the arguments ask for.

    Args:
      num_shards: Shards at most, or None.
      partitioner: Instead, a callable of shape and dtype; or None.
      most: Shards that the table can have.
      shape: Of the table, `[input_dim, output_dim]`.
      dtype: Of its rows.
      where: The layer, for messages.

    Raises:
      TypeError, ValueError: If both are given, or one is no such argument.
    """
    if num_shards is not None and partitioner is not None:
        raise ValueError(
            "Arguments `num_shards` and `partitioner` must not both be "
            f"given. Received: {num_shards!r} and {partitioner!r} "
            f"({where})."
        )
    if partitioner is None:
        num_shards = 1 if num_shards is None else num_shards
        return min(
            most,
            _checks.check_int("num_shards", num_shards, lowest=1, where=where),
        )
    if not callable(partitioner):
        raise TypeError(
            _checks.message("partitioner", "callable", partitioner, where)
        )
    counts = list(partitioner(tf.TensorShape(shape), tf.as_dtype(dtype)))
    if len(counts) != 2 or counts[1] != 1:
        raise ValueError(
            "Argument `partitioner` must cut the rows only, "
            f"[num_shards, 1]. Received: {counts} ({where})."
        )
    return _checks.check_int(
        "num_shards", counts[0], lowest=1, highest=most, where=where
    )


def check_inputs(inputs: Any, layer: str) -> None:
    """Refuses Python values in place of tensors, which Keras explains badly.

    Args:
      inputs: Of a call of a Keras 3 layer, nested or not.
      layer: Its name.

    Raises:
      TypeError: If a leaf is a Python number or string.
    """
    for one in tf.nest.flatten(inputs):
        if isinstance(one, bool | int | float | str | bytes):
            raise TypeError(
                "Ids must be a tensor or an array, such as "
                "tf.constant([1, 2]), not Python numbers, strings or lists of "
                f"them. Received: {one!r} (layer {layer!r})."
            )


def read_ids(inputs: Any, num_rows: int, name: str) -> tf.Tensor:
    """Returns ids as int32 or int64.

    Args:
      inputs: Dense tensor of numbers.
      num_rows: Of the table.
      name: Of the layer.

    Raises:
      TypeError: If numbers of their type do not tell all rows apart.
      tf.errors.InvalidArgumentError: If a number is not whole.
    """
    ids = tf.convert_to_tensor(inputs)
    if ids.dtype in (tf.int32, tf.int64):
        return ids
    if ids.dtype.is_integer and ids.dtype != tf.uint64:
        return tf.cast(ids, tf.int64 if ids.dtype.size > 2 else tf.int32)
    # Keras' Sequential without an Input makes floats of all numbers.
    exact = (
        2 ** (tf.experimental.numpy.finfo(ids.dtype.as_numpy_dtype).nmant + 1)
        if ids.dtype.is_floating
        else 0
    )
    if ids.dtype == tf.string:
        raise TypeError(
            f"Ids of layer {name!r} must be integers in [0, {num_rows}). "
            "Received: strings. For a layer that takes strings, pass "
            "`input_dim=tlm.OpenVocabulary(capacity)` and an `optimizer` when "
            "it is made."
        )
    if num_rows > exact:
        raise TypeError(
            "Ids must be integers; declare them, as by "
            'keras.Input(shape, dtype="int64"). Received: dtype '
            f"{ids.dtype.name}, which does not tell all ids below "
            f"{num_rows} from each other (layer {name!r})."
        )
    flat = tf.reshape(ids, [-1])
    is_whole = tf.equal(flat, tf.round(flat))
    checks = assertions.require(
        tf.reduce_all(is_whole),
        f"Ids of layer {name!r} must be whole numbers. Received: ",
        tf.boolean_mask(flat, tf.logical_not(is_whole))
        if tf.executing_eagerly()
        else flat,
    )
    with tf.control_dependencies(checks):
        return tf.cast(ids, tf.int64)
