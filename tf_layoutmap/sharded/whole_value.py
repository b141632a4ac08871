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


def ask(
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


def check_shape(value: tf.Tensor, shape: tuple[int, ...], where: str) -> None:
    """Refuses a value of another shape than was asked for.

    Raises:
      ValueError: If it has one.
    """
    if tuple(value.shape) != shape:
        raise ValueError(
            "Argument `initial_value` must return the shape it is asked for, "
            f"{shape}. Received: {tuple(value.shape)} ({where})."
        )


class WholeValue:
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
            ask(self._initializer, self._shape, self._dtype, self._name),
            self._dtype,
        )
        check_shape(value, self._shape, f"table {self._name!r}")
        return value


def cut(value: Any, partition: RowPartition, shard: int, axis: int = 0) -> Any:
    """Returns what a shard has of a whole value, an array or a tensor."""
    if partition.is_contiguous:
        rows = slice(*partition.offsets[shard:][:2])
        return value[rows] if axis == 0 else value[:, rows]
    rows = partition.global_rows(shard)
    return (
        value[rows] if isinstance(value, np.ndarray) else tf.gather(value, rows)
    )
