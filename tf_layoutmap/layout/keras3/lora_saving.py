"""Weights with their LoRA part added in, as layers on a mesh save them."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap.layout.keras3.context import context_of
from tf_layoutmap.layout.mesh import pinning, trace_context, transfer


def merged(original: Callable[..., Any], layer: Any) -> Any:
    """Returns the merged weight of `layer`; from a mesh, on the host.

    Keras adds the product of the two small matrices to the weight and writes
    the sum to the file. On a mesh it is a tensor in parts, which no file
    takes.
    """
    context = context_of(layer)
    if context is None:
        return original(layer)
    with trace_context.default_mesh(context.mesh):
        values = original(layer)
    return keras.tree.map_structure(_on_host, values)


def _on_host(value: Any) -> Any:
    # Without a LoRA part it is the variable itself, which knows how to be
    # saved.
    if isinstance(value, keras.Variable | tf.Variable) or (
        not pinning.on_mesh(value)
    ):
        return value
    return transfer.to_host(value)
