"""A layer of one flavour of Keras is never called by a model of the other.

The call would work, but no model trains, counts or saves a layer that it does
not know for one: so it is refused.
"""

import sys
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private


def refuse_tf_keras(layer: Any, inputs: Any) -> None:
    """Raises when a Keras 3 layer is called with or by what is tf_keras'.

    Raises:
      RuntimeError: It is.
    """
    if "tf_keras" not in sys.modules:
        return
    import tf_keras

    from tf_layoutmap import _tf_keras_private

    caller = None
    if any(isinstance(one, tf_keras.__internal__.KerasTensor)
           for one in tf.nest.flatten(inputs)):
        caller = "a symbolic input of tf_keras"
    elif _tf_keras_private.call_context().in_call:
        caller = ("a call inside tf_keras layer "
                  f"{_tf_keras_private.call_context().layer.name!r}")
    name = type(layer).__name__
    if caller:
        raise RuntimeError(
            f"tlm.layers.{name} is for Keras 3; a tf_keras model takes "
            f"tlm.layers.tf_keras.{name}, or would not train it. "
            f"Received: {caller} (layer {layer.name!r}).")


def refuse_keras(layer: Any, inputs: Any) -> None:
    """Raises when a tf_keras layer is called with or by what is Keras 3's.

    Raises:
      RuntimeError: It is.
    """
    caller = None
    if any(isinstance(one, keras.KerasTensor)
           for one in tf.nest.flatten(inputs)):
        caller = "a symbolic input of Keras 3"
    elif _keras_private.calling_layer() is not None:
        caller = ("a call inside Keras 3 layer "
                  f"{_keras_private.calling_layer().name!r}")
    name = type(layer).__name__
    if caller:
        raise RuntimeError(
            f"tlm.layers.tf_keras.{name} is for tf_keras; a Keras 3 model "
            f"takes tlm.layers.{name}, or would not train it. "
            f"Received: {caller} (layer {layer.name!r}).")
