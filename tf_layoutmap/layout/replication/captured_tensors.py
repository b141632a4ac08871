"""Host tensors as inputs of operations and functions on a mesh.

A layer (`self.ids = keras.ops.arange(n)`), a loss or a closure can hold host
tensors. DTensor accepts only numbers and short lists of integers from the host.
DTensor rejects other host tensors before it runs the operation. In this case,
this module replicates these tensors on the mesh and runs the operation again.
If all inputs are on the mesh, no additional work is necessary.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, tf_private
from tf_layoutmap.layout.mesh import errors, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.processes import digest, messages
from tf_layoutmap.layout.replication import empty_tensors, replicated_ops

dtensor = tf.experimental.dtensor

# DTensor's error for a host tensor. The message contains the name of the op or
# function, and the index of the input. If an op inside a function causes this
# error, the name is different from the name of the function. In this case, the
# function has already started and must not run again.
_HOST_INPUT_ERROR = re.compile(
    r"The op/function (\S+) got a regular tensor for input "
    r"(\d+) "
)

# Attribute of a tensor that holds its copies on meshes, so the copies are freed
# together with the tensor.
_COPIES = "_copies_on_meshes"

# Maps the name of a function to the indices of its host inputs. These inputs
# are copied before the call, because raising DTensor's error is slow.
_host_inputs: dict[str, list[int]] = {}


def run_fast(original: Callable[..., Any], *args: Any) -> Any:
    """Runs an eager op on TensorFlow's fast path.

    If DTensor rejects an input, TensorFlow falls back to its general path,
    which calls `run`. The general path converts all inputs to tensors. Gradient
    tapes record the original tensors instead of the copies on the mesh.

    Args:
      original: `TFE_Py_FastPathExecute`.
      *args: The eager context, the name of the operation, and further
        arguments.

    Raises:
      FastWayRefused: If `run` can run the operation.
    """
    if (
        empty_tensors.has_empty_tensor(args[3:])
        and _mesh_of(tf.nest.flatten(args[3:])) is not None
    ):
        raise tf_private.FastWayRefused
    try:
        return original(*args)
    except tf_private.OperationFailed as error:
        # If the op cannot be run in another way, the original error is raised.
        # The op does not run a second time, because the second run could raise
        # a different error.
        inputs = tf.nest.flatten(args[3:])
        if args[1] in dtensor_ops.UNKNOWN_RANK and _mesh_of(inputs) is not None:
            raise errors.UnsupportedByDTensorError(
                f"DTensor cannot run an eager {args[1]} operation, because the "
                "rank of its result is unknown. Compute the operation on the "
                "host, on tensors from `tlm.layout.to_host`."
            ) from None
        if _mesh_of(inputs) is None or (
            _refused_input(error, args[1]) is None
            and not replicated_ops.can_run_replicated(
                error.message, args[1], inputs
            )
        ):
            raise
    raise tf_private.FastWayRefused


def run(original: Callable[..., Any], *args: Any) -> Any:
    """Runs an eager operation, or a function, on TensorFlow's general path.

    Args:
      original: `TFE_Py_Execute`.
      *args: The eager context, a device, the name of the operation, its input
        tensors, and further arguments.
    """
    operation, inputs = tf.compat.as_str(args[2]), args[3]
    if (
        tf.executing_eagerly()
        and empty_tensors.has_empty_tensor(inputs)
        and tf_private.op_def_of(operation) is not None
    ):
        mesh = _mesh_of(inputs)
        results = mesh and empty_tensors.run_on_host(original, args, mesh)
        if results is not None:
            return results
    positions = _host_inputs.get(operation, [])
    mesh = _mesh_of(inputs) if positions else None
    if mesh is not None:
        inputs = [
            packed(x, mesh) if position in positions else x
            for position, x in enumerate(inputs)
        ]
    while True:
        try:
            return original(*args[:3], inputs, *args[4:])
        except tf.errors.UnknownError as error:
            replicated = (
                None
                if _mesh_of(inputs) is None
                else (
                    replicated_ops.replicated_inputs(
                        error.message, operation, inputs
                    )
                )
            )
            if replicated is None:
                raise
            inputs = replicated
            continue
        except tf.errors.UnimplementedError as error:
            position, mesh = _refused_input(error, operation), _mesh_of(inputs)
            if (
                position is None
                or mesh is None
                or tracing.on_mesh(inputs[position])
            ):
                raise
        inputs = [*inputs]
        inputs[position] = packed(inputs[position], mesh)
        if tf_private.op_def_of(operation) is None:
            _host_inputs.setdefault(operation, []).append(position)


def packed(x: Any, mesh: Mesh) -> Any:
    """Returns an eager host tensor replicated on `mesh`.

    The copy is created once per tensor and mesh. A tensor on a mesh is returned
    unchanged.

    Raises:
      ProcessError: If another process has different values.
    """
    if tracing.on_mesh(x):
        return x
    if not hasattr(x, _COPIES):
        setattr(x, _COPIES, weakref.WeakKeyDictionary())
    # Copies are stored per DTensor device, because a copy cannot be used after
    # the device is replaced.
    copies = getattr(x, _COPIES).setdefault(tf_private.dtensor_device(), {})
    if mesh not in copies:
        _compare(x, mesh)
        copies[mesh] = transfer.to_mesh(
            x, dtensor.Layout.replicated(mesh, x.shape.rank)
        )
    return copies[mesh]


def _compare(x: Any, mesh: Mesh) -> None:
    """Raises an error if the processes have different values of `x`."""
    if not messages.is_possible(mesh):
        return
    doing = f"copying a {x.dtype.name} tensor of shape {x.shape} to the mesh"
    mine = [x.dtype.name, x.shape.as_list(), digest.checksum(x.numpy())]
    for client, theirs in enumerate(messages.exchange("held", mine, doing)):
        if theirs != mine:
            raise messages.ProcessError(
                "A host tensor that a step captures or receives must be equal "
                "in all processes, because it is replicated on all devices. "
                f"Received: different values in process {client} and process "
                f"{dtensor.client_id()} when {doing}. Copy batches to the "
                "mesh with tlm.layout.to_mesh, which shards them."
            )


def _refused_input(error: Any, operation: str | bytes) -> int | None:
    """Returns the index of the host input that DTensor rejected, or None."""
    match = _HOST_INPUT_ERROR.match(error.message)
    if match is None or match[1] != tf.compat.as_str(operation):
        return None
    return int(match[2])


def _mesh_of(inputs: Iterable[Any]) -> Mesh | None:
    """Returns the registered mesh of this thread or of an input.

    Returns:
      The mesh; None if the mesh is not registered. DTensor's errors are not
      changed on meshes that are not registered.
    """
    mesh = tracing.mesh_of_operation()
    for x in inputs if mesh is None else ():
        if tracing.on_registered_mesh(x):
            return dtensor.fetch_layout(x).mesh
    return mesh
