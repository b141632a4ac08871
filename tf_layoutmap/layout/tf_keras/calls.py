"""Builds and calls tf_keras models and layers on a mesh."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.ops import convolutions, gates, random_state
from tf_layoutmap.layout.replication import traces
from tf_layoutmap.layout.tf_keras import mapping, optimizers
from tf_layoutmap.layout.tf_keras.patches import (
    TfKerasMap,
    context_of,
    is_building,
    is_calling,
    mesh_of_step,
    using,
)


def create_weights(model: Any, inputs: Any) -> None:
    """Creates the weights of `model` for `inputs`, on the mesh of the model."""
    is_pending = mapping.is_pending
    if model.built and not any(map(is_pending, model.weights)):
        return
    if not model.built:

        def trace(inputs: Any) -> Any:
            return (
                tf_keras.layers.Layer.__call__(model, inputs, training=False)
                if _takes_training(model)
                else (tf_keras.layers.Layer.__call__(model, inputs))
            )

        specs = tf.nest.map_structure(
            lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), inputs
        )
        with (
            using(model._layout_map),
            is_building.set_to(True),
            random_state.seeds_restored(),
        ):
            tf.function(trace).get_concrete_function(specs)
    mapping.map_model(model, context_of(model))
    context_of(model).check_all_patterns_used()


def needs_trace_of_step(
    model: Any, step: Callable[[Any], Any], kind: str
) -> bool:
    """Returns whether `step` must be traced to create weights of `model`.

    Some models, such as `tfrs.Model` and GANs, use their layers directly in
    `train_step`. Such a model may have no `call` method, and may have several
    optimizers for different weights.
    """
    if getattr(step, "__func__", None) is getattr(
        tf_keras.Model, f"{kind}_step"
    ):
        return False
    return type(model).call is tf_keras.Model.call or any(
        isinstance(value, tf_keras.optimizers.Optimizer)
        for name, value in vars(model).items()
        if name != "optimizer"
    )


def create_weights_of_step(
    model: Any, step: Callable[[Any], Any], batch: Any
) -> None:
    """Creates the weights and slot variables of a step, on the mesh.

    The step is traced in a graph that is never executed. In this graph, the
    optimizers do not update variables.
    """
    context = context_of(model)
    specs = tf.nest.map_structure(
        lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), batch
    )
    updates: list[tuple[Any, list[Any]]] = []

    def trace(batch: Any) -> Any:
        return step(batch)

    with (
        using(model._layout_map),
        is_building.set_to(True),
        optimizers.recording(updates),
        random_state.seeds_restored(),
    ):
        tf.function(trace).get_concrete_function(specs)
    swapped = mapping.map_model(model, context)
    for optimizer, variables in updates:
        optimizers.move_to_mesh(optimizer, context.mesh)
        optimizers.build(
            optimizer, [swapped.get(id(v), v) for v in variables], context.mesh
        )
    context.check_all_patterns_used()


def _takes_training(model: Any) -> bool:
    return bool(getattr(model, "_expects_training_arg", False))


def build_from_shapes(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Builds a model from input shapes, and then initializes its weights."""
    if context_of(model) is None or is_building.get():
        return original(model, *args, **kwargs)
    with using(model._layout_map), is_building.set_to(True):
        result = original(model, *args, **kwargs)
    mapping.map_model(model, context_of(model))
    return result


def call_model(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls `model` with inputs that are on the host or on the mesh."""
    context = context_of(model)
    if context is None:
        return original(model, *args, **kwargs)
    if is_building.get() or not tf.executing_eagerly():
        # `tf_keras.Model.__call__` is not called, because it would build the
        # weights of an inner model.
        return tf_keras.layers.Layer.__call__(model, *args, **kwargs)
    flat = tf.nest.flatten((args, kwargs))
    if (
        any(
            tf_keras.backend.is_keras_tensor(x) for x in flat if tf.is_tensor(x)
        )
        or is_calling.get()
    ):
        return tf_keras.layers.Layer.__call__(model, *args, **kwargs)
    inputs = args[0] if args else kwargs["inputs"]
    create_weights(model, tf.nest.map_structure(_with_shape, inputs))
    from_host = any(transfer.is_host_value(x) for x in flat)
    with is_calling.set_to(True), tracing.default_mesh(context.mesh):
        if from_host:
            args, kwargs = tf.nest.map_structure(
                lambda x: transfer.to_replicated(x, context.mesh),
                (args, kwargs),
            )
        outputs = tf_keras.layers.Layer.__call__(model, *args, **kwargs)
        return (
            tf.nest.map_structure(transfer.readable_tensor, outputs)
            if from_host
            else outputs
        )


def _with_shape(x: Any) -> Any:
    return x if tf.is_tensor(x) else np.asarray(x)


def call_layer(
    original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a layer; on a mesh, pins samples of some layers as unsharded."""
    mesh = mesh_of_step.get()
    if (
        mesh is None
        or tf.executing_eagerly()
        or (not tracing.traced_for_mesh())
    ):
        return original(layer, *args, **kwargs)
    if not mapping.in_gathering_layer.get() and (
        traces.is_fully_replicated() or assignments.gathers_weights(layer)
    ):
        with mapping.in_gathering_layer.set_to(True):
            return call_layer(original, layer, *args, **kwargs)
    if not assignments.is_kind(layer, assignments.BATCH_PARALLEL):
        return original(layer, *args, **kwargs)
    kernels = (
        []
        if traces.is_fully_replicated()
        else assignments.sharded_kernels(layer)
    )
    batch_dim = tracing.batch_dim_of_trace()
    pin: Callable[..., Any] = (
        functools.partial(tracing.pin_images, batch_dim=batch_dim)
        if kernels or assignments.is_sharded_recurrent(layer)
        else tracing.pin_unsharded_samples
    )
    args, kwargs = tf.nest.map_structure(lambda x: pin(x, mesh), (args, kwargs))
    with (
        convolutions.sharded_kernels(mesh, batch_dim, kernels)
        if kernels
        else _sharded_gates(layer, mesh, batch_dim)
    ):
        outputs = original(layer, *args, **kwargs)
    return tf.nest.map_structure(lambda x: pin(x, mesh), outputs)


def _sharded_gates(
    layer: Any, mesh: Mesh, batch_dim: str | None
) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which a recurrent cell is sharded.

    Some layers of tf_keras run the computation of their cell without calling
    the cell.
    """
    cell = getattr(layer, "cell", layer)
    if not assignments.is_kind(cell, assignments.GATED_CELLS):
        return contextlib.nullcontext()
    return gates.sharded_weights(
        mesh,
        batch_dim,
        None if traces.is_fully_replicated() else assignments.gate_axes(cell),
    )


def call_function(
    original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a `tf.function`; discards its trace if a model is being built.

    While a model is being built, its weights are not on the mesh. A function
    that kept this trace would read variables that are replaced afterwards.
    """
    if not tf.executing_eagerly() and (
        is_building.get()
        or (
            isinstance(tf_keras_private.layout_map_in_use(), TfKerasMap)
            and tf_keras_private.is_inside_shape_inference()
        )
    ):
        function = function._clone(None)
    return original(function, *args, **kwargs)
