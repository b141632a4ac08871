"""A layer for one Keras version is never called by a model of the other.

The call would work, but no model trains, counts or saves a layer that it does
not know for one: so it is refused.
"""

# DOC-MERGE: What layers of both Keras versions have, as the base of our mixins.
#
# Only type checkers see it: a mixin stands before the `Layer` of one version,
# which brings all of this.
#
import sys
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private


def refuse_tf_keras(layer: Any, inputs: Any) -> None:
    """Raises when a Keras 3 layer is called with or by what is tf_keras'.

    Raises:
      RuntimeError: It is.
    """
    if "tf_keras" not in sys.modules:
        return
    import tf_keras

    from tf_layoutmap._core import tf_keras_private

    context = tf_keras_private.call_context()
    _refuse(
        layer,
        inputs,
        tf_keras.__internal__.KerasTensor,
        context.layer if context.in_call else None,
        own=("Keras 3", "tlm.layers"),
        other=("tf_keras", "tlm.layers.tf_keras"),
    )


def refuse_keras(layer: Any, inputs: Any) -> None:
    """Raises when a tf_keras layer is called with or by what is Keras 3's.

    Raises:
      RuntimeError: It is.
    """
    _refuse(
        layer,
        inputs,
        keras.KerasTensor,
        keras_private.calling_layer(),
        own=("tf_keras", "tlm.layers.tf_keras"),
        other=("Keras 3", "tlm.layers"),
    )


def _refuse(
    layer: Any,
    inputs: Any,
    symbolic: type,
    calling_layer: Any,
    *,
    own: tuple[str, str],
    other: tuple[str, str],
) -> None:
    """Raises if the other Keras version calls, or made the inputs.

    Args:
      layer: That is called.
      inputs: Of the call.
      symbolic: Type of the symbolic inputs of the other version.
      calling_layer: Layer of the other version inside whose call this is.
      own: Name of the layer's version, and where its layers are.
      other: The same of the other version.
    """
    if any(isinstance(one, symbolic) for one in tf.nest.flatten(inputs)):
        caller = f"a symbolic input of {other[0]}"
    elif calling_layer is not None:
        caller = f"a call inside {other[0]} layer {calling_layer.name!r}"
    else:
        return
    name = type(layer).__name__
    raise RuntimeError(
        f"{own[1]}.{name} is for {own[0]}; a {other[0]} model takes "
        f"{other[1]}.{name}, or would not train it. Received: {caller} "
        f"(layer {layer.name!r})."
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
