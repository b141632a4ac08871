"""Metrics and losses of Keras on a mesh.

DTensor computes their sums. What it cannot compute, or computes wrongly for a
sample that is divided, is computed differently here, with the same result.
"""

from collections.abc import Callable
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import pinning, trace_context, transfer

dtensor = tf.experimental.dtensor


def update_state(
    original: Callable[..., Any], metrics: Any, *args: Any, **kwargs: Any
) -> Any:
    """Updates compiled metrics with whole samples.

    A rank among classes, the largest say, needs all classes of a sample.
    """
    mesh = trace_context.mesh_of_trace()
    if mesh is not None:
        batch_dim = trace_context.batch_dim_of_trace()
        args, kwargs = cast(
            Any,
            keras.tree.map_structure(
                lambda x: pinning.like_a_batch(x, mesh, batch_dim),
                (args, kwargs),
            ),
        )
    return original(metrics, *args, **kwargs)


def ctc_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Connectionist temporal classification, of the whole batch.

    It scatters into a tensor of the size of the batch, which DTensor cuts
    and goes on indexing as if it were whole.
    """
    mesh = trace_context.mesh_of_trace()
    if mesh is not None:
        args, kwargs = cast(
            Any,
            keras.tree.map_structure(
                lambda x: pinning.whole(x, mesh), (args, kwargs)
            ),
        )
    loss = original(*args, **kwargs)
    return loss if mesh is None else pinning.whole(loss, mesh)


def one_hot(
    original: Callable[..., Any],
    x: Any,
    num_classes: Any,
    axis: int = -1,
    **kwargs: Any,
) -> Any:
    """`keras.ops.one_hot`, with all classes of a sample on one device.

    Compared with predictions whose classes are divided, these would be divided,
    too, which DTensor fails to do.
    """
    mesh = trace_context.mesh_of_trace()
    out = original(x, num_classes, axis=axis, **kwargs)
    return (
        out
        if mesh is None or axis != -1
        else keras.tree.map_structure(
            lambda o: pinning.whole_samples(o, mesh), out
        )
    )


def scatter(
    original: Callable[..., Any],
    indices: Any,
    values: Any,
    shape: tuple[int, ...],
) -> Any:
    """`keras.ops.scatter`, as sums by the number of the cell.

    An index outside the shape is an error, as without a mesh.
    """
    mesh = trace_context.mesh_of_trace()
    indices = tf.convert_to_tensor(indices)
    values = tf.convert_to_tensor(values)
    if (
        mesh is None
        or not all(isinstance(size, int) for size in shape)
        or (
            indices.shape.rank != 2
            or indices.shape[-1] != len(shape)
            or values.shape.rank != 1
            or not values.dtype.is_numeric
        )
    ):
        return original(indices, values, shape)
    indices = pinning.whole(tf.cast(indices, tf.int64), mesh)
    values = pinning.whole(values, mesh)
    sizes = np.array(shape, np.int64)
    num_cells = int(sizes.prod())
    strides = np.append(sizes[1:], 1)[::-1].cumprod()[::-1]
    cells = tf.reduce_sum(indices * strides, axis=-1)
    is_inside = tf.reduce_all((indices >= 0) & (indices < sizes), axis=-1)
    if tf.executing_eagerly():
        # Eagerly, what is done with a failed result on a mesh ends the
        # process.
        if not np.all(transfer.to_host(is_inside)):
            raise ValueError(
                f"Argument `indices` must be inside the shape {shape}. "
                f"Received: {transfer.to_host(indices).tolist()}."
            )
    else:
        cells = tf.where(is_inside, cells, num_cells)
    return tf.reshape(
        tf.math.unsorted_segment_sum(values, cells, num_cells), shape
    )


# DTensor has no ReverseV2 and no MatrixDiagPartV3: metrics like AUC need
# the one, metrics like IoU the other.


def flip(original: Callable[..., Any], x: Any, axis: Any = None) -> Any:
    """`keras.ops.flip`: rows are gathered in reverse."""
    if not trace_context.traced_for_mesh():
        return original(x, axis=axis)
    x = tf.convert_to_tensor(x)
    axes = (
        range(x.shape.rank)
        if axis is None
        else ([axis] if isinstance(axis, int) else axis)
    )
    if any(x.shape[a] is None for a in axes):
        return original(x, axis=axis)
    for a in axes:
        x = tf.gather(x, tf.range(x.shape[a] - 1, -1, -1), axis=a)
    return x


def diag(original: Callable[..., Any], x: Any, k: int = 0) -> Any:
    """`keras.ops.diag` of a square: what is not on it is left out of sums."""
    if not trace_context.traced_for_mesh() or k != 0:
        return original(x, k=k)
    x = tf.convert_to_tensor(x)
    if x.shape.rank != 2 or x.shape[0] is None or x.shape[0] != x.shape[1]:
        return original(x, k=k)
    numbers = tf.range(x.shape[0])
    on_diagonal = numbers[:, tf.newaxis] == numbers[tf.newaxis, :]
    return tf.reduce_sum(tf.where(on_diagonal, x, tf.zeros_like(x)), axis=0)
