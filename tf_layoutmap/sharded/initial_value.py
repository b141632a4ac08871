"""Initial values of the shards of a table.

If an initializer supports shards, it is called once per shard. The values of
other initializers may depend on the shape. If such an initializer were called
once per shard, the rows would differ from the rows of an unsharded table. Such
an initializer is therefore called once for the full table. TensorFlow calls
initializers of its own sharded variables in the same way.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import new_rows

# Initializers of TensorFlow, Keras 3 and tf_keras with elements that are
# independent of the shape: they are drawn independently, or are all equal.
_BY_ELEMENT = (
    "Zeros",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "Constant",
)
_FUNCTIONS = (tf.zeros, tf.ones)
# These initializers have partition arguments, but raise an error if a program
# passes these arguments.
_REJECT_PARTITION = ("Orthogonal", "Identity")
_WARNED_SIZE = 1 << 30  # Bytes.


def supports_shards(initializer: Callable[..., Any], dtype: tf.DType) -> bool:
    """Returns whether an initializer can initialize one shard at a time."""
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
        library == "tensorflow" and kind.__name__ in _REJECT_PARTITION
    )


def takes_any_keyword(initializer: Callable[..., Any]) -> bool:
    """Returns whether an initializer accepts arbitrary keyword arguments."""
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
    """Calls an initializer with a shape, and with the dtype if it takes one.

    Raises:
      TypeError: If the initializer takes no shape.
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
    """Checks that an initializer returned the requested shape.

    Raises:
      ValueError: If the shape of the value differs from `shape`.
    """
    if tuple(value.shape) != shape:
        raise ValueError(
            "Argument `initial_value` must return a value of the requested "
            f"shape, {shape}. Received: {tuple(value.shape)} ({where})."
        )


class FullValue:
    """Value of a full table. An initializer computes it once."""

    def __init__(
        self,
        initializer: Callable[..., Any],
        shape: tuple[int, ...],
        dtype: tf.DType,
        name: str,
    ):
        """Stores the initializer, which the first call of `value` calls.

        Args:
          initializer: A callable with arguments `(shape, dtype=)` or
            `(shape)`.
          shape: Shape of the table.
          dtype: Dtype of the table.
          name: Name of the table, for messages.
        """
        self._initializer = initializer
        self._shape = shape
        self._dtype = dtype
        self._name = name
        self._value: tf.Tensor | None = None
        self._where: Any = None

    def value(self) -> tf.Tensor:
        """Returns the value of the full table.

        Raises:
          TypeError: If the initializer takes no shape.
          ValueError: If the shape of the returned value differs from the table.
        """
        # The value is computed once per graph, because a tensor of one graph
        # cannot be used in another graph.
        here = (
            None
            if tf.executing_eagerly()
            else (tf.compat.v1.get_default_graph())
        )
        if self._value is None or self._where is not here:
            self._value, self._where = self._compute(), here
        return self._value

    def _compute(self) -> tf.Tensor:
        size = math.prod(self._shape) * self._dtype.size
        if size >= _WARNED_SIZE:
            logging.warning(
                "Table %s (%d MiB) is initialized in full and then sharded, "
                "because its initializer does not accept `shard_info`.",
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
    """Returns the slice of a full value (array or tensor) for one shard."""
    if partition.is_contiguous:
        rows = slice(*partition.offsets[shard:][:2])
        return value[rows] if axis == 0 else value[:, rows]
    rows = partition.global_rows(shard)
    return (
        value[rows] if isinstance(value, np.ndarray) else tf.gather(value, rows)
    )


class ShardInfo(NamedTuple):
    """Describes the shard for which an initializer must return values.

    Attributes:
      shape: Shape of the shard.
      offset: Position of the shard's first element in the full table: one index
        per axis.
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
    """Returns the argument `initializer` with which `of_shard` is called.

    Args:
      initializer: An initializer as for `of_shard`, or one that does not
        support shards.
      shape: Shape of the full table.
      dtype: Dtype of the table.
      num_shards: Number of shards of the table.
      name: Name of the table, for messages.
    """
    if num_shards == 1 or supports_shards(initializer, dtype):
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
    """Returns the initial value of one shard.

    Args:
      initializer: The result of `for_shards`. The function uses the first of
        these argument lists that the initializer accepts:
        `(shard_info=ShardInfo)`; `(shape, dtype=, partition_shape=,
        partition_offset=)` with the shape of the full table, as for
        TensorFlow's own initializers; `(shape, dtype=)` or `(shape)` with the
        shape of the shard. If the initializer returns the full table, the
        function slices the table.
      shape: Shape of the full table.
      dtype: Dtype of the table.
      partition: The partition of the table.
      shard: Index of the shard.
      name: Name of the table, for messages.
      axis: The axis that is sharded.

    Raises:
      TypeError: The initializer accepts none of the argument lists.
      ValueError: The initializer requires an offset and the rows of a shard are
        not contiguous, or the initializer returns a value of a wrong shape.
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
            "Argument `initial_value` must not require the offset of a shard "
            "when the rows of a shard are not contiguous (placement "
            f"{partition.placement!r}); pass an array. Received: "
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
    """Returns whether an initializer has equal values in all processes.

    The values of other initializers may depend on this process, for example on
    its files or its Python objects.

    Args:
      initializer: Same as for `of_shard`. If the initializer has a method
        `is_drawn`, the result of this method is returned.
      dtype: Dtype of the table.
    """
    own = getattr(initializer, "is_drawn", None)
    return new_rows.is_known(initializer, dtype) if own is None else own()


def skip_shard(initializer: Any, dtype: tf.DType) -> bool:
    """Advances the random state in the same way as one call of `of_shard`.

    Returns:
      Whether the initializer is supported. If the result is False, the caller
      must compute the initial value of the shard.
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
        # This initializer is tf.constant_initializer, which raises an error for
        # partition arguments or ignores them.
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
    """Returns `initializer` with a separate seed for this shard.

    Keras' random initializers return equal numbers in each call, and also
    TensorFlow's if they have a seed. With the same seed, all shards would
    contain the same rows.
    """
    if not any(info.offset) or not hasattr(initializer, "get_config"):
        return initializer
    config = initializer.get_config()
    if "seed" not in config:
        return initializer
    if isinstance(config["seed"], int):
        # Knuth's multiplicative hash maps close offsets to distant seeds.
        mixed = (config["seed"] + max(info.offset) * 2654435761) % (2**31 - 1)
        config = {**config, "seed": mixed}
    elif config["seed"] is not None:
        return initializer  # A generator advances in each call.
    return type(initializer).from_config(config)
