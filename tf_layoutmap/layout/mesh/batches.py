"""Batches and tensors from the host to a mesh, and results back."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import pinning, transfer
from tf_layoutmap.layout.mesh.layouts import Layout, Mesh

dtensor = tf.experimental.dtensor


def layout_of_batch(shape: Any, mesh: Mesh, batch_dim: str | None) -> Layout:
    """Returns the layout of a tensor of a batch on `mesh`.

    Cut along `batch_dim`; replicated if its first dimension does not divide,
    or without a `batch_dim`.
    """
    rank = len(shape)
    if (
        batch_dim is not None
        and rank > 0
        and (shape[0] % mesh.dim_size(batch_dim) == 0)
    ):
        return dtensor.Layout.batch_sharded(mesh, batch_dim, rank)
    return dtensor.Layout.replicated(mesh, rank)


def to_batch(x: Any, mesh: Mesh, batch_dim: str | None) -> Any:
    """Returns one tensor of a batch on `mesh`, cut along `batch_dim`.

    Replicated if its first dimension does not divide, or without a
    `batch_dim`, as are strings. What is on a mesh already, and None, stays.

    Raises:
      TypeError: It is a sparse or ragged tensor.
    """
    if x is None or pinning.on_mesh(x):
        return x
    if isinstance(x, tf.SparseTensor | tf.RaggedTensor):
        raise TypeError(
            "A batch for a model on a mesh is made of dense tensors. "
            f"Received: {type(x).__name__} of shape {x.shape}. Use "
            "`.to_tensor()` or tf.sparse.to_dense."
        )
    if not tf.is_tensor(x):
        x = np.asarray(x)
    if tf.as_dtype(x.dtype) == tf.string and dtensor.num_clients() == 1:
        # Devices could not exchange parts of it.
        batch_dim = None
    return transfer.to_mesh(x, layout_of_batch(x.shape, mesh, batch_dim))


def to_host_tensor(x: Any) -> Any:
    """Returns `x`, from a mesh to the host if it is on one."""
    if not pinning.on_mesh(x):
        return x
    if dtensor.fetch_layout(x).is_fully_replicated():
        return dtensor.unpack(x)[0]
    with tf.device("CPU:0"):
        return tf.constant(transfer.to_host(x))


def is_host_value(x: Any) -> bool:
    """Whether `x` is an array or a tensor that is not on a mesh."""
    return isinstance(x, np.ndarray) or (
        isinstance(x, tf.Tensor) and not pinning.on_mesh(x)
    )


def replicated(x: Any, mesh: Mesh) -> Any:
    """Returns a host value as a tensor on `mesh`, whole everywhere."""
    if not is_host_value(x):
        return x
    # copy_to_mesh and not pack: gradients flow through it. From the host to
    # a replicated layout is the case it copies whole.
    with tf.device("CPU:0"):
        tensor = tf.convert_to_tensor(x)
    moved = dtensor.copy_to_mesh(
        tensor, dtensor.Layout.replicated(mesh, tensor.shape.rank)
    )
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        moved._keras_mask = replicated(mask, mesh)
    return moved


def readable(x: Any) -> Any:
    """Returns a tensor on a mesh so that `numpy()` can read it."""
    if not pinning.on_mesh(x):
        return x
    layout = dtensor.fetch_layout(x)
    if layout.is_fully_replicated():
        return x
    return dtensor.relayout(
        x, dtensor.Layout.replicated(layout.mesh, layout.rank)
    )
