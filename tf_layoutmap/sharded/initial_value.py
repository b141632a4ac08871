"""Initial values of the shards of a table.

The shards of a table contain the rows that the initializer returns for the full
table, for any number of shards. Random initializers of TensorFlow, Keras 3 and
tf_keras compute each shard separately (`DrawnValue`). All other initializers
are called once for the full table, and then sharded (`FullValue`), except
callables that accept the position of a shard as arguments.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap._core import random_tensors
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import creation_progress

_FUNCTIONS = (tf.zeros, tf.ones)
_WARNED_SIZE = 1 << 30  # Bytes.
# Arguments with which a callable declares that it computes single shards.
_SHARD_ARGUMENTS = {"shard_info", "partition_shape", "partition_offset"}


def accepts_shards(initializer: Callable[..., Any]) -> bool:
    """Returns whether a callable has arguments for the position of a shard."""
    # TensorFlow's initializers read partition arguments from `**kwargs`, so
    # their signatures do not contain these arguments.
    return bool(
        _SHARD_ARGUMENTS & set(inspect.signature(initializer).parameters)
    )


def compute_full_value(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: tf.DType,
    name: str,
) -> Any:
    """Calls an initializer with a shape, and with the dtype if supported.

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
    """Value of a full table, which an initializer computes once."""

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
          ValueError: If the returned value and the table have different shapes.
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

    def draw_seed(self) -> None:
        """Advances the state of the initializer once for all shards."""
        self.value()

    def shard(
        self, partition: RowPartition, shard: int, axis: int
    ) -> tf.Tensor:
        """Returns the value of one shard."""
        return shard_of_value(self.value(), partition, shard, axis)


