"""The first value of each shard; that of a whole table only where needed."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import creation_progress, new_rows, whole_value


class ShardInfo(NamedTuple):
    """Which part of a table an initializer is asked for.

    Attributes:
      shape: Shape of the shard.
      offset: Its first element in the whole table, one number per axis.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def for_shards(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: tf.DType,
    num_shards: int,
    name: str,
) -> Callable[..., Any] | whole_value.WholeValue:
    """Returns what `of_shard` is asked with for each shard of one table.

    Args:
      initializer: As of `of_shard`, or one that knows no shards.
      shape: Shape of the whole table.
      dtype: Dtype of the table.
      num_shards: Of the table.
      name: Of the table, for messages.
    """
    if num_shards == 1 or whole_value.knows_shards(initializer, dtype):
        return initializer
    return whole_value.WholeValue(initializer, shape, dtype, name)


def of_shard(
    initializer: Any,
    shape: tuple[int, ...],
    dtype: tf.DType,
    partition: RowPartition,
    shard: int,
    name: str,
    axis: int = 0,
) -> tf.Tensor:
    """Returns the first value of one shard.

    Args:
      initializer: Of `for_shards`. Called in the first of these forms that
        its signature takes: `(shard_info=ShardInfo)`; `(shape, dtype=,
        partition_shape=, partition_offset=)` with `shape` that of the whole
        table, as TensorFlow's own initializers; `(shape, dtype=)` or
        `(shape)` with the shard's shape. A whole table that it returns is
        divided.
      shape: Shape of the whole table.
      dtype: Dtype of the table.
      partition: How its rows are divided.
      shard: Which one.
      name: The table's name, for messages.
      axis: The axis that is divided.

    Raises:
      TypeError: It takes none of the forms.
      ValueError: It needs an offset where the rows of a shard are not
        neighbours, or returns another shape.
    """
    part_shape, offset = list(shape), [0] * len(shape)
    part_shape[axis] = partition.sizes[shard]
    offset[axis] = partition.offsets[shard]
    info = ShardInfo(tuple(part_shape), tuple(offset))
    if isinstance(initializer, whole_value.WholeValue):
        value = whole_value.cut(initializer.value(), partition, shard, axis)
        creation_progress.add(math.prod(info.shape) * dtype.size)
        return value
    if not partition.is_contiguous and {"shard_info", "partition_offset"} & set(
        inspect.signature(initializer).parameters
    ):
        raise ValueError(
            "Argument `initial_value` must not ask for the offset of a shard "
            f"whose rows are not neighbours (placement "
            f"{partition.placement!r}); give an array. Received: "
            f"{initializer!r} (table {name!r})."
        )
    seeded = _reseeded(initializer, info)
    value = new_rows.draw(seeded, info.shape, dtype)
    if value is not None:
        return value
    value = tf.convert_to_tensor(_call(seeded, shape, dtype, info, name), dtype)
    creation_progress.add(math.prod(info.shape) * dtype.size)
    if tuple(value.shape) == shape:
        value = whole_value.cut(value, partition, shard, axis)
    whole_value.check_shape(value, info.shape, f"table {name!r}, shard {shard}")
    return value


def is_drawn_anywhere(initializer: Any, dtype: tf.DType) -> bool:
    """Whether a server draws the values that this process would.

    Others may need what only this process has, as files or Python.

    Args:
      initializer: As of `of_shard`; one of ours says so by `is_drawn`.
      dtype: Dtype of the table.
    """
    own = getattr(initializer, "is_drawn", None)
    return new_rows.is_known(initializer, dtype) if own is None else own()


def skip_shard(initializer: Any, dtype: tf.DType) -> bool:
    """Lets `of_shard` go on as if it had made the value of a shard.

    Returns:
      Whether it could: else the value must be made.
    """
    if isinstance(initializer, whole_value.WholeValue):
        initializer.value()
        return True
    return new_rows.skip(initializer, dtype)


def _call(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: tf.DType,
    info: ShardInfo,
    name: str,
) -> Any:
    parameters = inspect.signature(initializer).parameters
    if "shard_info" in parameters:
        return initializer(shard_info=info)
    if hasattr(initializer, "support_partition"):
        # tf.constant_initializer refuses partition arguments, or takes and
        # ignores them.
        if np.isscalar(initializer.value):
            return initializer(info.shape, dtype=dtype)
        return tf.slice(
            initializer(shape, dtype=dtype), info.offset, info.shape
        )
    if "partition_shape" in parameters or (
        whole_value.takes_any_keyword(initializer)
    ):
        return initializer(
            shape,
            dtype=dtype,
            partition_shape=info.shape,
            partition_offset=info.offset,
        )
    return whole_value.ask(initializer, info.shape, dtype, name)


def _reseeded(
    initializer: Callable[..., Any], info: ShardInfo
) -> Callable[..., Any]:
    """Returns `initializer` with a seed of its own for this shard.

    The random initializers of Keras, and of TensorFlow when seeded, return
    equal numbers at each call, so every shard would hold the same rows.
    """
    if not any(info.offset) or not hasattr(initializer, "get_config"):
        return initializer
    config = initializer.get_config()
    if "seed" not in config:
        return initializer
    if isinstance(config["seed"], int):
        # Knuth's multiplicative hash: neighbouring offsets, distant seeds.
        mixed = (config["seed"] + max(info.offset) * 2654435761) % (2**31 - 1)
        config = {**config, "seed": mixed}
    elif config["seed"] is not None:
        return initializer  # A generator with state, which moves on by itself.
    return type(initializer).from_config(config)
