"""Operations that DTensor silently gets wrong, for every caller.

A dimension that is put together, read backwards, or counted through by class
must be whole: DTensor lets each device do it to its own part. So it is made
whole where all of TensorFlow's Python makes such an operation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import pinning
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.tf_ops import einsum_axes
from tf_layoutmap.layout.tf_ops.known_values import is_shape, known

dtensor = tf.experimental.dtensor

# A name scope of einsums whose operands are divided alike, which stay so. Their
# gradients are made in it, too.
DIVIDED_ALIKE = "divided_alike"


def concat(
    original: Callable[..., Any],
    mesh: Mesh | None,
    values: Any,
    axis: Any,
    name: str | None = None,
) -> Any:
    """`tf.concat`, of samples that are whole.

    Where what comes after divides that dimension, DTensor puts the parts of
    one device side by side, in the wrong order.
    """
    if not isinstance(values, (list, tuple)) or all(map(is_shape, values)):
        return original(values, axis, name=name)
    static = tf.get_static_value(axis)
    values = _with_something(values, static)
    if len(values) == 1:
        return tf.identity(values[0], name=name)
    # A layout can leave one dimension only as it is.
    first = not static or any(
        static + len(getattr(x, "shape", ())) == 0 for x in values
    )
    pin = pinning.whole if first else pinning.whole_samples
    pinned = [pin(x, mesh) for x in values]
    return pin(original(pinned, axis, name=name), mesh)


def _with_something(values: Sequence[Any], axis: int | None) -> Sequence[Any]:
    """Returns the parts that are not empty, or all of them if all are.

    The gradient of an empty part ends the process.
    """
    parts = [
        x
        for x in values
        if axis is None
        or not (tf.is_tensor(x) and x.shape.rank and x.shape[axis] == 0)
    ]
    return parts or values


def cut(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    begin: Any,
    size: Any,
    name: str | None = None,
) -> Any:
    """`tf.slice`, as a strided slice where begin and size are known.

    Its own gradient pads, for which DTensor takes each device's part for all.
    Where they are computed, samples are whole.
    """
    if is_shape(input):
        return original(input, begin, size, name=name)
    starts, sizes = known(begin), known(size)
    if starts is None or sizes is None or not input.shape.is_fully_defined():
        x = pinning.whole(input, mesh)
        return pinning.whole(original(x, begin, size, name=name), mesh)
    ends = [
        length if part == -1 else start + part
        for start, part, length in zip(starts, sizes, input.shape)
    ]
    if any(
        not 0 <= start <= end <= length
        for start, end, length in zip(starts, ends, input.shape)
    ):
        # The original says so; a strided slice would be shorter.
        return original(input, begin, size, name=name)
    return _tf_private.gen_array_ops.strided_slice(
        input,
        starts,
        np.array(ends, starts.dtype),
        np.ones_like(starts),
        name=name,
    )


def sparse_cross_entropy(
    original: Callable[..., Any],
    mesh: Mesh | None,
    features: Any,
    labels: Any,
    name: str | None = None,
) -> Any:
    """The loss of class numbers; NaN for a number that is no class.

    Where the classes are divided, DTensor compares each part with its labels.
    It does so in float32 and float16, and finds none in any other dtype: those
    come whole. And it takes a label outside all parts for a loss like any
    other, where TensorFlow raises on a CPU and gives NaN on a GPU.
    """
    if features.dtype not in (tf.float32, tf.float16):
        features = pinning.whole_samples(features, mesh)
    result = original(features, labels, name=name)
    is_class = (labels >= 0) & (labels < features.shape[-1])
    return result._replace(loss=tf.where(is_class, result.loss, float("nan")))


def einsum(
    original: Callable[..., Any],
    mesh: Mesh | None,
    inputs: Any,
    equation: str,
    name: str | None = None,
) -> Any:
    """`tf.einsum`; whole samples where it sums over several dimensions.

    See `einsum_axes.sums_several`. And DTensor does not know ellipses.
    """
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    ranks = [x.shape.rank for x in inputs]
    if None not in ranks:
        equation = einsum_axes.spelled_out(equation, ranks)
    if (
        len(ranks) == 2
        and "." not in equation
        and DIVIDED_ALIKE not in tf.get_current_name_scope()
        and einsum_axes.sums_several(equation)
    ):
        inputs = [
            (pinning.whole_samples if may_be else pinning.whole)(x, mesh)
            for x, may_be in zip(
                inputs, einsum_axes.first_may_be_divided(equation)
            )
        ]
    return original(inputs, equation, name=name)


def bias_add(
    original: Callable[..., Any],
    mesh: Mesh | None,
    value: Any,
    bias: Any,
    data_format: str = "NHWC",
    name: str | None = None,
) -> Any:
    """`tf.nn.bias_add`; a sum where channels are not last.

    DTensor takes the last dimension for that of the channels. The result is
    divided as `value` is: of a bias that another axis divides, each device
    gets the entries of its channels.
    """
    value, bias = tf.convert_to_tensor(value), tf.convert_to_tensor(bias)
    if data_format != "NCHW" or value.shape.rank in (None, 2):
        return original(value, bias, data_format=data_format, name=name)
    # Reshaped whole: a dimension of size 1 cannot be divided.
    bias = tf.reshape(
        pinning.whole(bias, mesh), [-1, *[1] * (value.shape.rank - 2)]
    )
    return tf.add(value, bias, name=name)
