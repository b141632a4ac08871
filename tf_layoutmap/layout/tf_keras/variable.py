"""The variables of tf_keras models on a mesh."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import pinning, trace_context, transfer
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.variables import gathered_reads
from tf_layoutmap.layout.variables.checkpointed_variable import StoredVariable

dtensor = tf.experimental.dtensor


class HostReadableVariable(StoredVariable):
    """A DVariable that values from the host go into and come out of.

    tf_keras reads and writes weights as arrays to save, load and count them;
    a plain DVariable gives a value only if every device holds all of it.
    """

    def value(self) -> tf.Tensor:
        """The tensor; whole in a layer that needs it so, while it is traced."""
        axes = {*self.layout.sharding_specs} - {dtensor.UNSHARDED}
        if (
            not axes
            or tf.executing_eagerly()
            or (not gathered_reads.in_such_a_layer())
        ):
            return super().value()
        reads = gathered_reads.now()
        if reads is not None:
            return reads.read(self, super().value)
        return gathered_reads.gathered_along(axes, super().value(), self.layout)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Rows of the table; of all of it where `value` is whole."""
        if gathered_reads.in_such_a_layer():
            return tf.gather(self.value(), indices, name=name)
        return super().sparse_read(indices, name)

    def numpy(self) -> np.ndarray:
        """The whole value, gathered on the host."""
        with tf.init_scope():
            return transfer.to_host(self)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns a value from the host, cut up there, or one on the mesh."""
        if tf.executing_eagerly() and not (
            isinstance(value, tf.Variable) or pinning.on_mesh(value)
        ):
            with tf.device("CPU:0"):
                value = tf.convert_to_tensor(value, self.dtype)
            if value.shape == self.shape:
                value = transfer.to_mesh(value, self.layout)
        with trace_context.default_mesh(self.layout.mesh):
            return super().assign(value, *args, **kwargs)


def make(value: Any, *, name: str, trainable: bool) -> HostReadableVariable:
    """Returns a variable that starts as the eager DTensor `value`."""
    return HostReadableVariable(value, name=name, trainable=trainable)


def move_to_mesh(variable: Any, mesh: Mesh) -> Any:
    """Returns `variable` as one on `mesh`, replicated if it is elsewhere."""
    if isinstance(variable, HostReadableVariable):
        return variable
    if isinstance(variable, dtensor.DVariable):
        # The same object: others hold it already.
        variable.__class__ = HostReadableVariable
        return variable
    with tf.init_scope():
        value = transfer.to_mesh(
            variable.numpy(),
            dtensor.Layout.replicated(mesh, variable.shape.rank),
        )
        return make(
            value,
            name=variable.name.removesuffix(":0"),
            trainable=variable.trainable,
        )
