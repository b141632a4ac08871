"""Functions that Keras traces only in order to infer shapes of tables' layers.

Keras calls the layers of a new model to infer the shapes of their outputs. In
such a call, a table does not look up rows, and its weights are not read.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private, patches
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore


def enable() -> None:
    """Installs the patch of `tf.function`."""
    patches.ensure("keras3_shape_inference")


def call_function(
    original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a `tf.function`; discards its trace if only shapes are inferred.

    If a layer that contains a table kept this trace, the table would return
    zeros in every later call, and would never be trained.
    """
    if (
        not tf.executing_eagerly()
        and keras_private.is_abstract()
        and _is_in_layer_with_table()
    ):
        function = function._clone(None)
    return original(function, *args, **kwargs)


def _is_in_layer_with_table() -> bool:
    """Returns whether a layer that is being called contains a table."""
    return any(
        isinstance(layer, EmbeddingCore | TPUEmbeddingCore)
        for caller in keras_private.name_scope_callers()[-1:]
        if isinstance(caller, keras.layers.Layer)
        for layer in caller._flatten_layers()
    )
