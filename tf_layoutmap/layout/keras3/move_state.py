"""Moving what Keras made without a scope to the mesh of a model."""

from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.keras3.context import MeshHome
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import transfer

dtensor = tf.experimental.dtensor


def adopt_state(variable: Any, home: MeshHome) -> None:
    """Replicates a metric, seed or optimizer variable on the mesh of `home`.

    The variable stays the same object; what is on a mesh already stays.
    """
    if isinstance(variable, MeshVariable) or type(variable) is not (
            keras.Variable):
        return
    variable.__class__ = MeshVariable
    variable._mesh_home = home
    variable._mesh_owner = None
    variable._mesh_is_state = True
    variable._given_layout = None
    value = variable._value
    if value is None:
        home.add_variable(variable)
        return
    with tf.init_scope():
        layout = dtensor.Layout.replicated(home.mesh, variable.ndim)
        with tf.device(value.device):
            value = value.read_value()
        variable._value = initial_values.make_variable(
            transfer.to_mesh(value, layout), name=variable.name,
            trainable=variable.trainable)


def adopt_model_state(model: Any, home: MeshHome) -> None:
    """Replicates seeds, metrics and other state of `model`; refuses weights.

    Raises:
      ValueError: Some weight was built without the scope.
    """
    for variable in model.variables:
        if isinstance(variable, MeshVariable):
            continue
        if variable.trainable or any(variable is w for w in model.weights):
            raise ValueError(
                "All weights of a model lie on one mesh. Received: variable "
                f"{variable.path!r}, which was built outside "
                "layout_map_scope, beside others on a mesh. Make its layer "
                "under the scope.")
        adopt_state(variable, home)
    for variable in model.metrics_variables:
        adopt_state(variable, home)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        for variable in optimizer.variables:
            adopt_state(variable, home)
