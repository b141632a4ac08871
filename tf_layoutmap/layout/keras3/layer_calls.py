"""Layers on a mesh, called with tensors from the host."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.layout.keras3 import host_layers
from tf_layoutmap.layout.keras3.context import context_of
from tf_layoutmap.layout.mesh import batches, pinning, trace_context
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.mesh.thread_value import ThreadValue
from tf_layoutmap.layout.plan import layer_limits
from tf_layoutmap.layout.tf_ops import eager_operations

dtensor = tf.experimental.dtensor

_is_inside = ThreadValue(False)


def on_host() -> AbstractContextManager[None]:
    """While open, layers of a mesh that have no weights on it run elsewhere."""
    return _is_inside.set_to(True)


def call(
    original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls `layer`, after moving inputs from the host to its mesh.

    With any input from the host, the outputs are replicated, so that they
    can be read like any tensor; with inputs on the mesh they stay as they
    are.
    """
    context = context_of(layer)
    if context is None or _keras_private.is_abstract():
        return original(layer, *args, **kwargs)
    if not tf.executing_eagerly():
        return _traced(original, layer, context.mesh, args, kwargs)
    if _is_inside.get():
        return original(layer, *args, **kwargs)
    flat = keras.tree.flatten((args, kwargs))
    if any(isinstance(x, keras.KerasTensor) for x in flat):
        return original(layer, *args, **kwargs)
    from_host = any(batches.is_host_value(x) for x in flat)
    split = host_layers.of_model(layer) if from_host and args else None
    results: list[Any] = []
    if split is not None:
        with on_host():
            results = split.compute(args[0])
    with (
        _is_inside.set_to(True),
        trace_context.default_mesh(context.mesh),
        eager_operations.strictly(context.layout_map.strict),
    ):
        if from_host:
            # Devices do not exchange strings, which no layer on the mesh uses.
            args, kwargs, results = cast(
                Any,
                keras.tree.map_structure(
                    lambda x: (
                        x
                        if split is not None and _is_string(x)
                        else batches.replicated(x, context.mesh)
                    ),
                    (args, kwargs, results),
                ),
            )
        with host_layers.given(split, results):
            outputs = original(layer, *args, **kwargs)
        if from_host:
            outputs = keras.tree.map_structure(batches.readable, outputs)
        return outputs


def _is_string(x: Any) -> bool:
    return tf.is_tensor(x) and x.dtype == tf.string


def _traced(
    original: Callable[..., Any], layer: Any, mesh: Mesh, args: Any, kwargs: Any
) -> Any:
    """Calls `layer` in a function; keeps some layers batch-parallel.

    DTensor convolves whole kernels over whole images, and unrolls time over
    whole features. Layouts propagate back from the layers that follow, so
    inputs and outputs are pinned.
    """
    # Outside of it, the graph may be an export, which serves anywhere.
    if not isinstance(layer, layer_limits.BATCH_PARALLEL) or (
        not trace_context.traced_for_mesh()
    ):
        return original(layer, *args, **kwargs)
    # TimeDistributed works with time in front, where the batch axis is lost.
    pin = (
        pinning.whole
        if isinstance(layer, keras.layers.TimeDistributed)
        else pinning.whole_samples
    )
    args, kwargs = cast(
        Any, keras.tree.map_structure(lambda x: pin(x, mesh), (args, kwargs))
    )
    outputs = original(layer, *args, **kwargs)
    return keras.tree.map_structure(lambda x: pin(x, mesh), outputs)
