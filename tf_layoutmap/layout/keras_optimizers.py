"""Optimizers whose variables follow the weights onto the mesh."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout import adoption
from tf_layoutmap.layout.mesh_home import home_of
from tf_layoutmap.layout.mesh_variable import MeshVariable

dtensor = tf.experimental.dtensor


def build(original: Callable[..., Any], optimizer: Any,
          variables: Iterable[Any]) -> Any:
    """Builds, after moving counters and learning rate to the mesh.

    The slot variables come after: Keras hands them the layout of their
    weight, and `_mesh_home` brings the rest to the mesh.
    """
    variables = list(variables)
    home = next((home_of(v) for v in variables
                 if isinstance(v, MeshVariable)), None)
    if home is not None:
        vars(optimizer)["_mesh_home"] = home
        for variable in optimizer._variables:
            adoption.adopt_state(variable, home)
    return original(optimizer, variables)


def apply(original: Callable[..., Any], optimizer: Any, grads: Any,
          trainable_variables: Any = None) -> Any:
    """Applies gradients; those of sparse reads become dense.

    DTensor places no scatter on a resource, so a row-wise update of a
    variable on a mesh would not compile.
    """
    variables = (optimizer._trainable_variables if trainable_variables is None
                 else list(trainable_variables))
    home = next((home_of(v) for v in variables
                 if isinstance(v, MeshVariable)), None)
    if home is None:
        return original(optimizer, grads, trainable_variables)
    scope = (dtensor.default_mesh(home.mesh) if tf.executing_eagerly()
             else contextlib.nullcontext())
    with scope:
        grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices)
                 else g for g in grads]
        return original(
            optimizer, grads,
            None if trainable_variables is None else variables)
