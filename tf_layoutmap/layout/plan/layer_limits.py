"""What DTensor cannot compute, found when a layer is built.

TensorFlow would report it in the middle of a training step, by the name of an
op. Each rule names the layer, the variable and the layout, and a way out.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private

_DEPTHWISE = (
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
)
CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    *_DEPTHWISE,
)
_GATED_CELLS = (keras.layers.LSTMCell, keras.layers.GRUCell)
_GATED = (*_GATED_CELLS, keras.layers.LSTM, keras.layers.GRU)

# Layers that DTensor computes correctly on whole samples only; `call` of
# `keras3/layer_calls.py` pins their inputs and outputs.
BATCH_PARALLEL = (
    *CONVOLUTIONS,
    keras.layers.RNN,
    *_GATED_CELLS,
    keras.layers.SimpleRNNCell,
    keras.layers.TimeDistributed,
    keras.layers.Bidirectional,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.AveragePooling1D,
    keras.layers.AveragePooling2D,
    keras.layers.AveragePooling3D,
)


def is_kind(layer: Any, kinds: tuple[type, ...]) -> bool:
    """Whether `layer` is one of `kinds` of Keras 3, or of tf_keras."""
    return isinstance(layer, kinds) or any(
        base.__module__.startswith("tf_keras.")
        and base.__name__ in {kind.__name__ for kind in kinds}
        for base in type(layer).__mro__
    )


def gathers_weights(layer: Any) -> bool:
    """Whether a layer is given its weights whole when it is called.

    DTensor convolves with whole kernels only, and splits no divided gates. The
    Embedding of Keras 3 looks up where rows are; that of tf_keras cannot.
    """
    if isinstance(layer, _tf_keras_embedding()):
        layout = getattr(layer.embeddings, "layout", None)
        return layout is not None and (
            layout.sharding_specs[0] != tf.experimental.dtensor.UNSHARDED
        )
    return is_kind(layer, CONVOLUTIONS + _GATED)


def weight_problems(
    layer: Any, variable: Any, axes: tuple[str | None, ...], strict: bool
) -> list[str]:
    """Returns why `layer` cannot use `variable` with the layout `axes`.

    Args:
      layer: Of Keras 3 or tf_keras.
      variable: A weight of it.
      axes: Mesh axis of each dimension.
      strict: Whether weights must not be gathered for a layer.
    """
    if not strict and is_kind(
        layer, (*CONVOLUTIONS, *_GATED, keras.layers.Embedding)
    ):
        return []
    if is_kind(layer, CONVOLUTIONS) and any(axes):
        return [
            f"DTensor convolves with whole kernels only; leave all weights "
            f"of {_named(layer)} unsharded: use {(None,) * len(axes)}, and "
            "shard the Dense layers"
        ]
    if is_kind(layer, _GATED_CELLS) and axes and axes[-1] is not None:
        whole = (*axes[:-1], None)
        return [
            f"{_named(layer)} splits the last dimension of its weights into "
            f"gates, which DTensor cannot do to a sharded one: use {whole}"
        ]
    if isinstance(layer, _tf_keras_embedding()) and axes[0] is not None:
        return [
            f"DTensor cannot look rows up where they are divided; divide the "
            f"columns of {_named(layer)}: use {(None, axes[0])}, or the "
            "Embedding of Keras 3, whose rows can be divided"
        ]
    # Layers of ours check their own weights.
    problems_of_layout = getattr(layer, "problems_of_layout", None)
    return [] if problems_of_layout is None else problems_of_layout(axes)


def _tf_keras_embedding() -> tuple[type, ...]:
    tf_keras = _keras_private.imported_tf_keras()
    return () if tf_keras is None else (tf_keras.layers.Embedding,)


def _named(layer: Any) -> str:
    return f"layer {layer.name!r} ({type(layer).__name__})"
