"""Dependencies between operations that DTensor's compiler keeps.

DTensor drops control dependencies, so an operation waits for its inputs alone.
A value that has to wait passes through one `IdentityN` with what it waits for,
or has a token subtracted: a zero that is computed from what it waits for.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.layouts import Mesh

dtensor = tf.experimental.dtensor

_sinks_lock = threading.Lock()


def sink_of(mesh: Mesh) -> Any:
    """Returns a variable that tokens of `mesh` are written to."""
    key = mesh.to_string()
    with _sinks_lock, tf.init_scope():
        sinks = _tf_private.kept_with_device("sinks")
        if key not in sinks:
            sinks[key] = dtensor.DVariable(
                transfer.to_mesh(
                    np.zeros([], np.float32), dtensor.Layout.replicated(mesh, 0)
                ),
                trainable=False,
            )
        return sinks[key]


def after(token: Any, value: Any) -> Any:
    """Returns `value`, to the bit, once `token`, a zero, is there."""
    if value.dtype == tf.bool:
        return value | tf.cast(token, tf.bool)
    if value.dtype == tf.string:
        return value
    # Not a sum, which would make a zero of a negative zero.
    return value - tf.cast(token, value.dtype)


# None of Keras' optimizers has more operations between a gradient and what is
# written. Where there are more, the token is subtracted once more, in vain.
_FAR = 200


def waits(value: Any, token: Any, written: set[int]) -> bool:
    """Whether `value` is computed from what waited already."""
    seen, todo = {id(value.op)}, [value.op]
    while todo and len(seen) < _FAR:
        op = todo.pop()
        if op is token.op:
            return True
        if op.type == "ReadVariableOp" and id(op.inputs[0]) in written:
            return True
        for tensor in op.inputs:
            if id(tensor.op) not in seen:
                seen.add(id(tensor.op))
                todo.append(tensor.op)
    return False


def passed(tensors: list[Any], mesh: Mesh) -> list[Any]:
    """Returns `tensors`, and a zero, once all are there on all devices."""
    names = mesh.dim_names
    zeros = tf.zeros([mesh.dim_size(name) for name in names])
    # A part on each device.
    zeros = dtensor.relayout(zeros, dtensor.Layout(names, mesh))
    *tensors, zeros = tf.identity_n([*tensors, zeros])
    return tf.identity_n([*tensors, tf.reduce_sum(zeros)])


_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def may_wait_for(token: Any) -> bool:
    """Whether what is traced now belongs to the graph of `token`.

    Another function could be called again, outside of this one.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not token.graph and type(graph).__name__ in _BRANCHES:
        graph = graph.outer_graph
    return graph is token.graph


def parts_of(gradient: Any) -> list[Any]:
    """Returns the tensors that a gradient is made of."""
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        # Its shape stays a constant, which DTensor must know.
        return [gradient.values, gradient.indices]
    return [tf.convert_to_tensor(gradient)]


def with_parts(gradient: Any, parts: Iterator[Any]) -> Any:
    """Returns a gradient like this one, made of the next of `parts`."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = next(parts), next(parts)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return next(parts)


def wait_for(tensors: list[Any]) -> None:
    """Raises the error of whatever made these eager tensors."""
    for tensor in tensors:
        if dtensor.is_dtensor(tensor):
            for part in dtensor.unpack(tensor):
                part.numpy()
