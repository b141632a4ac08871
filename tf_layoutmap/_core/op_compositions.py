"""Compositions of stock operations that equal C++ ops of this package.

The compositions are used where the C++ ops have no kernel: in XLA, on a mesh,
for dtypes other than float32, and in exported models.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def dot_interaction(
    features: Sequence[Any],
    *,
    self_interaction: bool,
    skip_gather: bool,
    api: Any = tf,
) -> Any:
    """Returns the dot products of all pairs of features.

    Args:
      features: Tensors of equal shapes, `[num_samples, dim]`.
      self_interaction: As for `tlm.ops.dot_interaction`.
      skip_gather: As for `tlm.ops.dot_interaction`.
      api: `tf`, or `keras.ops` for symbolic tensors of Keras 3.
    """
    rows = api.stack(list(features), axis=1)
    if api is tf:
        products = tf.matmul(rows, rows, transpose_b=True)
    else:
        products = api.matmul(rows, api.transpose(rows, [0, 2, 1]))
    return lower_triangle(
        products,
        len(features),
        self_interaction=self_interaction,
        skip_gather=skip_gather,
        api=api,
    )


def lower_triangle(
    products: Any,
    num_features: int,
    *,
    self_interaction: bool,
    skip_gather: bool,
    api: Any = tf,
) -> Any:
    """Returns the lower triangle of each matrix, row by row.

    Args:
      products: Matrices, `[num_samples, num_features, num_features]`.
      num_features: Size of the matrices.
      self_interaction: Whether the triangle contains the diagonal.
      skip_gather: Whether to return full matrices with zeros above the
        triangle.
      api: As in `dot_interaction`.
    """
    triangle = np.tri(num_features, k=0 if self_interaction else -1, dtype=bool)
    flat = api.reshape(products, [-1, num_features * num_features])
    if skip_gather:
        zero = np.zeros([], tf.as_dtype(products.dtype).as_numpy_dtype)
        return api.where(triangle.reshape(1, -1), flat, zero)
    indices = np.flatnonzero(triangle).astype(np.int32)
    select = tf.gather if api is tf else api.take
    return select(flat, indices, axis=1)


def dot_interaction_grad(
    features: Sequence[Any],
    gradients: Any,
    *,
    self_interaction: bool,
    skip_gather: bool,
) -> list[Any]:
    """Returns the gradients of the features of `dot_interaction`."""
    size = len(features)
    triangle = np.tri(size, k=0 if self_interaction else -1, dtype=bool)
    if skip_gather:
        square = tf.where(
            triangle,
            tf.reshape(gradients, [-1, size, size]),
            tf.zeros([], gradients.dtype),
        )
    else:
        # The last column of zeros is the value above the triangle.
        padded = tf.pad(gradients, [[0, 0], [0, 1]])
        indices = np.full([size * size], triangle.sum(), np.int32)
        indices[triangle.reshape(-1)] = np.arange(triangle.sum())
        square = tf.reshape(
            tf.gather(padded, indices, axis=1), [-1, size, size]
        )
    symmetric = square + tf.transpose(square, [0, 2, 1])
    found = tf.matmul(symmetric, tf.stack(list(features), axis=1))
    return tf.unstack(found, num=size, axis=1)
