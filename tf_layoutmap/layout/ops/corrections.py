"""Operations that DTensor silently gets wrong, for every caller.

A dimension that is put together, read backwards, or counted through by class
must be whole: DTensor lets each device do it to its own part. So it is made
whole where all of TensorFlow's Python makes such an operation.
"""

# DOC-MERGE: How an operation that DTensor gets wrong is corrected, for every caller.
#
# Where a function is traced for a mesh of this package, and eagerly where a
# tensor is on one, the corrected operation is called; everywhere else the
# original, as it came. So it is in `dtensor.call_with_layout`, which gives every
# eager result one layout.
#
# DOC-MERGE: Operations on positions of the whole tensor, given whole tensors.
#
# DTensor hands a device its part of what is scattered to, with positions that
# count through all of it: an error where one is outside of the part, a wrong
# number where it is not. Gradients of `tf.math.top_k`, `tf.sort` and
# `tf.gather_nd` scatter so.
#
# DOC-MERGE: What is known of a value while a function is traced.
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import pinning, tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh, is_registered
from tf_layoutmap.layout.ops import einsum_axes

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
    return tf_private.evaluated_constant(x) if value is None else value


dtensor = tf.experimental.dtensor

# A name scope of einsums whose operands are divided alike, which stay so. Their
# gradients are made in it, too.
SAME_SHARDING = "divided_alike"


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
    pin = pinning.replicated if first else pinning.unsharded_samples
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
        x = pinning.replicated(input, mesh)
        return pinning.replicated(original(x, begin, size, name=name), mesh)
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
    return tf_private.gen_array_ops.strided_slice(
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
        features = pinning.unsharded_samples(features, mesh)
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

    See `einsum_axes.sums_several_labels`. And DTensor does not know ellipses.
    """
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    ranks = [x.shape.rank for x in inputs]
    if None not in ranks:
        equation = einsum_axes.without_ellipsis(equation, ranks)
    if (
        len(ranks) == 2
        and "." not in equation
        and SAME_SHARDING not in tf.get_current_name_scope()
        and einsum_axes.sums_several_labels(equation)
    ):
        inputs = [
            (pinning.unsharded_samples if may_be else pinning.replicated)(x, mesh)
            for x, may_be in zip(
                inputs, einsum_axes.first_dim_may_be_sharded(equation)
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
        pinning.replicated(bias, mesh), [-1, *[1] * (value.shape.rank - 2)]
    )
    return tf.add(value, bias, name=name)


def correct(
    original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `original`, and on a mesh `ours(mesh, ...)`.

    Args:
      original: An operation of TensorFlow's Python.
      ours: Takes the `dtensor.Mesh` that is traced for (None eagerly), and the
        arguments of `original`.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            # Tensors on a mesh know theirs.
            mesh = None
            applies = any(map(_on_mesh, (*args, *kwargs.values()))) and (
                not tf_private.has_output_layout()
            )
        else:
            mesh = tracing.mesh_of_operation()
            applies = mesh is not None and not tracing.is_replicated()
        if not applies:
            return original(*args, **kwargs)
        return ours(mesh, *args, **kwargs)

    return wrapper


def _on_mesh(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_on_mesh, value))
    if isinstance(value, tf.Tensor):
        return pinning.on_registered_mesh(value)
    layout: Any = getattr(value, "layout", None)
    return isinstance(layout, dtensor.Layout) and is_registered(layout.mesh)


def scatter_nd(
    original: Callable[..., Any],
    mesh: Mesh | None,
    indices: Any,
    updates: Any,
    shape: Any,
    **options: Any,
) -> Any:
    """`tf.scatter_nd`, on each device of all of it."""
    indices, updates = (
        pinning.replicated(tf.convert_to_tensor(x), mesh) for x in (indices, updates)
    )
    static = tf.get_static_value(tf.convert_to_tensor(shape))
    if static is not None and np.prod(static, dtype=np.float64) < 2**31:
        # DTensor writes shapes in int32, whatever the indices are in.
        indices = tf.cast(indices, tf.int32)
        shape = tf.constant(static, tf.int32)
    return pinning.replicated(original(indices, updates, shape, **options), mesh)


def reverse(
    original: Callable[..., Any],
    mesh: Mesh | None,
    tensor: Any,
    axis: Any,
    name: str | None = None,
) -> Any:
    """`tf.reverse`, which DTensor lacks, as a slice that goes backwards."""
    tensor = tf.convert_to_tensor(tensor)
    axes = tf.get_static_value(tf.convert_to_tensor(axis))
    if axes is None or tensor.shape.rank is None:
        return original(tensor, axis, name=name)
    slices = [slice(None)] * tensor.shape.rank
    for one in axes:
        slices[one] = slice(None, None, -1)
    return tensor[tuple(slices)] if slices else tensor


def where(
    original: Callable[..., Any],
    mesh: Mesh | None,
    condition: Any,
    name: str | None = None,
) -> Any:
    """`tf.where` of a condition alone, as `tf.boolean_mask` asks it.

    Each device would count through its part, and find another number.
    """
    return original(
        pinning.replicated(tf.convert_to_tensor(condition), mesh), name=name
    )


def gather(
    original: Callable[..., Any],
    mesh: Mesh | None,
    params: Any,
    indices: Any,
    axis: Any,
    batch_dims: int = 0,
    name: str | None = None,
) -> Any:
    """`tf.gather`; with `batch_dims`, its gradient has a shape of numbers.

    TensorFlow's computes the shape, and DTensor then knows no part of it.
    """
    call = functools.partial(
        original, axis=axis, batch_dims=batch_dims, name=name
    )
    params, indices = map(tf.convert_to_tensor, (params, indices))
    if not batch_dims:
        if not indices.shape.is_fully_defined():
            # Found by `tf.where`: nobody knows how to divide the result.
            params = pinning.keeping_rows(pinning.replicated, params, mesh)
            indices = pinning.replicated(indices, mesh)
        return call(params, indices)
    if (
        tf.get_static_value(tf.convert_to_tensor(axis)) != batch_dims
        or batch_dims < 0
        or not params.shape.is_fully_defined()
        or not indices.shape.is_fully_defined()
    ):
        return call(params, indices)
    num_batches = math.prod(params.shape[:batch_dims])
    length, row = params.shape[batch_dims], params.shape[batch_dims + 1 :]
    per_batch = math.prod(indices.shape[batch_dims:])

    @tf.custom_gradient
    def gathered(params: Any, indices: Any) -> Any:
        def gradient(dy: Any) -> Any:
            starts = tf.range(num_batches, dtype=indices.dtype) * length
            positions = starts[:, tf.newaxis] + tf.reshape(
                pinning.replicated(indices, mesh), [num_batches, per_batch]
            )
            sums = tf.math.unsorted_segment_sum(
                tf.reshape(
                    pinning.replicated(dy, mesh), [num_batches * per_batch, *row]
                ),
                tf.reshape(positions, [-1]),
                num_batches * length,
            )
            return pinning.replicated(tf.reshape(sums, params.shape), mesh), None

        return call(params, indices), gradient

    return gathered(params, indices)
