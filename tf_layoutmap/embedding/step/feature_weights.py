"""Refuses weights that do not go with the ids of their feature."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config


def check(feature: config.FeatureSpec, value: Any, weight: Any):
    """Refuses weights of another kind or number than sparse or ragged ids.

    Raises:
      TypeError: If they are not numbers.
      ValueError: If they are of another kind or number.
    """
    check_type(feature, value, weight, type(value))
    _check_values(feature, value.values, weight.values)


def check_type(
    feature: config.FeatureSpec, value: Any, weight: Any, expected: type
):
    """Raises a ValueError unless weights are of the kind of the ids."""
    if not isinstance(weight, expected):
        raise ValueError(
            f"Weight for {feature.name!r} is of type {type(weight)}, which "
            f"does not match type input which is {type(value).__name__}."
        )


def read_values(
    feature: config.FeatureSpec, ids: tf.Tensor, values: tf.Tensor
) -> tf.Tensor:
    """Returns weights `[num_ids]` of numbers as float32."""
    _check_values(feature, ids, values)
    return tf.cast(values, tf.float32)


def _check_values(feature, ids, values):
    dtype = values.dtype
    if not (dtype.is_floating or dtype.is_integer):
        raise TypeError(
            f"Weights of feature {feature.name!r} must be numbers. "
            f"Received: {dtype.name}."
        )
    if not ids.shape.is_compatible_with(values.shape):
        raise ValueError(
            f"Weights of feature {feature.name!r} must be one for each id. "
            f"Received: ids of shape {ids.shape}, weights of shape "
            f"{values.shape}."
        )


def same_positions(feature, what, positions, weight_positions):
    """Returns `positions`, once those of the weights are known to equal them.

    Args:
      feature: Whose name is in the message.
      what: What the positions are, for the message.
      positions: Of the ids: row_splits, or indices.
      weight_positions: Those of the weights.

    Weights that belong to other ids would train wrong values without an
    error.
    """
    if weight_positions is positions:
        return positions
    checks = [
        tf.debugging.assert_equal(
            tf.shape(positions),
            tf.shape(weight_positions),
            f"Weights of feature {feature.name!r} must have as many {what} "
            "as its ids.",
        ),
    ]
    with tf.control_dependencies(ops_only(checks)):
        checks = [
            tf.debugging.assert_equal(
                tf.cast(positions, tf.int64),
                tf.cast(weight_positions, tf.int64),
                f"Weights of feature {feature.name!r} must have the {what} of "
                "its ids.",
            )
        ]
    with tf.control_dependencies(ops_only(checks)):
        return tf.identity(positions)


def ops_only(checks):
    """Drops the None that eager assertions return."""
    return [check for check in checks if check is not None]
