"""Reads the input shapes passed to `build`, and computes activation shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import tensorflow as tf

from tf_layoutmap.embedding.configs import config

Shape = tuple[int | None, ...]


def is_known(shape: Shape) -> TypeGuard[tuple[int, ...]]:
    """Whether all sizes are known."""
    return None not in shape


def read_arguments(
    feature_config: Any,
    features: Sequence[config.FeatureSpec],
    shapes: Any,
    batch_size: int | None,
    *,
    has_positions: bool = False,
) -> list[Shape] | None:
    """Reads the arguments of `build`.

    Args:
      feature_config: Nested structure of features.
      features: Specs of the features in flatten order.
      shapes: Argument `shapes` of `read`, or a batch size, or None.
      batch_size: Batch size of every feature, or None.
      has_positions: Whether to append the number of positions to the shapes of
        sequence features.

    Returns:
      For each feature, the shape of its samples, as returned by `read`. If
      `shapes` and `batch_size` are None, the function returns None.

    Raises:
      TypeError: If `read` raises a TypeError.
      ValueError: If `read` raises a ValueError, or `batch_size` is invalid.
    """
    if isinstance(shapes, int) and not isinstance(shapes, bool):
        shapes, batch_size = None, shapes

    def of(feature: config.FeatureSpec, sizes: Shape) -> Shape:
        return with_positions(feature, sizes) if has_positions else sizes

    if shapes is not None:
        return [
            of(feature, sizes)
            for feature, sizes in zip(
                features, read(feature_config, features, shapes)
            )
        ]
    if batch_size is None:
        return None
    if (
        not isinstance(batch_size, int)
        or isinstance(batch_size, bool)
        or batch_size < 1
    ):
        raise ValueError(
            "A per-replica batch size must be an int of at least 1. "
            f"Received: {batch_size!r}."
        )
    return [
        feature.output_shape or of(feature, (batch_size,))
        for feature in features
    ]


def read(
    feature_config: Any,
    features: Sequence[config.FeatureSpec],
    shapes: Any,
) -> list[Shape]:
    """Reads the input shapes of one replica.

    Args:
      feature_config: Nested structure of features.
      features: Specs of the features in flatten order.
      shapes: Structure of `feature_config` with a shape for each feature. As in
        TensorFlow, `shapes` can also be a list or tuple with one
        `tf.TensorShape` for each feature, with any nesting.

    Returns:
      For each feature, the shape of its samples: the shape of the input without
      the last dimension, whose ids a lookup combines.

    Raises:
      TypeError: If the structure has other types than `feature_config`.
      ValueError: If the structure has another size than `feature_config`, or
        the rank of a shape is unknown.
    """
    sample_shapes = []
    for feature, shape in zip(
        features, _flatten(feature_config, features, shapes)
    ):
        shape = tf.TensorShape(shape)
        if not shape.rank:
            raise ValueError(
                "A per-replica input shape must be [num_samples] or [..., ids "
                f"per sample]. Received: {shape} (feature {feature.name!r})."
            )
        sample_shapes.append(tuple(shape.as_list()[: max(shape.rank - 1, 1)]))
    return sample_shapes


def with_positions(feature: config.FeatureSpec, sizes: Shape) -> Shape:
    """Returns the activations' shape, without `dim`, for samples of `sizes`.

    As in TensorFlow, `max_sequence_length` applies only to inputs of rank 2.
    """
    if feature.is_sequence and len(sizes) == 1:
        return (*sizes, feature.max_sequence_length)
    return sizes


def check(
    feature: config.FeatureSpec,
    known: Shape,
    new: Shape,
    *,
    may_be_ragged: bool = True,
):
    """Checks the shape of an input against the known shape.

    Args:
      feature: Spec of the feature.
      known: The activation's shape without `dim`.
      new: The activation's shape without `dim`, computed from the input or from
        the arguments of `build`.
      may_be_ragged: Whether the input can be ragged. If True, the known shape
        may have more dimensions than the new shape. The samples are then
        distributed over the additional dimensions.

    Raises:
      ValueError: If the shapes contradict each other.
    """
    if len(new) < len(known) and may_be_ragged:
        _check_positions(feature, known, new)
        return
    if len(new) != len(known) or any(
        None not in (size, other) and size != other
        for size, other in zip(known, new)
    ):
        raise ValueError(
            f"Inconsistent shape found for input {feature.name!r}: its output "
            f"shape on each replica must be {list(known)}, which its "
            "FeatureConfig, `build` or the first step has set. Received an "
            f"input for output shape {list(new)}."
        )


def merge(known: Shape | None, new: Shape) -> Shape:
    """Replaces the unknown sizes of `known` by the sizes of `new`."""
    if known is None:
        return new
    if len(known) != len(new):
        return known
    return tuple(
        other if size is None else size for size, other in zip(known, new)
    )


def _check_positions(feature, known: Shape, new: Shape):
    """Checks that all samples can fill an equal number of positions."""
    if not is_known(known) or not is_known(new):
        return
    positions, num_samples = math.prod(known), math.prod(new)
    if not num_samples or positions % num_samples:
        raise ValueError(
            f"Inconsistent shape found for input {feature.name!r}: its number "
            f"of samples must divide the {positions} positions of output shape "
            f"{list(known)}. Received: {num_samples} samples."
        )


def _flatten(feature_config, features, shapes) -> list[Any]:
    leaves = tf.nest.flatten(shapes)
    if (
        isinstance(shapes, (list, tuple))
        and leaves
        and all(isinstance(leaf, tf.TensorShape) for leaf in leaves)
    ):
        # A list of shapes is assigned to the features by order only, and names
        # are ignored. Therefore a structure that contains a dict must match
        # `feature_config`.
        if not _has_mapping(shapes):
            if len(leaves) != len(features):
                raise ValueError(
                    "Argument `per_replica_input_shapes` must have one shape "
                    f"for each of the {len(features)} features. Received: "
                    f"{len(leaves)} shapes, {shapes}."
                )
            return leaves
    try:
        return tf.__internal__.nest.flatten_up_to(
            feature_config, shapes, check_types=False
        )
    except (TypeError, ValueError, KeyError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            "Argument `per_replica_input_shapes` must have the structure of "
            f"`feature_config`. Received: {shapes}."
        ) from error


def _has_mapping(structure: Any) -> bool:
    if isinstance(structure, (list, tuple)):
        return any(_has_mapping(part) for part in structure)
    return not isinstance(structure, tf.TensorShape)
