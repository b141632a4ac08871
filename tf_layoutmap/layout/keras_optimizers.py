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
    """Applies gradients, eagerly under the mesh of the variables."""
    variables = (optimizer._trainable_variables if trainable_variables is None
                 else list(trainable_variables))
    home = next((home_of(v) for v in variables
                 if isinstance(v, MeshVariable)), None)
    scope = (dtensor.default_mesh(home.mesh)
             if home is not None and tf.executing_eagerly()
             else contextlib.nullcontext())
    with scope:
        grads = [_with_static_shape(g, v) for g, v in zip(grads, variables)]
        return original(
            optimizer, grads,
            None if trainable_variables is None else variables)


# DTensor places no scatter on a variable. The optimizer's own arithmetic on
# the rows of a sparse gradient is left as it is, repeated rows included, and
# only the last step, adding rows to a variable, becomes a dense one: the
# numbers stay those of Keras without a mesh.


def assign_add(original: Callable[..., Any], optimizer: Any, variable: Any,
               value: Any) -> Any:
    """Adds, rows of a sparse value too."""
    return original(optimizer, variable, _dense_for_mesh(variable, value))


def assign_sub(original: Callable[..., Any], optimizer: Any, variable: Any,
               value: Any) -> Any:
    """Subtracts, rows of a sparse value too."""
    return original(optimizer, variable, _dense_for_mesh(variable, value))


def assign(original: Callable[..., Any], optimizer: Any, variable: Any,
           value: Any) -> Any:
    """Assigns; refuses single rows."""
    if isinstance(value, tf.IndexedSlices) and _on_mesh(variable):
        raise ValueError(
            f"Optimizer {optimizer.name!r} overwrites single rows of variable "
            f"{variable.name!r}, which DTensor cannot do to a variable on a "
            "mesh. Use an optimizer that adds its updates, such as Adam, "
            "Adagrad or SGD.")
    return original(optimizer, variable, value)


def _on_mesh(variable: Any) -> bool:
    return isinstance(variable, MeshVariable | dtensor.DVariable)


def _dense_for_mesh(variable: Any, value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices) and _on_mesh(variable):
        return tf.math.unsorted_segment_sum(
            value.values, value.indices, variable.shape[0])
    return value


def _with_static_shape(gradient: Any, variable: Any) -> Any:
    """Returns a gradient whose shape is a number and not a tensor.

    DTensor cuts only what has a size when a function is compiled.
    """
    if not isinstance(gradient, tf.IndexedSlices) or not _on_mesh(variable):
        return gradient
    rows, indices = gradient.values, gradient.indices
    count = rows.shape[0] or indices.shape[0]
    if count is not None:
        rows = tf.reshape(rows, [count, *variable.shape[1:]])
        indices = tf.reshape(indices, [count])
    return tf.IndexedSlices(
        rows, indices, tf.constant(variable.shape.as_list(), tf.int64))
