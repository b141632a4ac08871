"""Replacements for methods of tf_keras optimizers, for models on a mesh."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private
from tf_layoutmap.layout.mesh import atomic_step, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.tf_keras import mapping
from tf_layoutmap.layout.tf_keras.patches import context_of

dtensor = tf.experimental.dtensor

_state = threading.local()


def move_to_mesh(optimizer: Any, mesh: Mesh) -> None:
    """Moves the variables of `optimizer`, also future variables, to `mesh`.

    Raises:
      ValueError: If `optimizer` is a legacy optimizer, a loss-scaling optimizer
        or Nadam, or already has slot variables outside the mesh.
    """
    if not isinstance(optimizer, tf_keras_private.Optimizer) or (
        isinstance(optimizer, tf_keras_private.LossScaleOptimizer)
    ):
        raise ValueError(
            "The optimizer of a tf_keras model on a mesh must be one of "
            "tf_keras.optimizers; legacy optimizers and loss scaling are not "
            "supported. Received: "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}. For "
            'half precision, use the policy "mixed_bfloat16".'
        )
    if isinstance(optimizer, tf_keras.optimizers.Nadam):
        raise ValueError(
            "tf_keras.optimizers.Nadam is not supported on a mesh because its "
            "step has a conditional branch. Use Adam, or Nadam of Keras 3."
        )
    if getattr(optimizer, "_mesh", None) is not None:
        return
    if getattr(optimizer, "_built", False):
        raise ValueError(
            f"Optimizer {optimizer.name!r} has trained variables that are not "
            "on a mesh. Compile the model on a mesh with a new optimizer."
        )
    optimizer._mesh = mesh
    _move_variables(optimizer, mesh)


def compile_model(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compiles a model and moves the optimizer's counters to the mesh."""
    result = original(model, *args, **kwargs)
    context = context_of(model)
    if context is not None and model.optimizer is not None:
        move_to_mesh(model.optimizer, context.mesh)
    return result


def _move_variables(optimizer: Any, mesh: Mesh) -> None:
    """Moves the counters, learning rate and other scalars to the mesh."""
    moved = {}
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, tf.Variable):
            moved[id(value)] = mapping.move_to_mesh(value, mesh)
            if moved[id(value)] is not value:
                setattr(optimizer, name, moved[id(value)])
    optimizer._variables = [
        moved.get(id(v)) or mapping.move_to_mesh(v, mesh)
        for v in optimizer._variables
    ]


def build(optimizer: Any, variables: Any, mesh: Mesh) -> None:
    """Creates the slot variables of `optimizer` before a step is traced."""
    # `apply_gradients` of tf_keras creates the slot variables in this scope.
    with tracing.default_mesh(mesh), tf.name_scope(optimizer.name):
        optimizer.build(variables)
    _move_variables(optimizer, mesh)


@contextlib.contextmanager
def recording(updates: list[tuple[Any, list[Any]]]) -> Iterator[None]:
    """Records updates of optimizers in the context instead of applying them.

    Args:
      updates: List to which each called optimizer and its variables are added.
    """
    _state.updates = updates
    try:
        yield
    finally:
        _state.updates = None


def apply_gradients(
    original: Callable[..., Any],
    optimizer: Any,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Applies gradients and records the weight shapes for `deduplicate`."""
    updates = getattr(_state, "updates", None)
    if updates is not None:
        updates.append((optimizer, [v for _, v in grads_and_vars]))
        return None
    if getattr(optimizer, "_mesh", None) is None:
        return original(optimizer, grads_and_vars, *args, **kwargs)
    grads_and_vars = [(g, v) for g, v in grads_and_vars if g is not None]
    _state.shapes = [v.shape for _, v in grads_and_vars]
    try:
        with atomic_step.applying(
            optimizer._mesh, [g for g, _ in grads_and_vars]
        ) as gradients:
            return original(
                optimizer,
                list(
                    zip(gradients, [v for _, v in grads_and_vars], strict=True)
                ),
                *args,
                **kwargs,
            )
    finally:
        _state.shapes = None


def deduplicate(
    original: Callable[..., Any], optimizer: Any, gradients: Any
) -> Any:
    """Sums repeated rows of a sparse gradient; makes it dense on a mesh.

    A dense gradient is used because DTensor does not support scatter updates.
    The sparse and dense update rules of tf_keras give the same results, so only
    the speed differs.
    """
    shapes = getattr(_state, "shapes", None)
    if getattr(optimizer, "_mesh", None) is None or shapes is None:
        return original(optimizer, gradients)
    return [
        _dense(gradient, shape)
        for gradient, shape in zip(gradients, shapes, strict=True)
    ]


def _dense(gradient: Any, shape: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(
        tf.reshape(gradient.values, [-1, *shape[1:]]),
        tf.reshape(gradient.indices, [-1]),
        shape[0],
    )


def update(
    original: Callable[..., Any], optimizer: Any, grads_and_vars: Any
) -> Any:
    """Updates weights and moving averages.

    Without this function, tf_keras does not update the moving averages on a
    mesh.
    """
    result = original(optimizer, grads_and_vars)
    if getattr(optimizer, "_mesh", None) is None or not optimizer.use_ema:
        return result
    momentum, every = optimizer.ema_momentum, optimizer.ema_overwrite_frequency
    for _, variable in grads_and_vars:
        average = optimizer._model_variables_moving_average[
            optimizer._index_dict[optimizer._var_key(variable)]
        ]
        average.assign(momentum * average + (1 - momentum) * variable)
        if every:
            # DTensor crashes if the condition of tf.where is a scalar.
            share = tf.cast(optimizer.iterations % every == 0, variable.dtype)
            variable.assign(share * average + (1 - share) * variable)
    return result


def add_slot(
    original: Callable[..., Any],
    optimizer: Any,
    model_variable: Any,
    variable_name: str,
    shape: Any = None,
    initial_value: Any = None,
) -> Any:
    """Creates a slot variable that has the same layout as its weight."""
    weight = getattr(model_variable, "_variable", model_variable)
    if not isinstance(weight, mapping.HostReadableVariable):
        return original(
            optimizer, model_variable, variable_name, shape, initial_value
        )
    shape = weight.shape if shape is None else tf.TensorShape(shape)
    if initial_value is None:
        initial_value = np.zeros(shape, weight.dtype.as_numpy_dtype)
    elif isinstance(initial_value, tf.Variable):
        initial_value = initial_value.numpy()
    elif tracing.on_mesh(initial_value):
        initial_value = transfer.to_host(initial_value)
    elif callable(initial_value):
        initial_value = initial_value()
    layout = (
        weight.layout
        if initial_value.shape == weight.shape
        else (
            dtensor.Layout.replicated(
                weight.layout.mesh, len(initial_value.shape)
            )
        )
    )
    name = f"{variable_name}/{weight.name.removesuffix(':0')}"
    slot = mapping.make_variable(
        transfer.to_mesh(initial_value, layout),
        name="/".join(filter(None, (tf.get_current_name_scope(), name))),
        trainable=False,
    )
    optimizer._variables.append(slot)
    return slot
