"""Tensors of the host that operations and functions on a mesh are given.

A layer holds them (`self.ids = keras.ops.arange(n)`), or a loss, or a closure.
DTensor itself takes numbers and short lists of integers from the host, and
refuses all else before it runs anything. What it refused is run again, with
those tensors packed, whole on every device. Where all is on the mesh, nothing
is looked at, and nothing is slower.
"""

import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import pinning, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.processes import digest, messages
from tf_layoutmap.layout.replication import replicated_ops

dtensor = tf.experimental.dtensor

# How DTensor says so: of which operation, and of which of its inputs. An
# operation can also fail with the words of one inside of it; then it has begun,
# and must not run again.
_REFUSAL = re.compile(
    r"The op/function (\S+) got a regular tensor for input "
    r"(\d+) "
)

# The attribute of a tensor with its copies, which live as long as it does.
_COPIES = "_copies_on_meshes"

# Functions that hold such tensors, and which inputs these are. DTensor takes
# its time to refuse them, so they are not run in vain for each step again.
_held_by: dict[str, list[int]] = {}


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
    except tf_private.OperationFailed as error:
        # Run once only if nothing can be done: at a further failure of one
        # operation, DTensor can say something else.
        inputs = tf.nest.flatten(args[3:])
        if _mesh_of(inputs) is None or (
            _refused_input(error, args[1]) is None
            and not replicated_ops.can_run_replicated(
                error.message, args[1], inputs
            )
        ):
            raise
    raise tf_private.FastWayRefused


def run(original: Callable[..., Any], *args: Any) -> Any:
    """Runs an eager operation, or a function, in TensorFlow's general way.

    Args:
      original: Runs it.
      *args: The eager context, a device, the name of the operation, its input
        tensors, and more.
    """
    operation, inputs = tf.compat.as_str(args[2]), args[3]
    held = _held_by.get(operation, [])
    mesh = _mesh_of(inputs) if held else None
    if mesh is not None:
        inputs = [
            packed(x, mesh) if position in held else x
            for position, x in enumerate(inputs)
        ]
    while True:
        try:
            return original(*args[:3], inputs, *args[4:])
        except tf.errors.UnknownError as error:
            whole = (
                None
                if _mesh_of(inputs) is None
                else (
                    replicated_ops.replicated_inputs(
                        error.message, operation, inputs
                    )
                )
            )
            if whole is None:
                raise
            inputs = whole
            continue
        except tf.errors.UnimplementedError as error:
            position, mesh = _refused_input(error, operation), _mesh_of(inputs)
            if (
                position is None
                or mesh is None
                or pinning.on_mesh(inputs[position])
            ):
                raise
        inputs = [*inputs]
        inputs[position] = packed(inputs[position], mesh)
        if tf_private.op_def_of(operation) is None:
            _held_by.setdefault(operation, []).append(position)


def packed(x: Any, mesh: Mesh) -> Any:
    """Returns an eager tensor of the host on `mesh`, whole on every device.

    It is made once for each tensor and mesh. What is on a mesh already stays.

    Raises:
      ProcessError: Another process has other values.
    """
    if pinning.on_mesh(x):
        return x
    if not hasattr(x, _COPIES):
        setattr(x, _COPIES, weakref.WeakKeyDictionary())
    # Those of an earlier device of DTensor are of no use.
    copies = getattr(x, _COPIES).setdefault(tf_private.dtensor_device(), {})
    if mesh not in copies:
        _compare(x, mesh)
        copies[mesh] = transfer.to_mesh(
            x, dtensor.Layout.replicated(mesh, x.shape.rank)
        )
    return copies[mesh]


def _compare(x: Any, mesh: Mesh) -> None:
    """Refuses other values in other processes: a device has those of one."""
    if not messages.is_possible(mesh):
        return
    what = f"bringing a {x.dtype.name} tensor of shape {x.shape} to the mesh"
    mine = [x.dtype.name, x.shape.as_list(), digest.checksum(x.numpy())]
    for client, theirs in enumerate(messages.exchange("held", mine, what)):
        if theirs != mine:
            raise messages.ProcessError(
                "A tensor of the host that a step holds or is given must be "
                "the same in all processes, since it is whole on every device. "
                f"Received: other values, {what}, in process {client} than in "
                f"process {dtensor.client_id()}. Bring batches to the mesh "
                "with tlm.layout.to_mesh, which divides them."
            )


def _refused_input(error: Any, operation: str | bytes) -> int | None:
    """Returns which input DTensor refused; None for any other error."""
    refusal = _REFUSAL.match(error.message)
    if refusal is None or refusal[1] != tf.compat.as_str(operation):
        return None
    return int(refusal[2])


def _mesh_of(inputs: Iterable[Any]) -> Mesh | None:
    """Returns the mesh of ours that this thread is in, or that an input is on.

    Returns:
      None on other meshes, whose programs get what DTensor says.
    """
    mesh = tracing.mesh_of_operation()
    for x in inputs if mesh is None else ():
        if pinning.on_registered_mesh(x):
            return dtensor.fetch_layout(x).mesh
    return mesh
