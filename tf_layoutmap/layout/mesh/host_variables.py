"""Writing to variables of the host where the code runs on a mesh.

A layer can hold a `tf.Variable` that Keras does not know of, and a loop can
count its steps in one. Read on a mesh they are right. But DTensor lets every
device write: a counter on four devices counts by four.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import pinning, tracing, transfer


def writing(
    original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns what takes the place of a method that writes to a variable."""

    @functools.wraps(original)
    def method(variable: Any, *args: Any, **kwargs: Any) -> Any:
        handle = variable.handle
        # On a mesh, or of a graph of TensorFlow 1.
        if pinning.DEVICE in handle.device or tf.is_symbolic_tensor(handle):
            return original(variable, *args, **kwargs)
        return ours(variable, *args, **kwargs)

    return method


def write(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> Any:
    """Writes to a variable of the host, and on the host.

    Raises:
      RuntimeError: A function is traced for a mesh, and does not run there.
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
    """Adds to the variable of a handle, or subtracts, as an operation.

    Args:
      original: Makes the operation.
      resource: The handle.
      value: What to add.
      name: Of the operation.

    Raises:
      RuntimeError: As `write`.
    """
    handle = resource
    if not tf.executing_eagerly():
        # Loops and branches have names of their own for what is outside.
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
    """Whether an eager operation with these inputs runs on a mesh of ours."""
    return tracing.mesh_of_operation() is not None or any(
        map(pinning.on_registered_mesh, values)
    )


def _check_no_mesh(what: str) -> None:
    mesh = tracing.mesh_of_operation()
    if mesh is None:
        return
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    raise RuntimeError(
        f"A function for mesh {mesh.dim_names} of size {mesh.shape()} must "
        "write to variables on that mesh only, because each of its devices "
        f"runs it. Received: {what}, which is on the host"
        f"{f', in {scope!r}' if scope else ''}. Make it a weight, with "
        "`self.add_weight(..., trainable=False)` in the layer, or a "
        "keras.Variable inside the scope; or write to it outside of the "
        "function, in a callback, say."
    )
