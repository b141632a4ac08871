"""Checks that only models of the layer's Keras version use a layer.

Without the check, a model of the other Keras version could call the layer and
would receive activations. However, the model would not recognize the object as
a layer, and would therefore not train or save its weights. `LayerBase` declares
the attributes of a Keras layer for type checkers. At run time, the `Layer`
class of one Keras version provides these attributes.
"""

import sys
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private


def check_not_tf_keras(layer: Any, inputs: Any) -> None:
    """Checks that a Keras 3 layer is not used in a tf_keras model.

    Raises:
      RuntimeError: If a tf_keras layer calls the layer, or tf_keras created its
        inputs.
    """
    if "tf_keras" not in sys.modules:
        return
    import tf_keras

    from tf_layoutmap._core import tf_keras_private

    context = tf_keras_private.call_context()
    _check_version(
        layer,
        inputs,
        tf_keras.__internal__.KerasTensor,
        context.layer if context.in_call else None,
        version=("Keras 3", "tlm.layers"),
        other=("tf_keras", "tlm.layers.tf_keras"),
    )


def check_not_keras3(layer: Any, inputs: Any) -> None:
    """Checks that a tf_keras layer is not used in a Keras 3 model.

    Raises:
      RuntimeError: If a Keras 3 layer calls the layer, or Keras 3 created its
        inputs.
    """
    _check_version(
        layer,
        inputs,
        keras.KerasTensor,
        keras_private.calling_layer(),
        version=("tf_keras", "tlm.layers.tf_keras"),
        other=("Keras 3", "tlm.layers"),
    )


def _check_version(
    layer: Any,
    inputs: Any,
    symbolic: type,
    calling_layer: Any,
    *,
    version: tuple[str, str],
    other: tuple[str, str],
) -> None:
    """Checks that the other Keras version neither calls nor feeds `layer`.

    Args:
      layer: The called layer.
      inputs: Inputs of the call.
      symbolic: Type of symbolic inputs in the other Keras version.
      calling_layer: Layer of the other Keras version that is calling `layer`,
        or None.
      version: Name of the layer's Keras version, and module of its layers.
      other: Name of the other Keras version, and module of its layers.
    """
    if any(isinstance(tensor, symbolic) for tensor in tf.nest.flatten(inputs)):
        caller = f"a symbolic input of {other[0]}"
    elif calling_layer is not None:
        caller = f"a call inside {other[0]} layer {calling_layer.name!r}"
    else:
        return
    name = type(layer).__name__
    raise RuntimeError(
        f"{version[1]}.{name} is for {version[0]}; use {other[1]}.{name} in a "
        f"{other[0]} model, which would not train this layer. Received: "
        f"{caller} (layer {layer.name!r})."
    )


if TYPE_CHECKING:

    class LayerBase:
        """Attributes and methods of a Keras layer that mixins use."""

        name: str
        built: bool
        trainable: bool
        compute_dtype: str
        variable_dtype: str

        def __init__(self, **kwargs: Any): ...

        def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any: ...

        def add_loss(self, loss: Any) -> None: ...

        def get_config(self) -> dict[str, Any]: ...
else:
    LayerBase = object
