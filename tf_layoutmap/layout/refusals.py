"""TensorFlow's word that DTensor lacks an op, as a sentence for users."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_LACKS = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")

# What in Keras uses an op that DTensor lacks, and what to do instead.
_REMEDIES = {
    "AvgPoolGrad": "The gradient of AveragePooling needs it: use MaxPooling, "
                   "GlobalAveragePooling or a strided Conv layer.",
    "AvgPool3DGrad": "The gradient of AveragePooling3D needs it: use "
                     "MaxPooling, GlobalAveragePooling or a strided Conv "
                     "layer.",
    "ReverseV2": "The AUC metric and reversed sequences need it: compute AUC "
                 "from `model.predict`, or reverse the data before training.",
    "EmptyTensorList": "Loops over time need it: pass unroll=True to "
                       "recurrent layers.",
    "DepthwiseConv2dNativeBackpropFilter":
        "Depthwise and separable convolutions need it: use Conv layers.",
    "FusedBatchNormV3":
        "BatchNormalization of tf_keras uses it for images: pass fused=False.",
    "TensorListReserve": "Loops such as tf.map_fn and tf.while_loop need it: "
                         "unroll them.",
}


class UnsupportedByDTensorError(NotImplementedError):
    """A model does what DTensor cannot place on a mesh."""


@contextmanager
def explained(model: Any, verb: str) -> Iterator[None]:
    """Raises TensorFlow's errors about missing ops as one that explains."""
    try:
        yield
    except tf.errors.OpError as error:
        lacking = _LACKS.search(str(error))
        if lacking is None:
            raise
        op = lacking.group(1)
        remedy = _REMEDIES.get(
            op, "Replace the layer, loss or metric that uses it.")
        raise UnsupportedByDTensorError(
            f"DTensor has no {op} operation on a mesh; model "
            f"{model.name!r} needs one to {verb}. {remedy}") from error
