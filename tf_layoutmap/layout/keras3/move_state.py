"""Moves Keras state that was created without a scope to the mesh of a model.

Metrics, seeds and optimizer variables are moved; weights are not, and raise
`ValueError`.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap.layout.keras3 import host_layers, initial_values
from tf_layoutmap.layout.keras3.context import MeshContext
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import transfer

dtensor = tf.experimental.dtensor


def move_variable(variable: Any, context: MeshContext) -> None:
    """Replicates a metric, seed or optimizer variable on the mesh of `context`.

    The variable stays the same object. A variable that is already on a mesh is
    not changed.
    """
    if isinstance(variable, MeshVariable) or type(variable) is not (
        keras.Variable
    ):
        return
    variable.__class__ = MeshVariable
    variable._mesh_context = context
    variable._mesh_owner = None
    variable._mesh_is_state = True
    variable._given_layout = None
    value = variable._value
    if value is None:
        context.add_variable(variable)
        return
    with tf.init_scope():
        layout = dtensor.Layout.replicated(context.mesh, variable.ndim)
        with tf.device(value.device):
            value = value.read_value()
        variable._value = initial_values.make_variable(
            transfer.to_mesh(value, layout),
            name=variable.name,
            trainable=variable.trainable,
        )


def move_model_state(model: Any, context: MeshContext) -> None:
    """Replicates seeds, metrics and other state of `model` on its mesh.

    Weights of layers that run on the host stay on the host.

    Raises:
      ValueError: A weight was built outside the scope.
    """
    on_host = {id(weight) for weight in host_layers.host_weights_of(model)}
    for variable in model.variables:
        if isinstance(variable, MeshVariable) or id(variable) in on_host:
            continue
        if variable.trainable or any(variable is w for w in model.weights):
            raise ValueError(
                "All weights of a model must be placed on one mesh. Received: "
                f"variable {variable.path!r}, which was built outside "
                "layout_map_scope, while others are on a mesh. Create its "
                "layer under the scope."
            )
        move_variable(variable, context)
    for variable in model.metrics_variables:
        move_variable(variable, context)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        for variable in optimizer.variables:
            move_variable(variable, context)
