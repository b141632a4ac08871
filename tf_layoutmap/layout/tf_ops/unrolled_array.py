"""An array in a function for a mesh: a list of tensors.

DTensor cannot place the TensorLists that a `tf.TensorArray` is made of.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import error_messages, pinning
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.tf_ops.known_values import evaluated


def where() -> str:
    """Returns in which layer a loop or an array is, for messages."""
    scope = tf.get_current_name_scope()
    return f"in {scope!r}" if scope else "outside of any layer"


def unknown_steps() -> str:
    """Returns what is said of a loop that cannot be unrolled."""
    return (
        "DTensor cannot place a loop on a mesh whose number of steps is not "
        f"known while it is traced. Received: one {where()}. Give its input "
        "a static number of time steps (or elements), or run the layer "
        "outside the scope."
    )


class UnrolledArray:
    """What a `tf.TensorArray` does, with a Python list of tensors.

    As in other graphs, a write gives a new array and leaves this as it was.
    """

    def __init__(
        self,
        mesh: Mesh | None,
        dtype: Any,
        size: Any = None,
        dynamic_size: Any = None,
        clear_after_read: Any = None,
        tensor_array_name: Any = None,
        handle: Any = None,
        flow: Any = None,
        infer_shape: bool = True,
        element_shape: Any = None,
        colocate_with_first_write_call: bool = True,
        name: Any = None,
    ):
        del clear_after_read, tensor_array_name, handle, flow, name
        self._mesh = mesh
        self._dtype = tf.as_dtype(dtype).base_dtype
        self._infer_shape = infer_shape
        self._element_shape = [tf.TensorShape(element_shape)]
        self._dynamic_size = bool(dynamic_size)
        self._colocate_with_first_write_call = colocate_with_first_write_call
        length = evaluated(0 if size is None else size)
        if length is None:
            raise error_messages.UnsupportedByDTensorError(unknown_steps())
        self._items: list[Any] = [None] * int(length)

    def _with(self, items: Sequence[Any]) -> tf.TensorArray:
        array = tf.TensorArray(
            self._dtype,
            size=len(items),
            dynamic_size=self._dynamic_size,
            infer_shape=self._infer_shape,
        )
        unrolled = array._implementation
        unrolled._items = list(items)
        unrolled._element_shape = self._element_shape
        return array

    @property
    def dtype(self) -> tf.DType:
        return self._dtype

    @property
    def flow(self) -> Any:
        # Whoever asks hands the array to a branch or a loop of TensorFlow's.
        raise error_messages.UnsupportedByDTensorError(
            "On a mesh a tf.TensorArray cannot leave a tf.cond, or enter a "
            "loop whose number of steps is not known while it is traced. "
            f"Received: one {where()}."
        )

    handle = None

    @property
    def element_shape(self) -> tf.TensorShape:
        return self._element_shape[0]

    def _position(self, index: Any, verb: str, size: int) -> int:
        position = int(index)
        if not 0 <= position < size:
            raise IndexError(
                f"A tf.TensorArray of {len(self._items)} elements cannot "
                f"{verb} the one numbered {position}."
            )
        return position

    def _item(self, position: int) -> Any:
        item = self._items[position]
        if item is not None:
            return item
        if not self.element_shape.is_fully_defined():
            raise ValueError(
                f"Element {position} of a tf.TensorArray was never written, "
                "and its shape is not known."
            )
        return tf.zeros(self.element_shape, self._dtype)

    def _checked(self, value: Any) -> Any:
        value = tf.convert_to_tensor(value, self._dtype)
        if not self.element_shape.is_compatible_with(value.shape):
            raise ValueError(
                f"Elements of this tf.TensorArray have the shape "
                f"{self.element_shape}. Received: {value.shape}."
            )
        if self._infer_shape:
            self._element_shape[0] = self.element_shape.merge_with(value.shape)
        return value

    def identity(self) -> tf.TensorArray:
        return self._with(self._items)

    def grad(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "TensorArray.grad is of TensorFlow 1; use tf.GradientTape."
        )

    def read(self, index: Any, name: str | None = None) -> Any:
        static = evaluated(index)
        if static is None:
            # In a tf.cond, say: the index is data.
            return tf.gather(self.stack(), index, name=name)
        return self._item(self._position(static, "read", len(self._items)))

    def write(
        self, index: Any, value: Any, name: str | None = None
    ) -> tf.TensorArray:
        del name
        static = evaluated(index)
        if static is None:
            raise error_messages.UnsupportedByDTensorError(
                "On a mesh the index of TensorArray.write must be known "
                f"while a function is traced. Received: {index}, {where()}."
            )
        return self._written([static], [value])

    def _written(
        self, indices: Sequence[Any], values: Sequence[Any]
    ) -> tf.TensorArray:
        items = list(self._items)
        for index, value in zip(indices, values):
            if self._dynamic_size:
                items += [None] * (int(index) + 1 - len(items))
            items[self._position(index, "write", len(items))] = self._checked(
                value
            )
        return self._with(items)

    def stack(self, name: str | None = None) -> Any:
        if not self._items:
            return tf.zeros([0, *self.element_shape], self._dtype)
        return tf.stack(
            [self._item(i) for i in range(len(self._items))], name=name
        )

    def gather(self, indices: Any, name: str | None = None) -> Any:
        static = evaluated(indices)
        if static is None:
            return tf.gather(self.stack(), indices, name=name)
        return tf.stack(
            [self.read(int(i)) for i in np.asarray(static)], name=name
        )

    def concat(self, name: str | None = None) -> Any:
        return tf.concat(
            [self._item(i) for i in range(len(self._items))], 0, name=name
        )

    def unstack(self, value: Any, name: str | None = None) -> tf.TensorArray:
        value = _first_whole(
            tf.convert_to_tensor(value, self._dtype), self._mesh
        )
        if value.shape.rank is None or value.shape[0] is None:
            raise error_messages.UnsupportedByDTensorError(unknown_steps())
        items = [self._checked(x) for x in tf.unstack(value, name=name)]
        if not self._dynamic_size and len(items) > len(self._items):
            raise ValueError(
                f"A tf.TensorArray of {len(self._items)} elements cannot "
                f"hold {len(items)}."
            )
        return self._with(items)

    def scatter(
        self, indices: Any, value: Any, name: str | None = None
    ) -> tf.TensorArray:
        static = evaluated(indices)
        if static is None:
            raise error_messages.UnsupportedByDTensorError(
                "On a mesh the indices of TensorArray.scatter must be known "
                f"while a function is traced. Received: {indices}, "
                f"{where()}."
            )
        value = _first_whole(
            tf.convert_to_tensor(value, self._dtype), self._mesh
        )
        return self._written(
            list(np.asarray(static)), tf.unstack(value, name=name)
        )

    def split(
        self, value: Any, lengths: Any, name: str | None = None
    ) -> tf.TensorArray:
        static = evaluated(lengths)
        if static is None:
            raise error_messages.UnsupportedByDTensorError(
                "On a mesh the lengths of TensorArray.split must be known "
                f"while a function is traced. Received: {lengths}, "
                f"{where()}."
            )
        value = pinning.whole(
            tf.convert_to_tensor(value, self._dtype), self._mesh
        )
        return self._with(
            tf.split(value, [int(n) for n in np.asarray(static)], name=name)
        )

    def size(self, name: str | None = None) -> Any:
        return tf.constant(len(self._items), name=name)

    def close(self, name: str | None = None) -> None:
        del name


def _first_whole(x: Any, mesh: Mesh | None) -> Any:
    """Returns `x` with its first dimension whole and the others as they are.

    It is taken apart. Behind it a batch may be cut, as in recurrent layers.
    """
    if not tf.is_symbolic_tensor(x) or not x.shape.rank:
        return x
    dtensor = tf.experimental.dtensor
    return dtensor.relayout(
        x,
        dtensor.Layout(
            [dtensor.UNSHARDED, *[dtensor.MATCH] * (x.shape.rank - 1)], mesh
        ),
    )
