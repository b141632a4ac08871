"""Corrections for ops that DTensor computes incorrectly without an error.

`correct` wraps an op of TensorFlow's Python API, so the correction applies to
every caller. The corrected op is called while a function is traced for a mesh
of this package, and eagerly if an input is on such a mesh. Otherwise the
original op is called. The original op is also called in
`dtensor.call_with_layout`, because `call_with_layout` gives every eager result
the same layout.

Most corrections replicate inputs. Without a correction, each device applies the
op to its shard as if the shard were the full tensor. One example is a
concatenation along a sharded dimension. Another example is an op with positions
as input. Each device gets the positions in the full tensor, but only a shard of
the tensor. A position outside of the shard raises an error, and all other
positions give wrong results. The gradients of `tf.math.top_k`, `tf.sort` and
`tf.gather_nd` contain such ops.

The module also contains functions that compute the static value of a tensor
during tracing (`static_value`, `is_shape`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh, is_registered
from tf_layoutmap.layout.ops import einsum_axes

# Ops with which TensorFlow computes shapes. The inputs of such a computation
# are on the host and never sharded. TensorFlow must be able to infer static
# shapes from its results.
_SHAPE_OPS = frozenset(
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


def static_array(x: Any) -> np.ndarray | None:
    """Returns the static value of `x` as an array, or None if it is unknown.

    Args:
      x: Value that can be converted to a tensor, for example a list of tensors.
    """
    return static_value(tf.convert_to_tensor(x))


def as_constant(x: Any) -> Any:
    """Returns `x` as a constant if it is an integer with a static value.

    DTensor requires constants for many sizes and positions. DTensor can
    evaluate fewer ops than TensorFlow, so this function computes the constant
    before DTensor compiles the function.
    """
    if (
        not tf.is_symbolic_tensor(x)
        or x.op.type in ("Const", "Placeholder")
        or not _is_small_integer(x)
    ):
        return x
    value = static_value(x)
    if value is None:
        return x
    with tf.control_dependencies(None):
        return tf.constant(value, x.dtype)


def is_variable(x: Any) -> bool:
    """Returns whether `x` is a variable of TensorFlow or Keras."""
    return isinstance(x, tf.Variable) or (
        hasattr(x, "__tf_tensor__") and not isinstance(x, tf.Tensor)
    )


def is_shape(x: Any, depth: int = 8) -> bool:
    """Returns whether `x` is a constant or computed only from shapes.

    Args:
      x: A tensor.
      depth: Maximum number of ops between the shapes and `x`.
    """
    if is_variable(x):
        return False
    if not tf.is_symbolic_tensor(x) or tf.get_static_value(x) is not None:
        return True
    # A constant is not pinned, because DTensor must find constants, such as a
    # permutation, without a relayout between the constant and the op.
    if _is_small_integer(x) and static_value(x) is not None:
        return True
    if depth == 0 or x.op.type not in _SHAPE_OPS:
        return False
    return x.op.type in ("Shape", "Rank", "Size") or all(
        is_shape(y, depth - 1) for y in x.op.inputs
    )


def _is_small_integer(x: Any) -> bool:
    """Returns whether `x` is an integer scalar or vector."""
    return x.dtype in (tf.int32, tf.int64) and x.shape.rank in (0, 1)


def vector_entries(x: Any) -> list[Any] | None:
    """Returns the elements of a vector as ints, or as tensors if unknown.

    Returns:
      A list; None if the length of the vector is unknown.
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


def static_value(x: Any) -> Any:
    """Returns the value of `x` during tracing, or None if it is unknown.

    If `tf.get_static_value` returns None, this function evaluates the ops that
    compute `x`.
    """
    if not tf.is_symbolic_tensor(x):
        return (
            x.numpy()
            if isinstance(x, tf.Tensor) and (not tracing.on_mesh(x))
            else x
            if not tf.is_tensor(x)
            else None
        )
    value = tf.get_static_value(x)
    return tf_private.evaluated_constant(x) if value is None else value


dtensor = tf.experimental.dtensor

# Name scope of einsums and gathers whose operands already have matching
# shardings. These shardings are not changed. The gradients of such einsums are
# created in the same scope.
SAME_SHARDING = "same_sharding"

# Name scope of concatenations along a dimension in which each part has size 1.
# DTensor computes these correctly for every layout.
STACK = "layoutmap_stack"


