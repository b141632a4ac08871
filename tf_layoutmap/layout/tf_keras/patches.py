"""The layout map scope for tf_keras models, and replaced tf_keras methods.

In the DTensor code of tf_keras, user code must pass a mesh to each optimizer
and metric, and copy each batch to the mesh. With `scope`, this is not
necessary, because each model that is created in the scope stores its context in
a `TfKerasMap`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tf_keras

from tf_layoutmap._core import patches, tf_keras_private
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops import random_state
from tf_layoutmap.layout.tf_keras import mapping

# Whether this thread traces a model only in order to create its weights.
is_building = ThreadValue(False)
# Whether this thread calls a model eagerly, with tensors on its mesh.
is_calling = ThreadValue(False)
# The mesh of the step that runs in this thread.
mesh_of_step: ThreadValue[Mesh | None] = ThreadValue(None)


class TfKerasMap:
    """Stores the context of a model where tf_keras stores its layout map."""

    def __init__(self, context: Any):
        self.context = context

    def get_default_mesh(self) -> Mesh:
        """Returns the mesh for counters, losses and metrics."""
        return self.context.mesh

    def __deepcopy__(self, memo: dict) -> "TfKerasMap":
        return self


def context_of(model: Any) -> Any:
    """Returns the context of a tf_keras model, or None."""
    layout_map = getattr(model, "_layout_map", None)
    return layout_map.context if isinstance(layout_map, TfKerasMap) else None


@contextlib.contextmanager
def using(layout_map: Any) -> Iterator[None]:
    """Context manager in which tf_keras creates models with `layout_map`."""
    before = tf_keras_private.layout_map_in_use()
    tf_keras_private.use_layout_map(layout_map)
    try:
        yield
    finally:
        tf_keras_private.use_layout_map(before)


@contextlib.contextmanager
def scope(context: Any) -> Iterator[None]:
    """Context manager in which new tf_keras models use `context`."""
    patches.ensure("tf_keras")
    with using(TfKerasMap(context)):
        yield


def add_weight(
    original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Creates a weight; under a layout map, the value is created later.

    Raises:
      NotImplementedError: If the layouts of the scope are planned.
    """
    layout_map = tf_keras_private.layout_map_in_use()
    if (
        isinstance(layer, tf_keras.metrics.Metric)
        or kwargs.get("layout")
        or (not isinstance(layout_map, TfKerasMap))
    ):
        return original(layer, *args, **kwargs)
    if layout_map.context.planner is not None:
        raise NotImplementedError(
            'The layout map "auto" requires models of Keras 3, because layouts '
            "of tf_keras models are not planned. Received: layer "
            f"{layer.name!r} of tf_keras. Pass a tlm.LayoutMap with a layout "
            'for each weight instead of "auto", or create the model with '
            "Keras 3."
        )
    with tf_keras_private.lazy_init_scope():
        weight = original(layer, *args, **kwargs)
    mapping.draw_seed(getattr(weight, "_variable", weight))
    return weight


def init_model(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> None:
    """Initializes a model and adds it to its context."""
    original(model, *args, **kwargs)
    context = context_of(model)
    if context is not None:
        context.registry.layers.add(model)


def can_be_fused(original: Callable[..., Any], layer: Any, *args: Any) -> bool:
    """Returns whether layer normalization is fused; false on a mesh.

    DTensor does not support the fused operation. The operations that are not
    fused give the same result.
    """
    on_mesh = tracing.traced_for_mesh() or isinstance(
        tf_keras_private.layout_map_in_use(), TfKerasMap
    )
    return not on_mesh and original(layer, *args)


def map_model(original: Callable[..., Any], model: Any, layout_map: Any) -> Any:
    """Replaces the pending weights of a model by variables on the mesh."""
    if not isinstance(layout_map, TfKerasMap):
        return original(model, layout_map)
    # While an outer model is being built, its inner models are not mapped,
    # because their weights get their full names only at the end.
    if not is_building.get():
        mapping.map_model(model, context_of(model))
    return model


def assign_value(
    original: Callable[..., Any], variable: Any, value: Any
) -> Any:
    """Assigns a host value to a variable."""
    if isinstance(variable, mapping.HostReadableVariable):
        return variable.assign(value)
    return original(variable, value)


def make_legacy_seed(original: Callable[..., Any], generator: Any) -> Any:
    """Draws the next seed of a random generator for a legacy random op."""
    random_state.use_seed(generator)
    return original(generator)


def dropout_mask(
    original: Callable[..., Any], cell: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns a dropout mask of a recurrent cell, a new one per loop step.

    In a loop, tf_keras creates the masks in the graph of the loop body. In an
    unrolled loop, tf_keras would use the masks of the first step in all steps.
    """
    if random_state.in_new_loop_step(cell):
        cell.reset_dropout_mask()
        cell.reset_recurrent_dropout_mask()
    return original(cell, *args, **kwargs)


def choose_lstm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Selects the LSTM implementation; on a mesh, the standard implementation.

    By default, tf_keras creates one function for CPUs and another function for
    GPUs, and TensorFlow's placer selects one of them. DTensor does not run the
    placer, so its compiler crashes and ends the process.
    """
    on_mesh = tracing.traced_for_mesh()
    chosen = (
        tf_keras_private.LSTM_MODULE.standard_lstm if on_mesh else (original)
    )
    return chosen(*args, **kwargs)


def choose_gru(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Selects the GRU implementation; see `choose_lstm`."""
    on_mesh = tracing.traced_for_mesh()
    chosen = tf_keras_private.GRU_MODULE.standard_gru if on_mesh else (original)
    return chosen(*args, **kwargs)