class DrawnValue(FullValue):
    """Random value of a full table, of which each shard computes its block.

    The initializer must be one that `random_tensors` supports. If its seed has
    an unknown type, the full value is computed.
    """

    def __init__(
        self,
        initializer: Callable[..., Any],
        shape: tuple[int, ...],
        dtype: tf.DType,
        name: str,
    ):
        """Stores the initializer, whose seed is drawn for the first shard."""
        super().__init__(initializer, shape, dtype, name)
        self._tensor: random_tensors.RandomTensor | None = None
        self._is_seed_drawn = False

    def draw_seed(self) -> None:
        """Draws the seed of the initializer once."""
        if self._is_seed_drawn:
            return
        with tf.init_scope():
            self._tensor = random_tensors.random_tensor(
                self._initializer, self._shape, self._dtype
            )
        if self._tensor is None:
            self.value()
        self._is_seed_drawn = True

    def block(self, start: int, num_rows: int) -> tf.Tensor | None:
        """Returns rows of the table; None if only all rows can be computed."""
        self.draw_seed()
        if self._tensor is None:
            return None
        return self._tensor.block([start, 0], [num_rows, *self._shape[1:]])

    def shard(
        self, partition: RowPartition, shard: int, axis: int
    ) -> tf.Tensor:
        """Returns the value of one shard, computed on the current device."""
        self.draw_seed()
        if self._tensor is None:
            return super().shard(partition, shard, axis)
        start = [0] * len(self._shape)
        shape = list(self._shape)
        shape[axis] = partition.sizes[shard]
        if partition.is_contiguous:
            start[axis] = partition.offsets[shard]
            return self._tensor.block(start, shape)
        rows = partition.global_rows(shard)
        if partition.placement == "mod" and len(rows):
            start[0] = int(rows[0])
            return self._tensor.block(start, shape, partition.num_shards)
        # For other placements, no arithmetic rule describes the rows of a
        # shard.
        return tf.gather(
            self._tensor.block([0] * len(shape), self._shape), rows
        )


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
    """Returns the `initializer` argument of `of_shard` for one table.

    Args:
      initializer: Any callable that returns initial values.
      shape: Shape of the full table.
      dtype: Dtype of the table.
      num_shards: Number of shards of the table.
      name: Name of the table, for messages.
    """
    if isinstance(initializer, FullValue):
        return initializer
    if tf.executing_eagerly() and random_tensors.is_known(initializer, dtype):
        return DrawnValue(initializer, shape, dtype, name)
    if (
        num_shards == 1
        or initializer in _FUNCTIONS
        or (accepts_shards(initializer))
    ):
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
      initializer: The result of `for_shards`. A callable is called with the
        first of these argument lists that its signature accepts:
        `(shard_info=ShardInfo)`; `(shape, dtype=, partition_shape=,
        partition_offset=)` with the shape of the full table; `(shape, dtype=)`
        or `(shape)` with the shape of the shard. If the callable returns the
        full table, the table is sliced.
      shape: Shape of the full table.
      dtype: Dtype of the table.
      partition: The partition of the table.
      shard: Index of the shard.
      name: Name of the table, for messages.
      axis: The axis that is sharded.

    Raises:
      TypeError: If the initializer accepts none of the argument lists.
      ValueError: If the initializer requires an offset and the rows of a shard
        are not contiguous, or the initializer returns a value of a wrong shape.
    """
    part_shape, offset = list(shape), [0] * len(shape)
    part_shape[axis] = partition.sizes[shard]
    offset[axis] = partition.offsets[shard]
    info = ShardInfo(tuple(part_shape), tuple(offset))
    num_bytes = math.prod(info.shape) * dtype.size
    if isinstance(initializer, DrawnValue):
        value = initializer.shard(partition, shard, axis)
        if random_tensors.is_on_server():
            # The server counts the bytes of the op in its own process.
            creation_progress.add_progress(num_bytes)
        return value
    if isinstance(initializer, FullValue):
        value = initializer.shard(partition, shard, axis)
        creation_progress.add_progress(num_bytes)
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
    value = tf.convert_to_tensor(
        _call(initializer, shape, dtype, info, name), dtype
    )
    creation_progress.add_progress(num_bytes)
    if tuple(value.shape) == shape:
        value = shard_of_value(value, partition, shard, axis)
    check_full_shape(value, info.shape, f"table {name!r}, shard {shard}")
    return value


def block_of_shard(
    initializer: Any,
    shape: tuple[int, ...],
    partition: RowPartition,
    shard: int,
    start: int,
    stop: int,
) -> tf.Tensor | None:
    """Returns some rows of the initial value of one shard.

    Args:
      initializer: The result of `for_shards`.
      shape: Shape of the full table.
      partition: The partition of the table, with contiguous rows.
      shard: Index of the shard.
      start: First row of the shard that is returned.
      stop: End of these rows.

    Returns:
      The rows. None if `initializer` cannot compute them without the other rows
      of the shard.
    """
    if not isinstance(initializer, DrawnValue):
        return None
    return initializer.block(partition.offsets[shard] + start, stop - start)


def is_drawn_anywhere(initializer: Any, dtype: tf.DType) -> bool:
    """Returns whether a parameter server can compute the initial values.

    The values of other initializers may depend on this process, for example on
    its files or its Python objects.

    Args:
      initializer: A callable, or the result of `for_shards`.
      dtype: Dtype of the table.
    """
    return isinstance(initializer, DrawnValue) or (
        not isinstance(initializer, FullValue)
        and random_tensors.is_known(initializer, dtype)
    )


def skip_shard(initializer: Any) -> bool:
    """Advances the random state as a call of `of_shard` for a shard does.

    Args:
      initializer: The result of `for_shards`.

    Returns:
      Whether the initializer supports this. If it does not, the caller must
      compute the value.
    """
    if isinstance(initializer, FullValue):
        initializer.draw_seed()
        return True
    return False


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
    if "partition_shape" in parameters:
        return initializer(
            shape,
            dtype=dtype,
            partition_shape=info.shape,
            partition_offset=info.offset,
        )
    return compute_full_value(initializer, info.shape, dtype, name)
