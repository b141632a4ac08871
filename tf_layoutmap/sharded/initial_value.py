"""The first value of each shard; that of a whole table only where needed."""

# DOC-MERGE: The first value of a whole table, for initializers that know no shards.
#
# What such a callable returns may depend on the shape, so that asking it for
# each shard would give other rows than one table has: it is asked once, as
# TensorFlow does for the shards of its own variables.
#
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import new_rows

# Of TensorFlow and of both Keras: each element is drawn by itself, whatever
# the shape, or is the same.
_BY_ELEMENT = (
    "Zeros",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "Constant",
)
_FUNCTIONS = (tf.zeros, tf.ones)
# They take partition arguments only to refuse them.
_REFUSING = ("Orthogonal", "Identity")
_WARNED_SIZE = 1 << 30  # Bytes.


def knows_shards(initializer: Callable[..., Any], dtype: tf.DType) -> bool:
    """Whether an initializer can be asked for one shard at a time."""
    parameters = inspect.signature(initializer).parameters
    kind = type(initializer)
    library = kind.__module__.partition(".")[0]
    if {"shard_info", "partition_shape"} & set(parameters) or (
        hasattr(initializer, "support_partition")
        or initializer in _FUNCTIONS
        or new_rows.is_known(initializer, dtype)
    ):
        return True
    if library in ("keras", "tf_keras") and kind.__name__ in _BY_ELEMENT:
        return np.ndim(getattr(initializer, "value", 0)) == 0
    return takes_any_keyword(initializer) and not (
        library == "tensorflow" and kind.__name__ in _REFUSING
    )


def takes_any_keyword(initializer: Callable[..., Any]) -> bool:
    """Whether an initializer may be given partition arguments unasked."""
    return any(
        one.kind is inspect.Parameter.VAR_KEYWORD
        for one in inspect.signature(initializer).parameters.values()
    )


def compute_full_value(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: tf.DType,
    name: str,
) -> Any:
    """Calls an initializer for a shape, with the dtype if it takes one.

    Raises:
      TypeError: If it takes no shape.
    """
    parameters = inspect.signature(initializer).parameters
    if not parameters:
        raise TypeError(
            "Argument `initial_value` must take a shape when it is callable. "
            f"Received: {initializer!r} without parameters (table {name!r})."
        )
    if "dtype" in parameters:
        return initializer(shape, dtype=dtype)
    return initializer(shape)


def check_full_shape(
    value: tf.Tensor, shape: tuple[int, ...], where: str
) -> None:
    """Refuses a value of another shape than was asked for.

    Raises:
      ValueError: If it has one.
    """
    if tuple(value.shape) != shape:
        raise ValueError(
            "Argument `initial_value` must return the shape it is asked for, "
            f"{shape}. Received: {tuple(value.shape)} ({where})."
        )


class FullValue:
    """Asks an initializer for a whole table, once, and keeps its value."""

    def __init__(
        self,
        initializer: Callable[..., Any],
        shape: tuple[int, ...],
        dtype: tf.DType,
        name: str,
    ):
        """Takes the initializer; the first shard asks it.

        Args:
          initializer: Takes `(shape, dtype=)` or `(shape)`.
          shape: Of the table.
          dtype: Of the table.
          name: Of the table, for messages.
        """
        self._initializer = initializer
        self._shape = shape
        self._dtype = dtype
        self._name = name
        self._value: tf.Tensor | None = None
        self._where: Any = None

    def value(self) -> tf.Tensor:
        """Returns the whole table.

        Raises:
          TypeError: If the initializer takes no shape.
          ValueError: If it returns another one.
        """
        # A tensor of a function is none of another's.
        here = (
            None
            if tf.executing_eagerly()
            else (tf.compat.v1.get_default_graph())
        )
        if self._value is None or self._where is not here:
            self._value, self._where = self._ask(), here
        return self._value

    def _ask(self) -> tf.Tensor:
        size = math.prod(self._shape) * self._dtype.size
        if size >= _WARNED_SIZE:
            logging.warning(
                "The whole table %s is made at once, %d MiB, and then divided:"
                " its initializer takes no `shard_info`.",
                self._name,
                size >> 20,
            )
        value = tf.convert_to_tensor(
            compute_full_value(
                self._initializer, self._shape, self._dtype, self._name
            ),
            self._dtype,
        )
        check_full_shape(value, self._shape, f"table {self._name!r}")
        return value


def shard_of_value(
    value: Any, partition: RowPartition, shard: int, axis: int = 0
) -> Any:
    """Returns what a shard has of a whole value, an array or a tensor."""
    if partition.is_contiguous:
        rows = slice(*partition.offsets[shard:][:2])
        return value[rows] if axis == 0 else value[:, rows]
    rows = partition.global_rows(shard)
    return (
        value[rows] if isinstance(value, np.ndarray) else tf.gather(value, rows)
    )


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
) -> Callable[..., Any] | FullValue:
    """Returns what `of_shard` is asked with for each shard of one table.

    Args:
      initializer: As of `of_shard`, or one that knows no shards.
      shape: Shape of the whole table.
      dtype: Dtype of the table.
      num_shards: Of the table.
      name: Of the table, for messages.
    """
    if num_shards == 1 or knows_shards(initializer, dtype):
        return initializer
    return FullValue(initializer, shape, dtype, name)


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
    if isinstance(initializer, FullValue):
        value = shard_of_value(initializer.value(), partition, shard, axis)
        new_rows.add_progress(math.prod(info.shape) * dtype.size)
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
    new_rows.add_progress(math.prod(info.shape) * dtype.size)
    if tuple(value.shape) == shape:
        value = shard_of_value(value, partition, shard, axis)
    check_full_shape(value, info.shape, f"table {name!r}, shard {shard}")
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
    if isinstance(initializer, FullValue):
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
    if "partition_shape" in parameters or (takes_any_keyword(initializer)):
        return initializer(
            shape,
            dtype=dtype,
            partition_shape=info.shape,
            partition_offset=info.offset,
        )
    return compute_full_value(initializer, info.shape, dtype, name)


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
