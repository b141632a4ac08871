"""The shapes of activations, known from those of the inputs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import packed_ids, structure

Shape = tuple[int | None, ...]


def of_inputs(
    spec: config.EmbeddingSpec, feature_config: Any, inputs: Any
) -> list[Shape]:
    """Returns the shape of each feature's activations.

    Nothing is computed: a step must not be enqueued for it.

    Args:
      spec: Tables and features.
      feature_config: Nested structure of features.
      inputs: Its structure, of what has a `shape`: `[num_samples]` or `[...,
        ids per sample]`; or a packed batch.

    Raises:
      TypeError, ValueError: The structures differ.
    """
    if is_packed(feature_config, inputs):
        # Each feature has its samples.
        return [
            _of_input(spec, feature, (inputs.shape[0], None))
            for feature in spec.features
        ]
    structure.check_same(inputs, "inputs", feature_config, "feature_config")
    return [
        _of_input(spec, feature, tuple(value.shape))
        for feature, value in zip(spec.features, tf.nest.flatten(inputs))
    ]


def zeros(spec: config.EmbeddingSpec, feature_config: Any, inputs: Any) -> Any:
    """Returns zeros in the shape of the activations, without a step.

    Args:
      spec: Tables and features.
      feature_config: Nested structure of features.
      inputs: Its structure of dense, sparse or ragged ids, or a packed batch.

    Returns:
      Structure of `feature_config` with float32 tensors.
    """
    shapes = of_inputs(spec, feature_config, inputs)
    values = tf.nest.flatten(inputs)
    if is_packed(feature_config, inputs):
        values *= len(shapes)
    return tf.nest.pack_sequence_as(
        feature_config,
        [
            tf.zeros(
                [
                    _size(value, axis) if size is None else size
                    for axis, size in enumerate(shape)
                ]
            )
            for shape, value in zip(shapes, values)
        ],
    )


def is_packed(feature_config: Any, inputs: Any) -> bool:
    """Whether an input is a packed batch, or what stands for one."""
    return packed_ids.is_packed(inputs, feature_config) or (
        tf.nest.is_nested(feature_config)
        and not tf.nest.is_nested(inputs)
        and not isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor))
        and len(getattr(inputs, "shape", ())) == 2
    )


def _of_input(
    spec: config.EmbeddingSpec, feature: config.FeatureSpec, shape: Shape
) -> Shape:
    dim = spec.table_of(feature).dim
    if feature.output_shape is not None:
        return (*feature.output_shape, dim)
    samples = shape[: max(len(shape) - 1, 1)]
    positions = [feature.max_sequence_length] * feature.is_sequence
    return (*samples, *positions, dim)


def _size(value: Any, axis: int) -> tf.Tensor:
    """A size that is only known at run time, of any form of input."""
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[axis], tf.int32)
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.bounding_shape(axis), tf.int32)
    return tf.shape(value)[axis]
