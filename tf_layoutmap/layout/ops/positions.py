"""Corrections for ops that read or write at positions of a tensor.

On a mesh, each device gets the positions in the full tensor, but only a shard
of the tensor. The corrections replicate inputs, or use other ops; see
`corrections`, whose function `correct` calls them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.shard_map import SCOPE
from tf_layoutmap.layout.ops.corrections import SAME_SHARDING


def scatter_nd(
    original: Callable[..., Any],
    mesh: Mesh | None,
    indices: Any,
    updates: Any,
    shape: Any,
    **options: Any,
) -> Any:
    """Computes `tf.scatter_nd` with replicated inputs and result."""
    indices, updates = (
        tracing.pin_replicated(tf.convert_to_tensor(x), mesh)
        for x in (indices, updates)
    )
    static = tf.get_static_value(tf.convert_to_tensor(shape))
    if static is not None and np.prod(static, dtype=np.float64) < 2**31:
        # DTensor emits shapes in int32, even if the indices have another dtype.
        indices = tf.cast(indices, tf.int32)
        shape = tf.constant(static, tf.int32)
    return tracing.pin_replicated(
        original(indices, updates, shape, **options), mesh
    )


def scatter_nd_non_aliasing_add(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    indices: Any,
    updates: Any,
    name: str | None = None,
) -> Any:
    """Adds slices to `input`; outside of `shard_map`, on replicated inputs."""
    inputs = _replicated_outside_shard_map(mesh, input, indices, updates)
    return original(*inputs, name=name)


def placeholder_with_default(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    shape: Any,
    name: str | None = None,
) -> Any:
    """Returns `input`; outside of `shard_map`, the replicated input."""
    (x,) = _replicated_outside_shard_map(mesh, input)
    return original(x, shape, name=name)


def unsorted_segment_prod(
    original: Callable[..., Any],
    mesh: Mesh | None,
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    name: str | None = None,
) -> Any:
    """Multiplies segments; outside of `shard_map`, of replicated inputs."""
    inputs = _replicated_outside_shard_map(mesh, data, segment_ids)
    return original(*inputs, num_segments, name=name)


def resource_scatter_nd_update(
    original: Callable[..., Any], mesh: Mesh | None, *args: Any, **kwargs: Any
) -> Any:
    """Raises an error, except on the shards of each device.

    DTensor runs the op on the shards of a variable, but with indices into the
    full variable.
    """
    del mesh
    if SCOPE in tf.get_current_name_scope():
        return original(*args, **kwargs)
    raise NotImplementedError(
        "DTensor does not support `scatter_nd_update` of a variable on a mesh. "
        "Assign the result of `tf.tensor_scatter_nd_update` to the variable."
    )


def _replicated_outside_shard_map(
    mesh: Mesh | None, *inputs: Any
) -> Sequence[Any]:
    """Returns the inputs of an op with which `shard_map` reads local shards.

    DTensor does not gather the inputs of such an op. Outside of `shard_map`,
    this function replicates them.
    """
    if SCOPE in tf.get_current_name_scope():
        return inputs
    return [
        tracing.pin_replicated(tf.convert_to_tensor(x), mesh) for x in inputs
    ]


def reverse(
    original: Callable[..., Any],
    mesh: Mesh | None,
    tensor: Any,
    axis: Any,
    name: str | None = None,
) -> Any:
    """Computes `tf.reverse` with negative strides, which DTensor supports."""
    tensor = tf.convert_to_tensor(tensor)
    axes = tf.get_static_value(tf.convert_to_tensor(axis))
    if axes is None or tensor.shape.rank is None:
        return original(tensor, axis, name=name)
    slices = [slice(None)] * tensor.shape.rank
    for dim in axes:
        slices[dim] = slice(None, None, -1)
    return tensor[tuple(slices)] if slices else tensor


def where(
    original: Callable[..., Any],
    mesh: Mesh | None,
    condition: Any,
    name: str | None = None,
) -> Any:
    """Computes `tf.where(condition)`, which `tf.boolean_mask` uses.

    The condition is replicated. Otherwise each device would return the
    positions in its own shard, and the devices would return different numbers
    of positions.
    """
    return original(
        tracing.pin_replicated(tf.convert_to_tensor(condition), mesh), name=name
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
    """Computes `tf.gather`; its gradient with `batch_dims` has a static shape.

    TensorFlow's gradient computes this shape with ops that DTensor cannot
    evaluate.
    """
    call = functools.partial(
        original, axis=axis, batch_dims=batch_dims, name=name
    )
    params, indices = map(tf.convert_to_tensor, (params, indices))
    if not batch_dims:
        if not indices.shape.is_fully_defined() and (
            SAME_SHARDING not in tf.get_current_name_scope()
        ):
            # Indices whose number is unknown, for example from `tf.where`,
            # cannot be sharded.
            params = tracing.pin_keeping_rows(
                tracing.pin_replicated, params, mesh
            )
            indices = tracing.pin_replicated(indices, mesh)
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
                tracing.pin_replicated(indices, mesh), [num_batches, per_batch]
            )
            sums = tf.math.unsorted_segment_sum(
                tf.reshape(
                    tracing.pin_replicated(dy, mesh),
                    [num_batches * per_batch, *row],
                ),
                tf.reshape(positions, [-1]),
                num_batches * length,
            )
            return tracing.pin_replicated(
                tf.reshape(sums, params.shape), mesh
            ), None

        return call(params, indices), gradient

    return gathered(params, indices)
