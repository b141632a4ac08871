"""What is known of a value while a function is traced."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import pinning

# What shapes are computed with: the host's, never divided, and TensorFlow must
# be able to follow them to the static shapes of what is made with them.
_OF_SHAPES = frozenset(
    {
        "Shape",
        "Const",
        "StridedSlice",
        "Slice",
        "Pack",
        "ConcatV2",
        "GatherV2",
        "Mul",
        "Prod",
        "Cast",
        "Sub",
        "AddV2",
        "FloorDiv",
        "FloorMod",
        "Rank",
        "Size",
        "Range",
        "Maximum",
        "Minimum",
        "ExpandDims",
        "Squeeze",
        "Reshape",
        "Identity",
        "InvertPermutation",
        "BroadcastGradientArgs",
        "DynamicStitch",
        "Fill",
        "Neg",
    }
)


def known(x: Any) -> np.ndarray | None:
    """Returns the value of `x`, a list of tensors, say; None if unknown."""
    return evaluated(tf.convert_to_tensor(x))


def as_constant(x: Any) -> Any:
    """Returns `x` as a constant if it says sizes or positions that are known.

    DTensor must know many of them, and cannot compute all that TensorFlow can.
    """
    if (
        not tf.is_symbolic_tensor(x)
        or x.op.type in ("Const", "Placeholder")
        or not _is_small_integer(x)
    ):
        return x
    value = evaluated(x)
    if value is None:
        return x
    with tf.control_dependencies(None):
        return tf.constant(value, x.dtype)


def is_shape(x: Any, depth: int = 8) -> bool:
    """Whether `x` is known while tracing, or computed from shapes alone."""
    if not tf.is_symbolic_tensor(x) or tf.get_static_value(x) is not None:
        return True
    # A permutation, say: DTensor must find its constant and no relayout.
    if _is_small_integer(x) and evaluated(x) is not None:
        return True
    if depth == 0 or x.op.type not in _OF_SHAPES:
        return False
    return x.op.type in ("Shape", "Rank", "Size") or all(
        is_shape(y, depth - 1) for y in x.op.inputs
    )


def _is_small_integer(x: Any) -> bool:
    """Whether `x` can say sizes, positions or dimensions."""
    return x.dtype in (tf.int32, tf.int64) and x.shape.rank in (0, 1)


def entries(x: Any) -> list[Any] | None:
    """Returns the numbers of a vector: an int where known, else a tensor.

    None if it is not known how many there are.
    """
    x = tf.convert_to_tensor(x)
    if x.shape.rank != 1 or x.shape[0] is None:
        return None
    static = tf.get_static_value(x, partial=True)
    if static is None:
        static = [None] * x.shape[0]
    if all(value is not None for value in static):
        return [int(value) for value in static]
    tensors = x.op.inputs if x.op.type == "Pack" else tf.unstack(x)
    return [
        tensor if value is None else int(value)
        for tensor, value in zip(tensors, static)
    ]


def evaluated(x: Any) -> Any:
    """Returns the value of `x`, a number of steps, say; None if unknown.

    More is known than by `known`: TensorFlow computes what it can for this.
    """
    if not tf.is_symbolic_tensor(x):
        return (
            x.numpy()
            if isinstance(x, tf.Tensor) and (not pinning.on_mesh(x))
            else x
            if not tf.is_tensor(x)
            else None
        )
    value = tf.get_static_value(x)
    return _tf_private.evaluated_constant(x) if value is None else value
