"""Loops, arrays and recurrent layers on a mesh, unrolled during tracing.

A loop uses TensorLists to store the tensors that it reads, writes and needs for
its gradient. DTensor cannot place a TensorList on a mesh. Therefore, if the
number of steps is known during tracing, the steps are traced one after another
without a loop. In `fit`, the number of steps is known, because all shapes are
static. TensorFlow creates all loops in one Python function, which `while_loop`
replaces. Recurrent layers, `tf.while_loop`, `map_fn`, `scan`, AutoGraph and
keras.ops call this function.

`UnrolledArray` replaces `tf.TensorArray` by a list of tensors. `rnn` sets
`unroll=True` in the function that runs the recurrent layers of Keras 3 and
tf_keras.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import errors, tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.known_layouts import UnshardedDim
from tf_layoutmap.layout.ops import host_loops, random_state
from tf_layoutmap.layout.ops.corrections import static_value


def location() -> str:
    """Returns a description of the current layer for error messages."""
    scope = tf.get_current_name_scope()
    return f"in {scope!r}" if scope else "outside of any layer"


def unknown_steps_message() -> str:
    """Returns the message for a loop that cannot be unrolled."""
    return (
        "The number of steps of a loop on a mesh must be known during "
        f"tracing. Received: a loop {location()} whose number of steps is "
        "unknown. Give its input a static number of time steps (or elements), "
        "or run the layer outside the scope."
    )


class UnrolledArray:
    """Implementation of `tf.TensorArray` with a Python list of tensors.

    A write returns a new array and does not change the existing array, as in
    any graph.
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
        length = static_value(0 if size is None else size)
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
        # TensorFlow reads the attribute `flow` in order to pass the array to a
        # branch or a loop.
        raise errors.UnsupportedByDTensorError(
            "On a mesh a tf.TensorArray must not be returned from a tf.cond "
            "or passed to a loop whose number of steps is unknown during "
            f"tracing. Received: an array {location()}. Stack it to a tensor "
            "first."
        )

    handle = None

    @property
    def element_shape(self) -> tf.TensorShape:
        return self._element_shape[0]

    def _position(self, index: Any, verb: str, size: int) -> int:
        position = int(index)
        if not 0 <= position < size:
            raise IndexError(
                f"The index to {verb} in a tf.TensorArray of "
                f"{len(self._items)} elements must be in [0, {size}). "
                f"Received: index {position}."
            )
        return position

    def _item(self, position: int) -> Any:
        item = self._items[position]
        if item is not None:
            return item
        if not self.element_shape.is_fully_defined():
            raise ValueError(
                "An element of a tf.TensorArray must be written before it is "
                f"read, unless its shape is known. Received: element "
                f"{position}, which was not written."
            )
        return tf.zeros(self.element_shape, self._dtype)

    def _checked(self, value: Any) -> Any:
        value = tf.convert_to_tensor(value, self._dtype)
        if not self.element_shape.is_compatible_with(value.shape):
            raise ValueError(
                f"Elements of this tf.TensorArray must have shape "
                f"{self.element_shape}. Received: shape {value.shape}."
            )
        if self._infer_shape:
            self._element_shape[0] = self.element_shape.merge_with(value.shape)
        return value

    def identity(self) -> tf.TensorArray:
        return self._with(self._items)

    def grad(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "TensorArray.grad is not supported; use tf.GradientTape."
        )

    def read(self, index: Any, name: str | None = None) -> Any:
        static = static_value(index)
        if static is None:
            # The index is unknown during tracing, for example in a tf.cond.
            return tf.gather(self.stack(), index, name=name)
        return self._item(self._position(static, "read", len(self._items)))

    def write(
        self, index: Any, value: Any, name: str | None = None
    ) -> tf.TensorArray:
        del name
        static = static_value(index)
        if static is None:
            raise errors.UnsupportedByDTensorError(
                "On a mesh the index of TensorArray.write must be known "
                f"during tracing. Received: {index}, {location()}."
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
        static = static_value(indices)
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
                "The number of elements to unstack into a tf.TensorArray must "
                f"be at most {len(self._items)}, its size. Received: "
                f"{len(items)}."
            )
        return self._with(items)

    def scatter(
        self, indices: Any, value: Any, name: str | None = None
    ) -> tf.TensorArray:
        static = static_value(indices)
        if static is None:
            raise errors.UnsupportedByDTensorError(
                "On a mesh the indices of TensorArray.scatter must be known "
                f"during tracing. Received: {indices}, {location()}."
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
        static = static_value(lengths)
        if static is None:
            raise errors.UnsupportedByDTensorError(
                "On a mesh the lengths of TensorArray.split must be known "
                f"during tracing. Received: {lengths}, {location()}."
            )
        value = tracing.pin_replicated(
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
    """Returns `x` with an unsharded first dimension, so it can be unstacked.

    The second dimension, which is the batch in recurrent layers, keeps its
    sharding; the others keep it if the layout is known during tracing.
    """
    if not tf.is_symbolic_tensor(x) or not x.shape.rank:
        return x
    return UnshardedDim(x, mesh, 0).pin(x)


# Maximum number of steps of an unrolled loop. A longer loop would take hours to
# compile.
MAX_STEPS = 2000


def while_loop(
    original: Callable[..., Any],
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    **options: Any,
) -> Any:
    """Runs `tf.while_loop`; on a mesh the loop is unrolled."""
    mesh = _current_mesh()
    if mesh is None:
        return original(cond, body, loop_vars, **options)
    return _unrolled(mesh, original, cond, body, loop_vars, **options)


def array_for_graphs(original: type, corrected: Any) -> type:
    """Returns a subclass of TensorFlow's array implementation for graphs.

    Its constructor returns an `UnrolledArray` on a mesh.
    """
    del corrected

    class GraphTensorArray(original):
        """TensorFlow's array implementation; an `UnrolledArray` on a mesh."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            mesh = _current_mesh()
            if mesh is None or kwargs.get("flow") is not None:
                # If a flow is passed, the array already exists. For example,
                # the array is passed to a loop.
                return super().__new__(cls)
            return UnrolledArray(mesh, *args, **kwargs)

    return GraphTensorArray


def _current_mesh() -> Mesh | None:
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
    most = (
        None if maximum_iterations is None else static_value(maximum_iterations)
    )
    values = tf.nest.map_structure(_as_tensor, loop_vars)
    has_arrays = any(
        isinstance(x, tf.TensorArray) for x in tf.nest.flatten(values)
    )
    more = (
        static_value(cond(*values))
        if maximum_iterations is None or most is not None
        else None
    )
    if more is None:
        trace = host_loops.current_trace()
        if trace is not None and not has_arrays:
            values = trace.add_loop(
                mesh,
                cond,
                body,
                values,
                limit=maximum_iterations,
                invariants=options.get("shape_invariants"),
            )
            if not return_same_structure and len(values) == 1:
                return values[0]
            return values
        if not has_arrays:
            tracing.require_split(mesh)
        # DTensor loses the layouts of tensors that enter a loop body.
        tracing.require_replication(
            mesh, "the number of steps of a loop is unknown during tracing"
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
    steps, loop = 0, random_state.UnrolledLoop()
    while more and (most is None or steps < most):
        if steps == MAX_STEPS:
            raise errors.UnsupportedByDTensorError(
                f"A loop on a mesh must have at most {MAX_STEPS} steps, "
                "because each step is compiled separately. Received: a loop "
                f"{location()} with more steps. Shorten the sequences, or "
                "create the layer outside the scope."
            )
        with loop.step():
            after = body(*values)
        # As in TensorFlow, the body of a loop with only one loop variable may
        # return the variable without a list.
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
        more = static_value(cond(*values))
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
    """Returns the new value of a loop variable, as a constant if possible."""
    if isinstance(x, tf.TensorArray) or _is_composite(x):
        return x
    x = tf.convert_to_tensor(x, before.dtype)
    if x.shape.rank == 0 and (x.dtype.is_integer or x.dtype.is_bool):
        value = static_value(x)
        if value is not None:
            return tf.constant(value, x.dtype)
    return x


def rnn(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `backend.rnn`, unrolled on a mesh if its number of steps is static.

    If the number of steps is unknown, or each sample has a separate length, the
    layer calls `while_loop` like other code.
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
        if not options.get("unroll"):
            options["step_function"] = random_state.unrolled_step(
                options["step_function"]
            )
        options["unroll"] = True
    return original(*call.args, **call.kwargs)
