"""What DTensor cannot compute, found when a layer is built.

TensorFlow would say so in the middle of a training step, in the words of an
op. Each rule names the layer, the variable and the layout, and a way out.
"""

from typing import Any

import keras

_CONV_KINDS = (
    keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D,
    keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose, keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D, keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D)


def weight_problems(layer: Any, variable: Any,
                    axes: tuple[str | None, ...]) -> list[str]:
    """Returns why `layer` cannot use `variable` with the layout `axes`."""
    if isinstance(layer, _CONV_KINDS) and len(axes) > 1 and any(axes):
        return [
            f"DTensor convolves with whole kernels only; leave the kernel of "
            f"{_named(layer)} unsharded: use {(None,) * len(axes)}. Its bias "
            "may be sharded"]
    return []


def layer_problems(layer: Any) -> list[str]:
    """Returns why `layer` cannot run on a mesh, whatever its layouts."""
    if isinstance(layer, keras.layers.RNN) and not layer.unroll:
        return [
            f"{_named(layer)} loops over time with a TensorList, which "
            "DTensor cannot place: pass unroll=True"]
    return []


def _named(layer: Any) -> str:
    return f"layer {layer.name!r} ({type(layer).__name__})"
