"""Replacements for `keras.ops` functions that DTensor cannot partition."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.layout.keras3.context import context_of, is_planning
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh, axes_of_layout
from tf_layoutmap.layout.ops import (
    corrections,
    einsum_axes,
    host_loops,
    simplifications,
    stacks,
)
from tf_layoutmap.layout.replication import traces

dtensor = tf.experimental.dtensor


def cudnn_ok(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Returns whether a recurrent layer may call cuDNN: not on a mesh."""
    return tracing.mesh_of_operation() is None and original(*args, **kwargs)


def einsum(
    original: Callable[..., Any],
    subscripts: str,
    *operands: Any,
    **options: Any,
) -> Any:
    """Computes `keras.ops.einsum`; layers on a mesh use `tf.einsum`.

    Keras computes most equations as matrix products of reshaped operands.
    DTensor shards the gradients of these matrices differently from the weights,
    and cannot convert the layout of the gradients to the layout of the weights.
    If a weight and the other operand have several labels in common, the other
    operand is sharded like the weight.
    """
    layer = keras_private.calling_layer()
    context = None if layer is None else context_of(layer)
    if context is None or is_planning.get():
        return original(subscripts, *operands, **options)
    # If any option is set, Keras calls `tf.einsum` instead of matrix products.
    # The value "greedy" is the default of `tf.einsum`.
    options = {"optimize": "greedy", **options}
    subscripts = einsum_axes.without_ellipsis(
        subscripts, [len(x.shape) for x in operands]
    )
    divided = None
    # If the weights of a function are gathered, none of its tensors are
    # sharded, so no axes need to be pinned.
    if (
        tracing.traced_for_mesh()
        and len(operands) == 2
        and not traces.is_fully_replicated()
    ):
        divided = _axes_of_product(subscripts, operands, context)
    if divided is None:
        return original(subscripts, *operands, **options)
    *of_operands, of_result = divided
    pinned = [
        x
        if isinstance(x, MeshVariable) and axes == _axes_in_layers(x, context)
        else tracing.pin_sharded(tf.convert_to_tensor(x), context.mesh, axes)
        for x, axes in zip(operands, of_operands)
    ]
    with tf.name_scope(corrections.SAME_SHARDING):
        result = original(subscripts, *pinned, **options)
    return tracing.pin_sharded(result, context.mesh, of_result)


def _axes_of_product(
    subscripts: str, operands: tuple[Any, ...], context: Any
) -> tuple[Any, ...] | None:
    """Returns the mesh axes that shard the operands and the result.

    Returns None if no operand is a weight, or if DTensor partitions the product
    correctly without pinned axes.
    """
    number = int(isinstance(operands[1], MeshVariable))
    weight, other = operands[number], operands[1 - number]
    if not isinstance(weight, MeshVariable):
        return None
    label = einsum_axes.label_of_samples(subscripts, number)
    term = subscripts.partition("->")[0].split(",")[1 - number]
    size = (
        other.shape[term.index(label)]
        if label is not None and "." not in term
        else None
    )
    is_batch_sharded = (
        context.batch_dim is not None
        and size is not None
        and (size % context.mesh.dim_size(context.batch_dim) == 0)
    )
    return einsum_axes.axes_of_product(
        subscripts,
        number,
        _axes_in_layers(weight, context),
        context.batch_dim if is_batch_sharded else None,
    )


def _axes_in_layers(
    weight: MeshVariable, context: Any
) -> tuple[str | None, ...]:
    """Returns the axes that shard a weight when a layer reads it.

    `MeshVariable.value` gathers a weight along the batch axis.
    """
    return tuple(
        None if axis == context.batch_dim else axis
        for axis in axes_of_layout(weight.layout)
    )


def add(original: Callable[..., Any], x1: Any, x2: Any) -> Any:
    """Computes `keras.ops.add`; on a mesh, without the BiasAdd op.

    If only one dimension of the second operand is larger than 1, Keras adds the
    operand with the BiasAdd op. DTensor can partition BiasAdd only if this
    dimension is the last one.

    A bias of an `EinsumDense` layer is sharded like the product. If they were
    sharded along different dimensions, DTensor would gather the product.
    """
    x2 = _bias_like_product(x2)
    shape = getattr(x2, "shape", ())
    if (
        tracing.traced_for_mesh()
        and len(shape) > 1
        and (len(shape) - list(shape).count(1) == 1)
    ):
        x1, x2 = x2, x1
    return original(x1, x2)