def concat(
    original: Callable[..., Any],
    mesh: Mesh | None,
    values: Any,
    axis: Any,
    name: str | None = None,
) -> Any:
    """Computes `tf.concat` with an unsharded dimension `axis`.

    If a consumer of the result shards the concatenated dimension, each device
    concatenates its own shards, and the order of the elements is wrong. In
    functions, consumers cannot change the layout of the result, and DTensor
    gathers the inputs along `axis` only. In other cases, samples are unsharded.
    """
    if (
        not isinstance(values, (list, tuple))
        or all(map(is_shape, values))
        or STACK in tf.get_current_name_scope()
    ):
        return original(values, axis, name=name)
    static = tf.get_static_value(axis)
    values = [tf.convert_to_tensor(x) if is_variable(x) else x for x in values]
    values = _nonempty_parts(values, static)
    if len(values) == 1:
        return tf.identity(values[0], name=name)
    if mesh is not None and all(
        tf.is_tensor(x) and tracing.can_keep_layout(x) for x in values
    ):
        return tracing.with_layout_of_producer(
            original(values, axis, name=name)
        )
    # The first dimension can keep its sharding unless it is concatenated.
    first = not static or any(
        static + len(getattr(x, "shape", ())) == 0 for x in values
    )
    pin = tracing.pin_replicated if first else tracing.pin_unsharded_samples
    pinned = [pin(x, mesh) for x in values]
    return pin(original(pinned, axis, name=name), mesh)


def _nonempty_parts(values: Sequence[Any], axis: int | None) -> Sequence[Any]:
    """Returns the parts that are not empty; all parts if all are empty.

    Empty parts are removed because the gradient of an empty part ends the
    process.
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
    """Computes `tf.slice` as a strided slice if begin and size are static.

    The gradient of `tf.slice` pads each shard as if it were the full tensor.
    If begin or size is computed, the input and the result are replicated.
    """
    if is_variable(input):
        input = tf.convert_to_tensor(input)
    if is_shape(input):
        return original(input, begin, size, name=name)
    starts, sizes = static_array(begin), static_array(size)
    if starts is None or sizes is None or not input.shape.is_fully_defined():
        x = tracing.pin_replicated(input, mesh)
        return tracing.pin_replicated(original(x, begin, size, name=name), mesh)
    ends = [
        length if part == -1 else start + part
        for start, part, length in zip(starts, sizes, input.shape)
    ]
    if any(
        not 0 <= start <= end <= length
        for start, end, length in zip(starts, ends, input.shape)
    ):
        # If the slice is out of range, the original op raises an error, but a
        # strided slice would return fewer elements.
        return original(input, begin, size, name=name)
    return tf_private.gen_array_ops.strided_slice(
        input,
        starts,
        np.array(ends, starts.dtype),
        np.ones_like(starts),
        name=name,
    )


def dense_bincount(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    size: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes `tf.math.bincount` with a static size if it is known.

    `CategoryEncoding` sets `minlength` and `maxlength` to the same number, and
    `RandAugment` limits the values to the range of `minlength`. TensorFlow also
    computes the largest value, which DTensor cannot infer.
    """
    del mesh
    limit = _upper_bound(size)
    if limit is None:
        limit = _size_of_limited(input, size)
    if limit is not None:
        size = tf.constant(limit, size.dtype)
    return original(input, size, *args, **kwargs)


def _upper_bound(size: Any) -> Any:
    """Returns the value of `min(limit, max(least, x))` if `least >= limit`."""
    if not tf.is_symbolic_tensor(size) or size.op.type != "Minimum":
        return None
    first, second = size.op.inputs
    for limit, other in ((first, second), (second, first)):
        value = static_value(limit)
        if value is None or other.op.type != "Maximum":
            continue
        bounds = [static_value(x) for x in other.op.inputs]
        if any(bound is not None and bound >= value for bound in bounds):
            return value
    return None


def _size_of_limited(values: Any, size: Any) -> Any:
    """Returns `least` of a size `max(least, x)` if all values are below it."""
    if not tf.is_symbolic_tensor(size) or size.op.type != "Maximum":
        return None
    bounds = [static_value(x) for x in size.op.inputs]
    least = next((bound for bound in bounds if bound is not None), None)
    largest = _largest_value(values)
    if least is None or largest is None or largest >= least:
        return None
    return least


# Operations whose results have the same values as their first input.
_SAME_VALUES = ("Reshape", "Identity", "ExpandDims", "Squeeze")


def _largest_value(x: Any) -> Any:
    """Returns an upper bound of `max(least, min(x, limit))`, or None."""
    while tf.is_symbolic_tensor(x) and x.op.type in _SAME_VALUES:
        x = x.op.inputs[0]
    if not tf.is_symbolic_tensor(x) or x.op.type not in ("Maximum", "Minimum"):
        return None
    values = [static_value(operand) for operand in x.op.inputs]
    known = [value for value in values if value is not None]
    inner = [
        bound
        for operand, value in zip(x.op.inputs, values)
        if value is None and (bound := _largest_value(operand)) is not None
    ]
    if x.op.type == "Minimum":
        return min([*known, *inner], default=None)
    return max(*known, *inner) if len(known) + len(inner) == 2 else None


