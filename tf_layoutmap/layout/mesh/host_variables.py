"""Writes to host variables from code that runs on a mesh.

A layer can hold a `tf.Variable` that Keras does not track, and a loop can
count its steps in one. Reads of such a variable on a mesh are correct. Writes
are not, because every device writes: on four devices a counter is incremented
four times. Eager writes run on the host; writes in a function for a mesh raise
an error.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import pinning, tracing, transfer


def writing(
    original: Callable[..., Any], replacement: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the replacement for a method that writes to a variable."""

    @functools.wraps(original)
    def method(variable: Any, *args: Any, **kwargs: Any) -> Any:
        handle = variable.handle
        # Variables on a mesh and in graphs of TensorFlow 1 are not changed.
        if pinning.DEVICE in handle.device or tf.is_symbolic_tensor(handle):
            return original(variable, *args, **kwargs)
        return replacement(variable, *args, **kwargs)

    return method


def write(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> Any:
    """Writes to a host variable on the host.

    Args:
      original: The replaced method.
      variable: `tf.Variable` on the host.
      *args: Arguments of the method.
      **kwargs: Keyword arguments of the method.

    Raises:
      RuntimeError: If a function for a mesh is being traced.
    """
    if not tf.executing_eagerly():
        _check_no_mesh(
            f"`{original.__name__}` of tf.Variable {variable.name!r} of shape "
            f"{variable.shape}"
        )
    elif _runs_on_mesh(*args, *kwargs.values()):
        args, kwargs = tf.nest.map_structure(
            transfer.to_host_tensor, (args, kwargs)
        )
        with tf.device(variable.handle.device):
            return original(variable, *args, **kwargs)
    return original(variable, *args, **kwargs)


def add(
    original: Callable[..., Any],
    resource: Any,
    value: Any,
    name: str | None = None,
) -> Any:
    """Runs an op that adds to, or subtracts from, the variable of a handle.

    Args:
      original: Function that creates the op.
      resource: Handle of the variable.
      value: Value to add or subtract.
      name: Name of the op.

    Raises:
      RuntimeError: If a function for a mesh is being traced, and the variable
        is on the host.
    """
    handle = resource
    if not tf.executing_eagerly():
        # In loops and branches the handle is a captured placeholder.
        handle = tf_private.captured_by_trace(resource)
    if (
        not isinstance(handle, tf.Tensor)
        or tf.is_symbolic_tensor(handle)
        or (pinning.DEVICE in handle.device)
    ):
        return original(resource=resource, value=value, name=name)
    if not tf.executing_eagerly():
        _check_no_mesh(f"an operation `{original.__name__}` on a variable")
    elif _runs_on_mesh(value):
        with tf.device(handle.device):
            return original(
                resource=resource,
                name=name,
                value=transfer.to_host_tensor(value),
            )
    return original(resource=resource, value=value, name=name)


def _runs_on_mesh(*values: Any) -> bool:
    """Returns whether an eager op with these inputs runs on a mesh."""
    return tracing.mesh_of_operation() is not None or any(
        map(pinning.on_registered_mesh, values)
    )


def _check_no_mesh(received: str) -> None:
    mesh = tracing.mesh_of_operation()
    if mesh is None:
        return
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    raise RuntimeError(
        f"A function for mesh {mesh.dim_names} of size {mesh.shape()} must "
        "write to variables on that mesh only, because each of its devices "
        f"runs it. Received: {received}, which is on the host"
        f"{f', in {scope!r}' if scope else ''}. Create the variable as a "
        "weight, with `self.add_weight(..., trainable=False)` in the layer, "
        "or as a keras.Variable inside the scope; or write to it outside of "
        "the function, for example in a callback."
    )