def _bias_like_product(bias: Any) -> Any:
    """Returns a bias of `EinsumDense`, sharded like the product with a weight.

    The bias is gathered and sharded again, so it is unchanged if the layout map
    is strict. Other values are returned unchanged.
    """
    layer = keras_private.calling_layer()
    if (
        not isinstance(bias, MeshVariable)
        or not isinstance(layer, keras.layers.EinsumDense)
        or bias is not layer.bias
        or not isinstance(layer._kernel, MeshVariable)
        or not tracing.traced_for_mesh()
        or traces.is_fully_replicated()
    ):
        return bias
    context = bias._mesh_context
    terms, _, result = layer.equation.replace(" ", "").partition("->")
    axis_of = dict(
        zip(terms.split(",")[1], _axes_in_layers(layer._kernel, context))
    )
    axes = [
        axis_of.get(label) if size > 1 else None
        for label, size in zip(result[-len(bias.shape) :], bias.shape)
    ]
    before = _axes_in_layers(bias, context)
    is_conflict = not context.layout_map.strict and any(
        axis is not None and axis in before and before.index(axis) != dim
        for dim, axis in enumerate(axes)
    )
    if not is_conflict:
        return bias
    return tracing.pin_sharded(tf.convert_to_tensor(bias), context.mesh, axes)


def repeat(
    original: Callable[..., Any], x: Any, repeats: Any, axis: int | None = None
) -> Any:
    """Computes `keras.ops.repeat`; on a mesh, with unchanged layouts.

    DTensor cannot repeat elements along a sharded dimension, such as the heads
    of GroupQueryAttention. If the number of repetitions is static, a new
    dimension is repeated instead, and then merged with `axis`. In other cases,
    samples are unsharded.
    """
    mesh = tracing.mesh_of_trace()
    if mesh is None:
        return original(x, repeats, axis)
    x = tf.convert_to_tensor(x)
    count = corrections.static_value(repeats)
    if (
        axis is not None
        and count is not None
        and np.ndim(count) == 0
        and count > 0
        and tracing.can_keep_layout(x)
        and not traces.is_fully_replicated()
    ):
        return _repeat_elements(x, int(count), axis % x.shape.rank)
    result = original(_by_samples(x, mesh, axis), repeats, axis)
    return _by_samples(result, mesh, axis)


def _repeat_elements(x: Any, count: int, axis: int) -> Any:
    before, (size, *after) = x.shape[:axis], x.shape[axis:]
    x = tf.broadcast_to(
        tf.expand_dims(x, axis + 1), [*before, size, count, *after]
    )
    return tracing.with_layout_of_producer(
        tf.reshape(x, [*before, size * count, *after])
    )


def _by_samples(x: Any, mesh: Mesh, axis: int | None) -> Any:
    """Returns `x` with unsharded samples and an unsharded dimension `axis`."""
    batch_dim = tracing.batch_dim_of_trace()
    is_cut = (
        batch_dim is not None
        and axis not in (None, 0, -x.shape.rank)
        and (x.shape[0] or 1) % mesh.dim_size(batch_dim) == 0
    )
    return tracing.pin_sharded(
        x,
        mesh,
        [
            batch_dim if is_cut and dim == 0 else None
            for dim in range(x.shape.rank)
        ],
    )


def eye(
    original: Callable[..., Any],
    N: Any,  # noqa: N803
    M: Any = None,  # noqa: N803
    k: Any = 0,
    dtype: str | None = None,
) -> Any:
    """Computes `keras.ops.eye`; on a mesh, by comparing row and column indices.

    DTensor does not support MatrixDiagV3, which Keras uses here and in
    `keras.ops.image.extract_patches`.
    """
    mesh = tracing.mesh_of_trace()
    if mesh is None:
        return original(N, M, k, dtype)
    rows = tf.range(N)[:, tf.newaxis]
    columns = tf.range(N if M is None else M)[tf.newaxis, :]
    return tracing.pin_replicated(
        tf.cast(columns - rows == k, dtype or keras.config.floatx()), mesh
    )


def stack(original: Callable[..., Any], x: Any, axis: int = 0) -> Any:
    """Computes `keras.ops.stack`; in `generate`, with unchanged layouts.

    DTensor's rule for stacking keeps only the sharding of the first dimension,
    so that every device would gather the cache of a language model.
    """
    if not host_loops.is_splitting() or not isinstance(x, list | tuple):
        return original(x, axis=axis)
    parts = [tf.convert_to_tensor(tensor) for tensor in x]
    if len({part.dtype for part in parts}) != 1:
        return original(x, axis=axis)
    return stacks.stack(parts, axis)


