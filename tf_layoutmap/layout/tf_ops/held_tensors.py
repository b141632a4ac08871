"""Tensors of the host that operations and functions on a mesh are given.

A layer holds them (`self.ids = keras.ops.arange(n)`), or a loss, or a closure.
DTensor itself takes numbers and short lists of integers from the host, and
refuses all else before it runs anything. What it refused is run again, with
those tensors packed, whole on every device. Where all is on the mesh, nothing
is looked at, and nothing is slower.
"""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import pinning, trace_context, transfer
from tf_layoutmap.layout.mesh.layouts import Mesh

dtensor = tf.experimental.dtensor

# How DTensor says so, and of which operation. An operation can also fail with
# the words of one inside of it; then it has begun, and must not run again.
_REFUSAL = "The op/function {} got a regular tensor for input"

# The attribute of a tensor with its copies, which live as long as it does.
_COPIES = "_copies_on_meshes"

# Functions that hold such tensors. DTensor takes its time to refuse them, so
# they are not run in vain for each step again.
_holders: set[str] = set()


def made_as_it_is(original: Any, ours: Callable[..., Any]) -> Any:
    """Returns `ours`: these run for each eager operation of the process."""
    del original
    return ours


def run_fast(original: Callable[..., Any], *args: Any) -> Any:
    """Runs an eager operation in TensorFlow's fast way.

    Where it is refused, TensorFlow goes the general way, by `run`: that makes
    tensors of all inputs, and tapes know the tensors as they were.

    Args:
      original: Runs it.
      *args: The eager context, the name of the operation, and more.
    """
    try:
        return original(*args)
    except _tf_private.OperationFailed as error:
        if not _is_refused(error, args[1]):
            raise
    raise _tf_private.FastWayRefused


def run(original: Callable[..., Any], *args: Any) -> Any:
    """Runs an eager operation, or a function, in TensorFlow's general way.

    Args:
      original: Runs it.
      *args: The eager context, a device, the name of the operation, its input
        tensors, and more.
    """
    operation = tf.compat.as_str(args[2])
    mesh = None
    if operation not in _holders:
        try:
            return original(*args)
        except tf.errors.UnimplementedError as error:
            mesh = _mesh_of(args[3])
            if mesh is None or not _is_refused(error, operation):
                raise
        if _tf_private.op_def_of(operation) is None:
            _holders.add(operation)
    inputs = args[3]
    mesh = mesh or _mesh_of(inputs)
    if mesh is not None:
        inputs = [packed(x, mesh) for x in inputs]
    return original(*args[:3], inputs, *args[4:])


def packed(x: Any, mesh: Mesh) -> Any:
    """Returns an eager tensor of the host on `mesh`, whole on every device.

    It is made once for each tensor and mesh. What is on a mesh already stays,
    and so do handles of variables, which DTensor takes.
    """
    if not isinstance(x, tf.Tensor) or x.dtype == tf.resource or (
            pinning.on_mesh(x)):
        return x
    copies = getattr(x, _COPIES, None)
    if copies is None:
        copies = {}
        setattr(x, _COPIES, copies)
    if mesh not in copies:
        copies[mesh] = transfer.to_mesh(
            x, dtensor.Layout.replicated(mesh, x.shape.rank))
    return copies[mesh]


def _is_refused(error: Any, operation: str | bytes) -> bool:
    return error.message.startswith(
        _REFUSAL.format(tf.compat.as_str(operation)))


def _mesh_of(inputs: Iterable[Any]) -> Mesh | None:
    """Returns the mesh that this thread is in, or that an input is on."""
    mesh = trace_context.mesh_of_operation()
    for x in inputs if mesh is None else ():
        if pinning.on_mesh(x):
            return dtensor.fetch_layout(x).mesh
    return mesh
