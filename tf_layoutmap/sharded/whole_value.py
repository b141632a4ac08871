"""The first value of a whole table, for initializers that know no shards.

What such a callable returns may depend on the shape, so that asking it for
each shard would give other rows than one table has: it is asked once, as
TensorFlow does for the shards of its own variables.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import new_rows

# Of TensorFlow and of both Keras: each element is drawn by itself, whatever
# the shape, or is the same.
_BY_ELEMENT = ("Zeros", "Ones", "RandomNormal", "RandomUniform",
               "TruncatedNormal", "Constant")
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
            or new_rows.is_known(initializer, dtype)):
        return True
    if library in ("keras", "tf_keras") and kind.__name__ in _BY_ELEMENT:
        return np.ndim(getattr(initializer, "value", 0)) == 0
    takes_any_keyword = any(
        one.kind is inspect.Parameter.VAR_KEYWORD
        for one in parameters.values())
    return takes_any_keyword and not (
        library == "tensorflow" and kind.__name__ in _REFUSING)


class WholeValue:
    """Asks an initializer for a whole table, once, and keeps its value."""

    def __init__(self, initializer: Callable[..., Any],
                 shape: tuple[int, ...], dtype: tf.DType, name: str):
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
        here = None if tf.executing_eagerly() else (
            tf.compat.v1.get_default_graph())
        if self._value is None or self._where is not here:
            self._value, self._where = self._ask(), here
        return self._value

    def _ask(self) -> tf.Tensor:
        parameters = inspect.signature(self._initializer).parameters
        if not parameters:
            raise TypeError(
                "Argument `initial_value` must take a shape when it is "
                f"callable. Received: {self._initializer!r} without "
                f"parameters (table {self._name!r}).")
        size = math.prod(self._shape) * self._dtype.size
        if size >= _WARNED_SIZE:
            logging.warning(
                "The whole table %s is made at once, %d MiB, and then divided:"
                " its initializer takes no `shard_info`.",
                self._name, size >> 20)
        value = tf.convert_to_tensor(
            self._initializer(self._shape, dtype=self._dtype)
            if "dtype" in parameters else self._initializer(self._shape),
            self._dtype)
        if tuple(value.shape) != self._shape:
            raise ValueError(
                "Argument `initial_value` must return the shape it is asked "
                f"for, {self._shape}. Received: {tuple(value.shape)} (table "
                f"{self._name!r}).")
        return value


def cut(value: Any, partition: RowPartition, shard: int, axis: int = 0) -> Any:
    """Returns what a shard has of a whole value, an array or a tensor."""
    if partition.is_contiguous:
        rows = slice(*partition.offsets[shard:][:2])
        return value[rows] if axis == 0 else value[:, rows]
    rows = partition.global_rows(shard)
    return (value[rows] if isinstance(value, np.ndarray)
            else tf.gather(value, rows))
