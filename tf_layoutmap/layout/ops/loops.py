"""Loops on a mesh, unrolled while a function is traced.

A loop keeps what it reads, writes and needs for its gradient in lists of
tensors, which DTensor cannot place. Where the number of steps is known while
tracing, as it is in `fit`, which keeps all shapes, the steps are traced one
after the other instead. TensorFlow's Python makes all loops in one place:
recurrent layers, `tf.while_loop`, `map_fn`, `scan`, AutoGraph's and those of
keras.ops.
"""

# DOC-MERGE: An array in a function for a mesh: a list of tensors.
#
# DTensor cannot place the TensorLists that a `tf.TensorArray` is made of.
#
# DOC-MERGE: Recurrent layers of Keras 3 and tf_keras on a mesh, unrolled.
#
# Both hand their loop to one function of their backend, which can unroll it.
#
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import errors, pinning, tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.ops.corrections import evaluated


def location() -> str:
    """Returns in which layer a loop or an array is, for messages."""
    scope = tf.get_current_name_scope()
    return f"in {scope!r}" if scope else "outside of any layer"


def unknown_steps_message() -> str:
    """Returns what is said of a loop that cannot be unrolled."""
    return (
        "DTensor cannot place a loop on a mesh whose number of steps is not "
        f"known while it is traced. Received: one {location()}. Give its input "
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
            raise errors.UnsupportedByDTensorError(unknown_steps_message())
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
        raise errors.UnsupportedByDTensorError(
            "On a mesh a tf.TensorArray cannot leave a tf.cond, or enter a "
            "loop whose number of steps is not known while it is traced. "
            f"Received: one {location()}."
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
            raise errors.UnsupportedByDTensorError(
                "On a mesh the index of TensorArray.write must be known "
                f"while a function is traced. Received: {index}, {location()}."
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
        value = _with_full_first_dim(
            tf.convert_to_tensor(value, self._dtype), self._mesh
        )
        if value.shape.rank is None or value.shape[0] is None:
            raise errors.UnsupportedByDTensorError(unknown_steps_message())
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
            raise errors.UnsupportedByDTensorError(
                "On a mesh the indices of TensorArray.scatter must be known "
                f"while a function is traced. Received: {indices}, "
                f"{location()}."
            )
        value = _with_full_first_dim(
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
            raise errors.UnsupportedByDTensorError(
                "On a mesh the lengths of TensorArray.split must be known "
                f"while a function is traced. Received: {lengths}, "
                f"{location()}."
            )
        value = pinning.replicated(
            tf.convert_to_tensor(value, self._dtype), self._mesh
        )
        return self._with(
            tf.split(value, [int(n) for n in np.asarray(static)], name=name)
        )

    def size(self, name: str | None = None) -> Any:
        return tf.constant(len(self._items), name=name)

    def close(self, name: str | None = None) -> None:
        del name


def _with_full_first_dim(x: Any, mesh: Mesh | None) -> Any:
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


# A longer loop would be compiled for hours.
MAX_STEPS = 2000


def while_loop(
    original: Callable[..., Any],
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    **options: Any,
) -> Any:
    """`tf.while_loop`; on a mesh unrolled."""
    mesh = _mesh_now()
    if mesh is None:
        return original(cond, body, loop_vars, **options)
    return _unrolled(mesh, original, cond, body, loop_vars, **options)


def array_for_graphs(original: type, ours: Any) -> type:
    """Returns TensorFlow's class of arrays; on a mesh lists of tensors."""
    del ours

    class GraphTensorArray(original):
        """TensorFlow's, or on a mesh one that is a list of tensors."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            mesh = _mesh_now()
            if mesh is None or kwargs.get("flow") is not None:
                # Of one that there is, inside of a loop, say.
                return super().__new__(cls)
            return UnrolledArray(mesh, *args, **kwargs)

    return GraphTensorArray


def _mesh_now() -> Mesh | None:
    return (
        None
        if tf.executing_eagerly() or tracing.is_replicated()
        else (tracing.mesh_of_operation())
    )


def _unrolled(
    mesh: Mesh,
    original: Callable[..., Any],
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    *,
    maximum_iterations: Any = None,
    return_same_structure: bool = True,
    **options: Any,
) -> Any:
    most = None if maximum_iterations is None else evaluated(maximum_iterations)
    values = tf.nest.map_structure(_as_tensor, loop_vars)
    has_arrays = any(
        isinstance(x, tf.TensorArray) for x in tf.nest.flatten(values)
    )
    more = (
        evaluated(cond(*values))
        if maximum_iterations is None or most is not None
        else None
    )
    if more is None:
        # DTensor loses layouts at the entry of a body.
        tracing.require_replication(
            mesh, "it does not know the number of steps of a loop"
        )
        if has_arrays:
            raise errors.UnsupportedByDTensorError(unknown_steps_message())
        return original(
            cond,
            body,
            loop_vars,
            maximum_iterations=maximum_iterations,
            return_same_structure=return_same_structure,
            **options,
        )
    steps = 0
    while more and (most is None or steps < most):
        if steps == MAX_STEPS:
            raise errors.UnsupportedByDTensorError(
                f"A loop on a mesh has at most {MAX_STEPS} steps, because "
                f"each is compiled. Received: more, {location()}. Shorten the "
                "sequences, or take the layer out of the scope."
            )
        after = body(*values)
        # As TensorFlow does: a body of one variable may return it bare.
        if not isinstance(after, list | tuple):
            after = [after]
        tf.nest.assert_same_structure(
            list(values), list(after), check_types=False
        )
        values = tf.nest.pack_sequence_as(
            values,
            [
                _after(x, was)
                for x, was in zip(
                    tf.nest.flatten(after), tf.nest.flatten(values)
                )
            ],
        )
        steps += 1
        more = evaluated(cond(*values))
        if more is None:
            raise errors.UnsupportedByDTensorError(unknown_steps_message())
    if not return_same_structure and len(values) == 1:
        return values[0]
    return values


def _as_tensor(x: Any) -> Any:
    return (
        x
        if isinstance(x, tf.TensorArray) or _is_composite(x)
        else (tf.convert_to_tensor(x))
    )


def _is_composite(x: Any) -> bool:
    return isinstance(x, tf_private.CompositeTensor) and not isinstance(
        x, tf.Variable
    )


def _after(x: Any, before: Any) -> Any:
    """Returns a loop variable after a step; counters as constants."""
    if isinstance(x, tf.TensorArray) or _is_composite(x):
        return x
    x = tf.convert_to_tensor(x, before.dtype)
    if x.shape.rank == 0 and (x.dtype.is_integer or x.dtype.is_bool):
        value = evaluated(x)
        if value is not None:
            return tf.constant(value, x.dtype)
    return x


def rnn(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`backend.rnn`; for a mesh unrolled if it knows its number of steps.

    Where it does not, or where samples have lengths of their own, the loop
    goes through `loops.py` as any other.
    """
    if not tracing.traced_for_mesh():
        return original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs)
    options = call.arguments
    steps = tf.nest.flatten(options["inputs"])[0].shape[
        0 if options.get("time_major") else 1
    ]
    lengths = options.get("input_length")
    if (
        steps
        and steps <= MAX_STEPS
        and (lengths is None or isinstance(lengths, int))
    ):
        options["unroll"] = True
    return original(*call.args, **call.kwargs)
