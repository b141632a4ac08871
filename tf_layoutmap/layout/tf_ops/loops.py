"""Loops on a mesh, unrolled while a function is traced.

A loop keeps what it reads, writes and needs for its gradient in lists of
tensors, which DTensor cannot place. Where the number of steps is known while
tracing, as it is in `fit`, which keeps all shapes, the steps are traced one
after the other instead. TensorFlow's Python makes all loops in one place:
recurrent layers, `tf.while_loop`, `map_fn`, `scan`, AutoGraph's and those of
keras.ops.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import (
    error_messages,
    own_trace,
    trace_context,
)
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.tf_ops.known_values import evaluated
from tf_layoutmap.layout.tf_ops.unrolled_array import (
    UnrolledArray,
    unknown_steps,
    where,
)

# A longer loop would be compiled for hours.
MOST_STEPS = 2000


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
        if tf.executing_eagerly() or own_trace.is_whole()
        else (trace_context.mesh_of_operation())
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
        own_trace.cannot_be_divided(
            mesh, "it does not know the number of steps of a loop"
        )
        if has_arrays:
            raise error_messages.UnsupportedByDTensorError(unknown_steps())
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
        if steps == MOST_STEPS:
            raise error_messages.UnsupportedByDTensorError(
                f"A loop on a mesh has at most {MOST_STEPS} steps, because "
                f"each is compiled. Received: more, {where()}. Shorten the "
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
            raise error_messages.UnsupportedByDTensorError(unknown_steps())
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
    return isinstance(x, _tf_private.CompositeTensor) and not isinstance(
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
