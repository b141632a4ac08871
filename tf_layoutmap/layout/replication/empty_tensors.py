"""Operations on tensors without elements, which run on the host.

If a collective operation gets a tensor without elements, it raises an error,
and all later collective operations of the process fail. A function with such a
tensor can also end the process when DTensor compiles it. Therefore, an eager
operation with such a tensor runs on the host, and its results are replicated. A
function that is called with such a tensor, for example with the last batch of
an evaluation whose samples were all filtered out, runs eagerly.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import on_mesh

dtensor = tf.experimental.dtensor

_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


def has_empty_tensor(inputs: Iterable[Any]) -> bool:
    """Returns whether an eager tensor on a mesh has no elements.

    Args:
      inputs: Inputs of an eager operation. Lists are searched, too.
    """
    for x in inputs:
        if isinstance(x, (list, tuple)):
            if has_empty_tensor(x):
                return True
        elif (
            isinstance(x, tf_private.EagerTensor)
            and not tf_private.num_elements(x)
            and on_mesh(x)
        ):
            return True
    return False


def is_called_with_empty_tensor(args: Any) -> bool:
    """Returns whether a nested structure of arguments has an empty array."""
    return any(
        0 in x.shape
        for x in tf.nest.flatten(args)
        if isinstance(x, (np.ndarray, tf_private.EagerTensor))
    )


def run_on_host(
    original: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
) -> list[Any] | None:
    """Runs an eager operation with an empty tensor without communication.

    Args:
      original: `TFE_Py_Execute`.
      args: Its arguments: the eager context, a device, the name of the
        operation, its input tensors, its attributes, and the number of results.
      mesh: Mesh of the inputs.

    Returns:
      The results on the mesh; None if an input cannot be copied to the host.
    """
    context, _, operation, inputs, attributes, count = args
    if any(x.dtype in (tf.resource, tf.variant) for x in inputs):
        return None
    operation = tf.compat.as_str(operation)
    if operation == "CopyToMesh":
        return None
    if operation in ("Relayout", "RelayoutLike"):
        layout = (
            dtensor.fetch_layout(inputs[1])
            if operation == "RelayoutLike"
            else _layout_attribute(attributes, inputs[0], mesh)
        )
        return [transfer.to_mesh(transfer.to_host(inputs[0]), layout)]
    with tf.device(_HOST):
        inputs = [
            tf.constant(transfer.to_host(x)) if on_mesh(x) else x
            for x in inputs
        ]
        results = original(context, _HOST, operation, inputs, attributes, count)
    return [transfer.to_replicated(x, mesh) for x in results]


def _layout_attribute(
    attributes: Sequence[Any], tensor: Any, mesh: Mesh
) -> Any:
    """Returns the layout in the attributes of a `Relayout` operation."""
    text = tf.compat.as_str(attributes[attributes.index("layout") + 1])
    layout = dtensor.Layout.from_string(text)
    before = dtensor.fetch_layout(tensor).sharding_specs
    return dtensor.Layout(
        [
            old if new == dtensor.MATCH else new
            for old, new in zip(before, layout.sharding_specs)
        ],
        mesh,
    )
