"""Shapes of the activations of a layer, without a lookup."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import packing
from tf_layoutmap.embedding.configs import config

Shape = tuple[int | None, ...]


def shapes(
    spec: config.EmbeddingSpec, feature_config: Any, inputs: Any
) -> list[Shape]:
    """Returns the shape of each feature's activations.

    The function enqueues no step and computes no values.

    Args:
      spec: Tables and features.
      feature_config: Nested structure of features.
      inputs: The same structure of values with an attribute `shape`, which is
        `[num_samples]` or `[..., ids per sample]`. A packed batch is also
        supported.

    Raises:
      TypeError, ValueError: If the structures differ.
    """
    if has_packed_ids(feature_config, inputs):
        # All features have the same samples.
        return [
            _activation_shape(spec, feature, (inputs.shape[0], None))
            for feature in spec.features
        ]
    embedding_inputs.check_same_structure(
        inputs, "inputs", feature_config, "feature_config"
    )
    return [
        _activation_shape(spec, feature, tuple(value.shape))
        for feature, value in zip(spec.features, tf.nest.flatten(inputs))
    ]


def zeros(spec: config.EmbeddingSpec, feature_config: Any, inputs: Any) -> Any:
    """Returns zeros in the shape of the activations; enqueues no step.

    Args:
      spec: Tables and features.
      feature_config: Nested structure of features.
      inputs: The same structure of dense, sparse or ragged ids, or a packed
        batch.

    Returns:
      Structure of `feature_config` with float32 tensors.
    """
    all_shapes = shapes(spec, feature_config, inputs)
    values = tf.nest.flatten(inputs)
    if has_packed_ids(feature_config, inputs):
        values *= len(all_shapes)
    return tf.nest.pack_sequence_as(
        feature_config,
        [
            tf.zeros(
                [
                    _size(value, axis) if size is None else size
                    for axis, size in enumerate(shape)
                ]
            )
            for shape, value in zip(all_shapes, values)
        ],
    )


def has_packed_ids(feature_config: Any, inputs: Any) -> bool:
    """Returns whether an input is a packed batch, or a placeholder for one."""
    return packing.is_packed(inputs, feature_config) or (
        tf.nest.is_nested(feature_config)
        and not tf.nest.is_nested(inputs)
        and not isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor))
        and len(getattr(inputs, "shape", ())) == 2
    )


def _activation_shape(
    spec: config.EmbeddingSpec, feature: config.FeatureSpec, shape: Shape
) -> Shape:
    dim = spec.table_of(feature).dim
    if feature.output_shape is not None:
        return (*feature.output_shape, dim)
    samples = shape[: max(len(shape) - 1, 1)]
    positions = [feature.max_sequence_length] * feature.is_sequence
    return (*samples, *positions, dim)


def _size(value: Any, axis: int) -> tf.Tensor:
    """Returns the number of samples at run time, for any type of input."""
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[axis], tf.int32)
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.bounding_shape(axis), tf.int32)
    return tf.shape(value)[axis]
