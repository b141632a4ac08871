"""Converts inputs of `TPUEmbeddingV2` to inputs of the host engine.

In TensorFlow's class, the `output_shape` of a feature determines its samples.
Each id of a dense input is a sample, and each row of a sparse or ragged input
is a sample.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.configs import config


def with_samples(
    feature: config.FeatureSpec, value: Any, weight: Any
) -> tuple[Any, Any]:
    """Returns ids and weights in the shape that the host engine requires.

    Args:
      feature: Spec of the feature. If it has no `output_shape`, the last
        dimension of a dense input contains the ids of a sample, as in
        `TPUEmbedding`.
      value: Ids of the feature.
      weight: None, or weights in the same form as the ids.

    Raises:
      ValueError: If the number of ids of a dense input differs from the number
        of samples of the feature, or if weights do not match their ids.
    """
    if isinstance(value, tf.RaggedTensor):
        return value, weight
    shape = feature.output_shape
    if isinstance(value, tf.SparseTensor):
        if (
            shape is None
            or len(shape) == 1
            or value.shape.rank not in (2, None)
        ):
            return value, weight
        return _reshape_sparse(value, shape), (
            _reshape_sparse(weight, shape)
            if isinstance(weight, tf.SparseTensor)
            else weight
        )
    if not (
        tf.is_tensor(value)
        or isinstance(value, tf.Variable)
        or hasattr(value, "__array__")
    ):
        return value, weight
    ids = tf.convert_to_tensor(value)
    if shape is not None:
        ids = _one_per_sample(feature, ids, shape)
    if weight is None or isinstance(weight, tf.RaggedTensor | tf.SparseTensor):
        return ids, weight
    return _with_dense_weights(feature, ids, tf.convert_to_tensor(weight))


def _one_per_sample(
    feature: config.FeatureSpec, ids: tf.Tensor, shape: tuple[int | None, ...]
) -> tf.Tensor:
    """Returns dense ids of shape `[*shape, 1]`."""
    num_ids = ids.shape.num_elements()
    inner = math.prod(size for size in shape[1:] if size is not None)
    expected = inner if shape[0] is None else inner * shape[0]
    if num_ids is not None and (
        num_ids % inner if shape[0] is None else num_ids != expected
    ):
        raise ValueError(
            f"Dense input {feature.name!r} must have one id for each of the "
            f"samples of its `output_shape`, {list(shape)}; pass a "
            "tf.RaggedTensor or tf.SparseTensor for several ids per sample. "
            f"Received: shape {ids.shape}."
        )
    return tf.reshape(
        ids, [-1 if size is None else size for size in shape] + [1]
    )


def _reshape_sparse(
    value: tf.SparseTensor, shape: tuple[int | None, ...]
) -> tf.SparseTensor:
    """Splits the dimension of the samples into the dimensions of `shape`."""
    sizes = [-1 if size is None else size for size in shape]
    width = tf.cast(value.dense_shape[1], tf.int64)
    reshaped: Any = tf.sparse.reshape(
        value, tf.concat([tf.constant(sizes, tf.int64), [width]], axis=0)
    )
    return reshaped


def _with_dense_weights(
    feature: config.FeatureSpec, ids: tf.Tensor, weights: tf.Tensor
) -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
    """Returns dense ids and weights as ragged tensors."""
    sizes = [tensor.shape.num_elements() for tensor in (ids, weights)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(
            f"Weights of dense input {feature.name!r} must have one weight for "
            f"each id. Received: ids of shape {ids.shape}, weights of shape "
            f"{weights.shape}."
        )
    ids_per_sample: Any = 1
    if (ids.shape.rank or 0) > 1:
        ids_per_sample = ids.shape[-1]
        if ids_per_sample is None:
            ids_per_sample = tf.shape(ids)[-1]
    ragged: Any = tf.RaggedTensor.from_tensor(  # pyright: ignore[reportAttributeAccessIssue] Missing in the stubs.
        tf.reshape(ids, [-1, ids_per_sample])
    )
    return ragged, ragged.with_values(
        tf.reshape(tf.cast(weights, tf.float32), tf.shape(ragged.values))
    )
