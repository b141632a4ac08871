"""Operations on positions of the whole tensor, given whole tensors.

DTensor hands a device its part of what is scattered to, with positions that
count through all of it: an error where one is outside of the part, a wrong
number where it is not. Gradients of `tf.math.top_k`, `tf.sort` and
`tf.gather_nd` scatter so.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import pinning
from tf_layoutmap.layout.mesh.layouts import Mesh


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
        pinning.whole(tf.convert_to_tensor(x), mesh) for x in (indices, updates)
    )
    static = tf.get_static_value(tf.convert_to_tensor(shape))
    if static is not None and np.prod(static, dtype=np.float64) < 2**31:
        # DTensor writes shapes in int32, whatever the indices are in.
        indices = tf.cast(indices, tf.int32)
        shape = tf.constant(static, tf.int32)
    return pinning.whole(original(indices, updates, shape, **options), mesh)


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
        pinning.whole(tf.convert_to_tensor(condition), mesh), name=name
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
            params = pinning.keeping_rows(pinning.whole, params, mesh)
            indices = pinning.whole(indices, mesh)
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
                pinning.whole(indices, mesh), [num_batches, per_batch]
            )
            sums = tf.math.unsorted_segment_sum(
                tf.reshape(
                    pinning.whole(dy, mesh), [num_batches * per_batch, *row]
                ),
                tf.reshape(positions, [-1]),
                num_batches * length,
            )
            return pinning.whole(tf.reshape(sums, params.shape), mesh), None

        return call(params, indices), gradient

    return gathered(params, indices)