def _element(x: Any, axis: int, number: int) -> Any:
    """Returns `x` at index `number` of a dimension, which keeps size 1."""
    dims = [slice(None)] * x.shape.rank
    dims[axis] = slice(number, number + 1)
    return x[tuple(dims)]


# `take_along_axis` uses one selection per element of the dimension.
_MAX_SELECTIONS = 16


def take_along_axis(
    original: Callable[..., Any], x: Any, indices: Any, axis: int | None = None
) -> Any:
    """Computes `keras.ops.take_along_axis`; in `generate`, by selections.

    Beam search reorders the cache with this operation. DTensor cannot shard the
    operation that Keras uses. It is replaced if the dimension `axis` has few
    elements. The layouts of all other dimensions do not change.
    """
    if not host_loops.is_splitting() or axis is None:
        return original(x, indices, axis)
    x, indices = tf.convert_to_tensor(x), tf.convert_to_tensor(indices)
    rank = x.shape.rank
    if (
        rank is None
        or indices.shape.rank != rank
        or not -rank <= axis < rank
        or x.shape[axis] not in range(2, _MAX_SELECTIONS + 1)
        or not indices.shape.is_fully_defined()
    ):
        return original(x, indices, axis)
    size = x.shape[axis]
    indices = tf.where(indices < 0, indices + size, indices)
    result = _element(x, axis, 0)
    for number in range(1, size):
        result = tf.where(
            tf.equal(indices, number), _element(x, axis, number), result
        )
    return result


def softmax(original: Callable[..., Any], x: Any, axis: Any = -1) -> Any:
    """Computes `keras.ops.softmax`; in `generate`, gathers logits of tokens.

    Samplers need the probabilities of all tokens on one device. If the logits
    are gathered first, the sums equal the sums of one device, and DTensor does
    not reduce a maximum and a sum over the devices.
    """
    mesh = tracing.mesh_of_trace()
    if mesh is not None and host_loops.is_splitting():
        x = tf.convert_to_tensor(x)
        if x.shape.rank == 2:
            x = tracing.pin_unsharded_samples(x, mesh)
    return original(x, axis=axis)


def argmax(
    original: Callable[..., Any],
    x: Any,
    axis: int | None = None,
    keepdims: bool = False,
) -> Any:
    """Computes `keras.ops.argmax`; in `generate`, does not gather the logits.

    The position of the highest probability is the position of the highest
    logit. DTensor then computes the probabilities only if another op uses them.
    """
    logits = getattr(x, "_keras_logits", None)
    mesh = tracing.mesh_of_trace()
    if (
        logits is None
        or axis is None
        or keepdims
        or not tf.is_symbolic_tensor(logits)
        or not host_loops.is_splitting()
        or mesh is None
        or traces.is_fully_replicated()
        or logits.shape.rank != 2
        or axis not in (-1, 1)
        or logits.dtype != tf.float32
        or not logits.shape.is_fully_defined()
    ):
        return original(x, axis=axis, keepdims=keepdims)
    return simplifications.position_of_largest(logits, mesh.size)


def slice_update(
    original: Callable[..., Any],
    inputs: Any,
    start_indices: Any,
    updates: Any,
) -> Any:
    """Computes `keras.ops.slice_update`; on a mesh, selects with a mask.

    DTensor has no rule for TensorFlow's operation, so that every device would
    gather the full tensor, for example the cache of a language model. The mask
    keeps all layouts. It is used if the update has the full size, or size 1, in
    each dimension.
    """
    if not tracing.traced_for_mesh() or tf.executing_eagerly():
        return original(inputs, start_indices, updates)
    inputs, updates = (
        tf.convert_to_tensor(inputs),
        tf.convert_to_tensor(updates),
    )
    starts = corrections.vector_entries(start_indices)
    shape = inputs.shape
    if (
        starts is None
        or inputs.dtype != updates.dtype
        or not (shape.is_fully_defined() and updates.shape.is_fully_defined())
        or shape.rank != updates.shape.rank
        or any(
            part not in (1, size) for part, size in zip(updates.shape, shape)
        )
    ):
        return original(inputs, start_indices, updates)
    mask = None
    for axis, (start, part, size) in enumerate(
        zip(starts, updates.shape, shape)
    ):
        # If the update has the full size, the operation sets the start to 0.
        if part == size:
            continue
        start = tf.clip_by_value(tf.cast(start, tf.int32), 0, size - 1)
        is_start = tf.reshape(
            tf.equal(tf.range(size), start),
            [size if i == axis else 1 for i in range(shape.rank)],
        )
        mask = is_start if mask is None else tf.logical_and(mask, is_start)
    return (
        tf.identity(updates)
        if mask is None
        else tf.where(mask, updates, inputs)
    )
