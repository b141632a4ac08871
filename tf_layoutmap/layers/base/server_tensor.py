"""Tensors of variable size on parameter servers."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private


class ServerTensor(tf_private.Trackable):
    """A tensor on a parameter server whose first size can change.

    The server stores the serialized tensor in a string scalar. In TensorFlow
    2.21, a server process aborts when it receives the handle of a variable with
    an unknown size. In a checkpoint, the object has the same form as a
    `tf.Variable` with the value of the tensor.

    Attributes:
      dtype: Dtype of the tensor.
    """

    def __init__(self, initial_value: tf.Tensor, *, name: str):
        """Creates the tensor on the device in scope.

        Args:
          initial_value: Initial value. All values have the sizes of this value,
            except for the first dimension.
          name: Name of the variable.
        """
        self.dtype = initial_value.dtype
        self._shape = [None, *initial_value.shape[1:]]
        self._bytes = tf_private.ResourceVariable(
            tf.io.serialize_tensor(initial_value), trainable=False, name=name
        )

    def value(self) -> tf.Tensor:
        """Returns the value."""
        return tf.ensure_shape(
            tf.io.parse_tensor(self._bytes.read_value(), self.dtype),
            self._shape,
        )

    def numpy(self) -> Any:
        """Returns the value as an array."""
        return self.value().numpy()

    def assign(self, value: Any) -> None:
        """Replaces the value."""
        value = tf.ensure_shape(tf.cast(value, self.dtype), self._shape)
        self._bytes.assign(tf.io.serialize_tensor(value))

    def _copy_trackable_to_cpu(
        self, object_map: MutableMapping[Any, Any]
    ) -> None:
        # An asynchronous save writes the copy of the variable.
        self._bytes._copy_trackable_to_cpu(object_map)
        if self not in object_map:
            object_map[self] = copy.copy(self)
            object_map[self]._bytes = object_map[self._bytes]

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {tf_private.VARIABLE_VALUE_KEY: self.value()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored[tf_private.VARIABLE_VALUE_KEY])