def sparse_cross_entropy(
    original: Callable[..., Any],
    mesh: Mesh | None,
    features: Any,
    labels: Any,
    name: str | None = None,
) -> Any:
    """Computes the sparse cross entropy; out-of-range labels give NaN.

    If the classes are sharded, DTensor assigns labels to shards correctly only
    if the logits are float32 or float16. Therefore, logits of other dtypes are
    gathered. For an out-of-range label, DTensor returns a finite loss.
    TensorFlow without DTensor raises an error on a CPU and returns NaN on a
    GPU.
    """
    if features.dtype not in (tf.float32, tf.float16):
        features = tracing.pin_unsharded_samples(features, mesh)
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
    """Computes `tf.einsum`; if it sums several labels, with unsharded samples.

    See `einsum_axes.sums_several_labels`. Ellipses are replaced by labels,
    because DTensor does not support ellipses.
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
            (
                tracing.pin_unsharded_samples
                if may_be
                else tracing.pin_replicated
            )(x, mesh)
            for x, may_be in zip(
                inputs, einsum_axes.first_dim_may_be_sharded(equation)
            )
        ]
    return original(inputs, equation, name=name)


def select(
    original: Callable[..., Any],
    mesh: Mesh | None,
    condition: Any,
    t: Any,
    e: Any,
    name: str | None = None,
) -> Any:
    """Computes `tf.where`; a scalar condition gets the rank of the result.

    DTensor ends the process when it compiles the op with a scalar condition and
    tensors of a higher rank.
    """
    del mesh
    condition = tf.convert_to_tensor(condition)
    ranks = [len(getattr(x, "shape", ())) for x in (t, e) if _has_rank(x)]
    if condition.shape.rank == 0 and len(ranks) == 2:
        condition = tf.reshape(condition, [1] * max(ranks))
    return original(condition, t, e, name=name)


def _has_rank(x: Any) -> bool:
    return getattr(getattr(x, "shape", None), "rank", 0) is not None


def batch_mat_mul(
    original: Callable[..., Any],
    mesh: Mesh | None,
    x: Any,
    y: Any,
    Tout: Any,  # noqa: N803
    adj_x: bool = False,
    adj_y: bool = False,
    name: str | None = None,
    **options: Any,
) -> Any:
    """Computes a product of 8-bit matrices in 32 bits.

    Quantized layers use such products. DTensor has a rule only for the op of
    matrices with the dtype of the result. The results are equal, because
    products and sums of integers are exact. The op for GPUs does not support
    32-bit integers.
    """
    x, y = tf.convert_to_tensor(x), tf.convert_to_tensor(y)
    if (
        not (x.dtype.is_integer and y.dtype.is_integer)
        or tf.as_dtype(Tout) != tf.int32
        or mesh is None
        or mesh.device_type() != "CPU"
        or options.get("grad_x")
        or options.get("grad_y")
    ):
        return original(
            x, y, Tout, adj_x=adj_x, adj_y=adj_y, name=name, **options
        )
    return tf.matmul(
        tf.cast(x, tf.int32),
        tf.cast(y, tf.int32),
        transpose_a=adj_x,
        transpose_b=adj_y,
        name=name,
    )


def bias_add(
    original: Callable[..., Any],
    mesh: Mesh | None,
    value: Any,
    bias: Any,
    data_format: str = "NHWC",
    name: str | None = None,
) -> Any:
    """Computes `tf.nn.bias_add`; as an addition if channels are not last.

    DTensor always treats the last dimension as channels. The result has the
    layout of `value`; each device gets the bias of its channels.
    """
    value, bias = tf.convert_to_tensor(value), tf.convert_to_tensor(bias)
    if data_format != "NCHW" or value.shape.rank in (None, 2):
        return original(value, bias, data_format=data_format, name=name)
    # The bias is replicated, because the reshape adds dimensions of size 1,
    # which cannot be sharded.
    bias = tf.reshape(
        tracing.pin_replicated(bias, mesh), [-1, *[1] * (value.shape.rank - 2)]
    )
    return tf.add(value, bias, name=name)


def correct(
    original: Callable[..., Any],
    corrected: Callable[..., Any],
    in_replicated_functions: bool = False,
) -> Callable[..., Any]:
    """Returns a function that calls `corrected(mesh, ...)` on a mesh.

    Args:
      original: An op of TensorFlow's Python API.
      corrected: Function that is called with the `dtensor.Mesh` of the trace
        (None in eager mode) and the arguments of `original`.
      in_replicated_functions: Whether to call `corrected` also in functions
        that are fully replicated.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            # The mesh is None in eager mode, because an eager tensor on a mesh
            # records its mesh.
            mesh = None
            applies = any(map(_on_mesh, (*args, *kwargs.values()))) and (
                not tf_private.has_output_layout()
            )
        else:
            mesh = tracing.mesh_of_operation()
            applies = mesh is not None and (
                in_replicated_functions or not tracing.is_replicated()
            )
        if not applies:
            return original(*args, **kwargs)
        return corrected(mesh, *args, **kwargs)

    return wrapper


def _on_mesh(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_on_mesh, value))
    if isinstance(value, tf.Tensor):
        return tracing.on_registered_mesh(value)
    layout: Any = getattr(value, "layout", None)
    return isinstance(layout, dtensor.Layout) and is_registered(layout.mesh)


def correct_always(
    original: Callable[..., Any], corrected: Callable[..., Any]
) -> Callable[..., Any]:
    """Like `correct`, but also in functions that are fully replicated."""
    return correct(original, corrected, in_replicated_functions=True)
