"""The activations of one feature by TensorFlow's own operations only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import (
    feature_inputs,
    sample_positions,
    stock_parts,
)
from tf_layoutmap.sharded.routing import assertions


def look_up(
    feature: config.FeatureSpec,
    table: config.TableSpec,
    rows: Any,
    value: Any,
    weight: Any,
    out_of_range: str,
    rows_of_keys: Callable[[tf.Tensor, int], tf.Tensor] | None = None,
) -> tf.Tensor:
    """Returns the activations of one feature.

    Args:
      feature: Whose input it is.
      table: That of the feature.
      rows: `[num_rows, dim]`: a `tf.Variable`, a tensor or a
        `ShardedVariable`.
      value: Integer ids of any form that a feature may have.
      weight: None, or the float weights of the ids in the same form.
      out_of_range: One of `config.OUT_OF_RANGE`.
      rows_of_keys: Of a table whose ids are keys: gives the row of each, for
        the kind that they are of.

    Returns:
      Float32, as `serving_embedding_lookup` says.

    Raises:
      TypeError, ValueError: As `serving_embedding_lookup`.
    """
    found = read(feature, value, weight, rows_of_keys is not None)
    shape = tf.TensorShape(rows.shape)
    if not shape.is_compatible_with([table.num_rows, table.dim]):
        raise ValueError(
            f"Table {table.name!r} must be of shape "
            f"[{table.num_rows}, {table.dim}]. Received: {shape} (feature "
            f"{feature.name!r})."
        )
    ids = tf.cast(found.ids, tf.int64)
    if rows_of_keys is not None:
        ids, out_of_range = rows_of_keys(ids, found.kind), "error"
    elif out_of_range == "clip":
        ids = tf.clip_by_value(ids, 0, table.num_rows - 1)
    elif out_of_range == "error" and feature.validate:
        ids = _checked_ids(feature, table, ids)
    num_samples = tf.cast(found.num_samples, tf.int64)
    samples = stock_parts.samples_of(feature, found, ids, num_samples)
    is_used = None
    if out_of_range == "drop":
        is_used = (ids >= 0) & (ids < table.num_rows)
    if feature.is_sequence and not found.inner_shape:
        kept, indices = stock_parts.kept_in_sequence(
            feature,
            samples,
            stock_parts.positions_of(feature, found, samples),
            is_used,
        )
        activations = stock_parts.in_sequence(
            feature,
            table,
            indices,
            _gather(table, rows, tf.gather(ids, kept)),
            num_samples,
        )
    else:
        weights = found.weights if weight is not None else None
        if is_used is not None:
            ids, samples = (
                tf.boolean_mask(one, is_used) for one in (ids, samples)
            )
            if weights is not None:
                weights = tf.boolean_mask(weights, is_used)
        activations = stock_parts.combine(
            table, _gather(table, rows, ids), samples, num_samples, weights
        )
    return in_shape(feature, table, value, found, activations)


def read(
    feature: config.FeatureSpec, value: Any, weight: Any, of_keys: bool = False
) -> feature_inputs.FeatureIds:
    """Reads an input, ragged samples laid out over positions of a shape."""
    read = feature_inputs.read_keys if of_keys else feature_inputs.read_feature
    found = read(feature, value, weight)
    shape = feature.output_shape
    if not isinstance(value, tf.RaggedTensor) or shape is None:
        return found
    if len(shape) == 1 and None in (shape[0], found.static_num_samples):
        return found
    return sample_positions.fill(feature, found, shape)


def in_shape(
    feature: config.FeatureSpec,
    table: config.TableSpec,
    value: Any,
    found: feature_inputs.FeatureIds,
    activations: tf.Tensor,
) -> tf.Tensor:
    """Divides the samples into the dimensions they came in.

    Args:
      feature: Whose input it is.
      table: That of the feature.
      value: The input.
      found: What `read` made of it.
      activations: `[num_samples, dim]`, or of a sequence feature
        `[num_samples, max_sequence_length, dim]`.
    """
    if not found.inner_shape:
        shape = [found.static_num_samples]
        if feature.is_sequence:
            shape.append(feature.max_sequence_length)
        if isinstance(value, tf.RaggedTensor) and feature.output_shape:
            shape = feature.output_shape
        return tf.ensure_shape(activations, [*shape, table.dim])
    if None in found.inner_shape:
        raise ValueError(
            f"Input {feature.name!r} must have sizes that are known while "
            "tracing, but for the first and the last. Received: "
            f"{list(found.inner_shape)} between them."
        )
    shape = [-1, *found.inner_shape, table.dim]
    activations = tf.reshape(activations, shape)
    if feature.output_shape is None:
        return activations
    return tf.ensure_shape(activations, [*feature.output_shape, table.dim])


def _gather(table, rows, ids):
    """The rows of ids, rounded where the table is quantized."""
    # Rows of 16 bits are read as the engine reads them.
    return stock_parts.rounded(table, tf.cast(tf.gather(rows, ids), tf.float32))


def _checked_ids(feature, table, ids):
    message = (
        f"Feature {feature.name!r}: ids must be in [0, {table.num_rows}), the "
        f"rows of table {table.name!r}; `out_of_range` says how others are "
        "handled."
    )
    if tf.executing_eagerly():
        outside = (ids < 0) | (ids >= table.num_rows)
        assertions.require(
            ~tf.reduce_any(outside),
            message,
            " Received: ",
            tf.boolean_mask(ids, outside),
        )
        return ids
    checks = [
        tf.debugging.assert_non_negative(ids, message),
        tf.debugging.assert_less(
            ids, tf.constant(table.num_rows, tf.int64), message
        ),
    ]
    with tf.control_dependencies(checks):
        return tf.identity(ids)
