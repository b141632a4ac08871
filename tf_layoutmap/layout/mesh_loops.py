"""Loops on a mesh, unrolled while a function is traced.

A loop keeps what it reads, writes and needs for its gradient in lists of
tensors, which DTensor cannot place. Where the number of steps is known while
tracing, as it is in `fit`, which keeps all shapes, the steps stand one behind
the other instead. TensorFlow's Python makes all loops in one place: recurrent
layers, `tf.while_loop`, `map_fn`, `scan`, AutoGraph's and those of keras.ops.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout import mesh_ops, pinning, refusals

# A longer loop would be compiled for hours.
MOST_STEPS = 2000

_lock = threading.Lock()
_installed = False


def install(mesh_of_trace: Callable[[], Any]) -> None:
    """Replaces TensorFlow's loops and arrays, the first time it is called.

    Args:
      mesh_of_trace: Returns the `dtensor.Mesh` that this thread traces for, or
        None, where both stay as they are.
    """
    global _installed
    with _lock:
        if _installed:
            return
        loops, arrays = _tf_private.while_v2, _tf_private.tensor_array_ops
        in_graphs = loops.while_loop
        array_in_graphs = arrays._GraphTensorArrayV2

        def mesh_now() -> Any:
            mesh = None if tf.executing_eagerly() else mesh_of_trace()
            return None if mesh_ops._of_a_dataset() else mesh

        @functools.wraps(in_graphs)
        def while_loop(cond: Any, body: Any, loop_vars: Any,
                       **options: Any) -> Any:
            if mesh_now() is None:
                return in_graphs(cond, body, loop_vars, **options)
            return _while_loop(in_graphs, cond, body, loop_vars, **options)

        class GraphTensorArray(array_in_graphs):
            """TensorFlow's, or on a mesh one that is a list of tensors."""

            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                mesh = mesh_now()
                if mesh is None or kwargs.get("flow") is not None:
                    # Of one that there is, inside of a loop, say.
                    return super().__new__(cls)
                return UnrolledArray(mesh, *args, **kwargs)

        loops.while_loop = while_loop
        arrays._GraphTensorArrayV2 = GraphTensorArray
        _installed = True


def known(x: Any) -> Any:
    """Returns the value of `x` if it is known while tracing, or None."""
    if not tf.is_symbolic_tensor(x):
        return x.numpy() if isinstance(x, tf.Tensor) and (
            not pinning.on_mesh(x)) else x if not tf.is_tensor(x) else None
    value = tf.get_static_value(x)
    return _tf_private.evaluated_constant(x) if value is None else value


def _while_loop(original: Callable[..., Any], cond: Callable[..., Any],
                body: Callable[..., Any], loop_vars: Any, *,
                maximum_iterations: Any = None,
                return_same_structure: bool = True, **options: Any) -> Any:
    """`tf.while_loop`, its steps one behind the other if they are known."""
    most = None if maximum_iterations is None else known(maximum_iterations)
    values = tf.nest.map_structure(_as_tensor, loop_vars)
    has_arrays = any(isinstance(x, tf.TensorArray)
                     for x in tf.nest.flatten(values))
    more = (known(cond(*values)) if maximum_iterations is None or
            most is not None else None)
    if more is None:
        if has_arrays:
            raise refusals.UnsupportedByDTensorError(_unknown())
        return original(
            cond, body, loop_vars, maximum_iterations=maximum_iterations,
            return_same_structure=return_same_structure, **options)
    steps = 0
    while more and (most is None or steps < most):
        if steps == MOST_STEPS:
            raise refusals.UnsupportedByDTensorError(
                f"A loop on a mesh has at most {MOST_STEPS} steps, because "
                f"each is compiled. Received: more, {_where()}. Shorten the "
                "sequences, or take the layer out of the scope.")
        after = body(*values)
        # As TensorFlow does: a body of one variable may return it bare.
        if not isinstance(after, list | tuple):
            after = [after]
        tf.nest.assert_same_structure(
            list(values), list(after), check_types=False)
        values = tf.nest.pack_sequence_as(values, [
            _after(x, was) for x, was in zip(
                tf.nest.flatten(after), tf.nest.flatten(values))])
        steps += 1
        more = known(cond(*values))
        if more is None:
            raise refusals.UnsupportedByDTensorError(_unknown())
    if not return_same_structure and len(values) == 1:
        return values[0]
    return values


