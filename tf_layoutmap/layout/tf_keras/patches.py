"""The scope for models of tf_keras, and weights that belong to it.

tf_keras has DTensor code of its own, which wants a mesh for each optimizer and
metric, and batches that are on the mesh. Here one scope does all of it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tf_keras

from tf_layoutmap import _tf_keras_private
from tf_layoutmap._patches import engine
from tf_layoutmap.layout.mesh import trace_context
from tf_layoutmap.layout.tf_keras import mapping as tf_keras_mapping
from tf_layoutmap.layout.tf_keras import variable as tf_keras_variable
from tf_layoutmap.layout.tf_keras.context import (
    TfKerasMap,
    context_of,
    is_building,
)


@contextlib.contextmanager
def scope(context: Any) -> Iterator[None]:
    """Models of tf_keras made in this thread belong to `context`."""
    engine.ensure("tf_keras")
    experimental = tf_keras.backend.experimental
    # DTensor places the state of a generator; it cannot place legacy ops.
    had_generator = experimental.is_tf_random_generator_enabled()
    before = _tf_keras_private.layout_map_in_use()
    experimental.enable_tf_random_generator()
    _tf_keras_private.use_layout_map(TfKerasMap(context))
    try:
        yield
    finally:
        _tf_keras_private.use_layout_map(before)
        if not had_generator:
            experimental.disable_tf_random_generator()


def add_weight(
    original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Makes a weight without a value while a layout map waits for its name."""
    if (
        isinstance(layer, tf_keras.metrics.Metric)
        or kwargs.get("layout")
        or (not isinstance(_tf_keras_private.layout_map_in_use(), TfKerasMap))
    ):
        return original(layer, *args, **kwargs)
    with _tf_keras_private.lazy_init_scope():
        weight = original(layer, *args, **kwargs)
    tf_keras_mapping.draw_seed(getattr(weight, "_variable", weight))
    return weight


def init_model(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> None:
    original(model, *args, **kwargs)
    context = context_of(model)
    if context is not None:
        context.registry.layers.add(model)


def can_be_fused(original: Callable[..., Any], layer: Any, *args: Any) -> bool:
    # The fused operation is one that DTensor lacks, with the same result.
    on_mesh = trace_context.traced_for_mesh() or isinstance(
        _tf_keras_private.layout_map_in_use(), TfKerasMap
    )
    return not on_mesh and original(layer, *args)


def map_model(original: Callable[..., Any], model: Any, layout_map: Any) -> Any:
    if not isinstance(layout_map, TfKerasMap):
        return original(model, layout_map)
    # An inner model's weights have their names when the outer one is built.
    if not is_building.get():
        tf_keras_mapping.map_model(model, context_of(model))
    return model


def assign_value(
    original: Callable[..., Any], variable: Any, value: Any
) -> Any:
    if isinstance(variable, tf_keras_variable.HostReadableVariable):
        return variable.assign(value)
    return original(variable, value)


def choose_lstm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """tf_keras' choice of an implementation; on a mesh the standard one.

    It makes functions for CPUs and GPUs, among which a TensorFlow that places
    operations chooses. DTensor does not, and its compiler ends the process.
    """
    on_mesh = trace_context.traced_for_mesh()
    chosen = (
        _tf_keras_private.LSTM_MODULE.standard_lstm if on_mesh else (original)
    )
    return chosen(*args, **kwargs)


def choose_gru(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same choice for GRU."""
    on_mesh = trace_context.traced_for_mesh()
    chosen = (
        _tf_keras_private.GRU_MODULE.standard_gru if on_mesh else (original)
    )
    return chosen(*args, **kwargs)
