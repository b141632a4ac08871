"""The optimizers of tf_keras, for models on a mesh."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private
from tf_layoutmap.layout.mesh import atomic_step, pinning, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.tf_keras import mapping
from tf_layoutmap.layout.tf_keras.patches import context_of

dtensor = tf.experimental.dtensor

_state = threading.local()


def move_to_mesh(optimizer: Any, mesh: Mesh) -> None:
    """Makes `optimizer` keep its variables on `mesh`.

    Raises:
      ValueError: It is a legacy or a loss-scaling optimizer or Nadam, or has
        slots off the mesh already.
    """
    if not isinstance(optimizer, tf_keras_private.Optimizer) or (
        isinstance(optimizer, tf_keras_private.LossScaleOptimizer)
    ):
        raise ValueError(
            "A tf_keras model on a mesh trains with an optimizer of "
            "tf_keras.optimizers; legacy optimizers and loss scaling keep "
            "their variables elsewhere. Received: "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}. For "
            'half precision use the policy "mixed_bfloat16".'
        )
    if isinstance(optimizer, tf_keras.optimizers.Nadam):
        raise ValueError(
            "The step of tf_keras.optimizers.Nadam branches, which DTensor "
            "cannot place on a mesh. Use Adam, or the Nadam of Keras 3."
        )
    if getattr(optimizer, "_mesh", None) is not None:
        return
    if getattr(optimizer, "_built", False):
        raise ValueError(
            f"Optimizer {optimizer.name!r} has trained variables that are not "
            "on a mesh. Give the model on a mesh an optimizer of its own."
        )
    optimizer._mesh = mesh
    _move_variables(optimizer, mesh)


def compile_model(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compiles; moves the optimizer's counters to the mesh."""
    result = original(model, *args, **kwargs)
    context = context_of(model)
    if context is not None and model.optimizer is not None:
        move_to_mesh(model.optimizer, context.mesh)
    return result


def _move_variables(optimizer: Any, mesh: Mesh) -> None:
    """Replicates counters, rates and other scalars of `optimizer`."""
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
    """Makes the slot variables of `optimizer` before a step is traced."""
    with tracing.default_mesh(mesh):
        optimizer.build(variables)
    _move_variables(optimizer, mesh)


@contextlib.contextmanager
def recording(updates: list[tuple[Any, list[Any]]]) -> Iterator[None]:
    """While open, this thread's optimizers update nothing.

    Args:
      updates: Gets each optimizer that is called, and its variables.
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
    """Applies; remembers the shapes for `deduplicate`."""
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
    """Sums the rows of sparse gradients, on a mesh into dense ones.

    DTensor has no scatter. tf_keras' sparse rules give what its dense ones
    do, so only the time differs.
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
    """Updates; keeps the moving averages, which tf_keras skips on a mesh."""
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
            # Not tf.where: DTensor crashes on a scalar condition.
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
    """Makes a slot variable with the layout of its weight."""
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
    elif pinning.on_mesh(initial_value):
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
    slot = mapping.make_variable(
        transfer.to_mesh(initial_value, layout),
        name=f"{variable_name}/{weight.name.removesuffix(':0')}",
        trainable=False,
    )
    optimizer._variables.append(slot)
    return slot