def _as_tensor(x: Any) -> Any:
    return x if isinstance(x, tf.TensorArray) or _is_composite(x) else (
        tf.convert_to_tensor(x))


def _is_composite(x: Any) -> bool:
    return isinstance(x, _tf_private.CompositeTensor) and not isinstance(
        x, tf.Variable)


def _after(x: Any, before: Any) -> Any:
    """Returns a loop variable after a step; counters as constants."""
    if isinstance(x, tf.TensorArray) or _is_composite(x):
        return x
    x = tf.convert_to_tensor(x, before.dtype)
    if x.shape.rank == 0 and (x.dtype.is_integer or x.dtype.is_bool):
        value = known(x)
        if value is not None:
            return tf.constant(value, x.dtype)
    return x


def _where() -> str:
    scope = tf.get_current_name_scope()
    return f"in {scope!r}" if scope else "outside of any layer"


def _unknown() -> str:
    return (
        "DTensor cannot place a loop on a mesh whose number of steps is not "
        f"known while it is traced. Received: one {_where()}. Give its input "
        "a static number of time steps (or elements), or run the layer "
        "outside the scope.")


class UnrolledArray:
    """What a `tf.TensorArray` does, with a Python list of tensors.

    As in other graphs, a write gives a new array and leaves this as it was.
    """

    def __init__(self, mesh: Any, dtype: Any, size: Any = None,
                 dynamic_size: Any = None, clear_after_read: Any = None,
                 tensor_array_name: Any = None, handle: Any = None,
                 flow: Any = None, infer_shape: bool = True,
                 element_shape: Any = None,
                 colocate_with_first_write_call: bool = True,
                 name: Any = None):
        del clear_after_read, tensor_array_name, handle, flow, name
        self._mesh = mesh
        self._dtype = tf.as_dtype(dtype).base_dtype
        self._infer_shape = infer_shape
        self._element_shape = [tf.TensorShape(element_shape)]
        self._dynamic_size = bool(dynamic_size)
        self._colocate_with_first_write_call = colocate_with_first_write_call
        length = known(0 if size is None else size)
        if length is None:
            raise refusals.UnsupportedByDTensorError(_unknown())
        self._items: list[Any] = [None] * int(length)

    def _with(self, items: Sequence[Any]) -> tf.TensorArray:
        array = tf.TensorArray(
            self._dtype, size=len(items), dynamic_size=self._dynamic_size,
            infer_shape=self._infer_shape)
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
        raise refusals.UnsupportedByDTensorError(
            "On a mesh a tf.TensorArray cannot leave a tf.cond, or enter a "
            "loop whose number of steps is not known while it is traced. "
            f"Received: one {_where()}.")

    handle = None

    @property
    def element_shape(self) -> tf.TensorShape:
        return self._element_shape[0]

    def _position(self, index: Any, verb: str, size: int) -> int:
        position = int(index)
        if not 0 <= position < size:
            raise IndexError(
                f"A tf.TensorArray of {len(self._items)} elements cannot "
                f"{verb} the one numbered {position}.")
        return position

    def _item(self, position: int) -> Any:
        item = self._items[position]
        if item is not None:
            return item
        if not self.element_shape.is_fully_defined():
            raise ValueError(
                f"Element {position} of a tf.TensorArray was never written, "
                "and its shape is not known.")
        return tf.zeros(self.element_shape, self._dtype)

    def _checked(self, value: Any) -> Any:
        value = tf.convert_to_tensor(value, self._dtype)
        if not self.element_shape.is_compatible_with(value.shape):
            raise ValueError(
                f"Elements of this tf.TensorArray have the shape "
                f"{self.element_shape}. Received: {value.shape}.")
        if self._infer_shape:
            self._element_shape[0] = self.element_shape.merge_with(
                value.shape)
        return value

    def identity(self) -> tf.TensorArray:
        return self._with(self._items)

    def grad(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "TensorArray.grad is of TensorFlow 1; use tf.GradientTape.")

    def read(self, index: Any, name: str | None = None) -> Any:
        static = known(index)
        if static is None:
            # In a tf.cond, say: the index is data.
            return tf.gather(self.stack(), index, name=name)
        return self._item(self._position(static, "read", len(self._items)))

    def write(self, index: Any, value: Any,
              name: str | None = None) -> tf.TensorArray:
        del name
        static = known(index)
        if static is None:
            raise refusals.UnsupportedByDTensorError(
                "On a mesh the index of TensorArray.write must be known "
                f"while a function is traced. Received: {index}, {_where()}.")
        return self._written([static], [value])

    def _written(self, indices: Sequence[Any],
                 values: Sequence[Any]) -> tf.TensorArray:
        items = list(self._items)
        for index, value in zip(indices, values):
            if self._dynamic_size:
                items += [None] * (int(index) + 1 - len(items))
            items[self._position(index, "write", len(items))] = (
                self._checked(value))
        return self._with(items)

    def stack(self, name: str | None = None) -> Any:
        if not self._items:
            return tf.zeros([0, *self.element_shape], self._dtype)
        return tf.stack([self._item(i) for i in range(len(self._items))],
                        name=name)

    def gather(self, indices: Any, name: str | None = None) -> Any:
        static = known(indices)
        if static is None:
            return tf.gather(self.stack(), indices, name=name)
        return tf.stack([self.read(int(i)) for i in np.asarray(static)],
                        name=name)

    def concat(self, name: str | None = None) -> Any:
        return tf.concat(
            [self._item(i) for i in range(len(self._items))], 0, name=name)

    def unstack(self, value: Any, name: str | None = None) -> tf.TensorArray:
        value = _first_whole(tf.convert_to_tensor(value, self._dtype),
                             self._mesh)
        if value.shape.rank is None or value.shape[0] is None:
            raise refusals.UnsupportedByDTensorError(_unknown())
        items = [self._checked(x) for x in tf.unstack(value, name=name)]
        if not self._dynamic_size and len(items) > len(self._items):
            raise ValueError(
                f"A tf.TensorArray of {len(self._items)} elements cannot "
                f"hold {len(items)}.")
        return self._with(items)

    def scatter(self, indices: Any, value: Any,
                name: str | None = None) -> tf.TensorArray:
        static = known(indices)
        if static is None:
            raise refusals.UnsupportedByDTensorError(
                "On a mesh the indices of TensorArray.scatter must be known "
                f"while a function is traced. Received: {indices}, "
                f"{_where()}.")
        value = _first_whole(
            tf.convert_to_tensor(value, self._dtype), self._mesh)
        return self._written(
            list(np.asarray(static)), tf.unstack(value, name=name))

    def split(self, value: Any, lengths: Any,
              name: str | None = None) -> tf.TensorArray:
        static = known(lengths)
        if static is None:
            raise refusals.UnsupportedByDTensorError(
                "On a mesh the lengths of TensorArray.split must be known "
                f"while a function is traced. Received: {lengths}, "
                f"{_where()}.")
        value = pinning.whole(
            tf.convert_to_tensor(value, self._dtype), self._mesh)
        return self._with(
            tf.split(value, [int(n) for n in np.asarray(static)], name=name))

    def size(self, name: str | None = None) -> Any:
        return tf.constant(len(self._items), name=name)

    def close(self, name: str | None = None) -> None:
        del name


def _first_whole(x: Any, mesh: Any) -> Any:
    """Returns `x` with its first dimension whole and the others as they are.

    It is taken apart. Behind it a batch may be cut, as in recurrent layers.
    """
    if not tf.is_symbolic_tensor(x) or not x.shape.rank:
        return x
    dtensor = tf.experimental.dtensor
    return dtensor.relayout(x, dtensor.Layout(
        [dtensor.UNSHARDED, *[dtensor.MATCH] * (x.shape.rank - 1)], mesh))
