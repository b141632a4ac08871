"""The shapes that `build` is told, and which activations they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import tensorflow as tf

from tf_layoutmap.embedding.spec import config

Shape = tuple[int | None, ...]


def is_known(shape: Shape) -> TypeGuard[tuple[int, ...]]:
    """Whether no size is None."""
    return None not in shape


def read_arguments(
    feature_config: Any,
    features: Sequence[config.FeatureSpec],
    shapes: Any,
    batch_size: int | None,
    *,
    has_positions: bool = False,
) -> list[Shape] | None:
    """Reads the arguments of `build`; None when they say nothing.

    Args:
      feature_config: Nested structure of features.
      features: The same, flat.
      shapes: As of `read`, or a batch size, or None.
      batch_size: Of every feature, or None.
      has_positions: Whether the shapes of sequences get their positions.

    Returns:
      For each feature the shape of its samples, as of `read`.

    Raises:
      TypeError, ValueError: As of `read`, or `batch_size` is none.
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
    return [one.output_shape or of(one, (batch_size,)) for one in features]


def read(
    feature_config: Any,
    features: Sequence[config.FeatureSpec],
    shapes: Any,
) -> list[Shape]:
    """Reads the input shapes of one replica.

    Args:
      feature_config: Nested structure of features.
      features: The same, flat.
      shapes: Its structure with a shape for each feature; or lists and tuples
        of as many `tf.TensorShape`s, nested in any way, as TensorFlow takes
        them.

    Returns:
      For each feature the shape of its samples: that of the input without
      the last dimension, which is combined.

    Raises:
      TypeError: If the structure is of other types than `feature_config`.
      ValueError: If it has other sizes, or a shape has no known rank.
    """
    found = []
    for feature, shape in zip(
        features, _flatten(feature_config, features, shapes)
    ):
        shape = tf.TensorShape(shape)
        if not shape.rank:
            raise ValueError(
                "A per-replica input shape must be [num_samples] or [..., ids "
                f"per sample]. Received: {shape} (feature {feature.name!r})."
            )
        found.append(tuple(shape.as_list()[: max(shape.rank - 1, 1)]))
    return found


def with_positions(feature: config.FeatureSpec, sizes: Shape) -> Shape:
    """Returns the activation's shape, without `dim`, of samples' `sizes`.

    Positions are only those of inputs of rank 2: with more dimensions
    `max_sequence_length` has no meaning, as in TensorFlow.
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
    """Holds the shape of an input to the one that is known.

    Args:
      feature: Whose input it is.
      known: The activation's shape without `dim`.
      new: What the input, or `build`, would make it.
      may_be_ragged: Whether the input is, or can be, ragged: its samples may
        be laid out over a shape of more dimensions.

    Raises:
      ValueError: If the shapes contradict.
    """
    if len(new) < len(known) and may_be_ragged:
        _check_positions(feature, known, new)
        return
    if len(new) != len(known) or any(
        None not in (one, other) and one != other
        for one, other in zip(known, new)
    ):
        raise ValueError(
            f"Inconsistent shape found for input {feature.name!r}: its output "
            f"shape is {list(known)}, by its FeatureConfig, `build` or the "
            "first step, for each replica. Received an input for output shape "
            f"{list(new)}."
        )


def merge(known: Shape | None, new: Shape) -> Shape:
    """Returns the known shape, its unknown sizes taken from the new one."""
    if known is None:
        return new
    if len(known) != len(new):
        return known
    return tuple(
        other if one is None else one for one, other in zip(known, new)
    )


def _check_positions(feature, known: Shape, new: Shape):
    """Ragged samples must fill the positions of the output shape evenly."""
    if not is_known(known) or not is_known(new):
        return
    positions, given = math.prod(known), math.prod(new)
    if not given or positions % given:
        raise ValueError(
            f"Inconsistent shape found for input {feature.name!r}: its number "
            f"of samples must divide the {positions} positions of output shape "
            f"{list(known)}. Received: {given} samples."
        )


def _flatten(feature_config, features, shapes) -> list[Any]:
    leaves = tf.nest.flatten(shapes)
    if (
        isinstance(shapes, (list, tuple))
        and leaves
        and all(isinstance(one, tf.TensorShape) for one in leaves)
    ):
        # Only the order says which is whose, so names must not contradict.
        if not _has_mapping(shapes):
            if len(leaves) != len(features):
                raise ValueError(
                    "Argument `per_replica_input_shapes` must have one shape "
                    f"for each of the {len(features)} features. Received "
                    f"{len(leaves)}: {shapes}."
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
        return any(_has_mapping(one) for one in structure)
    return not isinstance(structure, tf.TensorShape)
