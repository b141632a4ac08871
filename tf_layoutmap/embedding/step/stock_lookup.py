"""The activations of one feature by TensorFlow's own operations only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs, sample_positions


def look_up(
    feature: config.FeatureSpec, table: config.TableSpec, rows: Any,
    value: Any, weight: Any, out_of_range: str,
    rows_of_keys: Callable[[tf.Tensor], tf.Tensor] | None = None,
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
      rows_of_keys: Of a table whose ids are keys: gives the row of each.

    Returns:
      Float32, as `serving_embedding_lookup` says.

    Raises:
      TypeError, ValueError: As `serving_embedding_lookup`.
    """
    found = _read(feature, value, weight, rows_of_keys is not None)
    shape = tf.TensorShape(rows.shape)
    if not shape.is_compatible_with([table.num_rows, table.dim]):
        raise ValueError(
            f"Table {table.name!r} must be of shape "
            f"[{table.num_rows}, {table.dim}]. Received: {shape} (feature "
            f"{feature.name!r}).")
    ids = tf.cast(found.ids, tf.int64)
    if rows_of_keys is not None:
        ids, out_of_range = rows_of_keys(ids), "error"
    elif out_of_range == "clip":
        ids = tf.clip_by_value(ids, 0, table.num_rows - 1)
    elif out_of_range == "error" and feature.validate:
        ids = _checked_ids(feature, table, ids)
    num_samples = tf.cast(found.num_samples, tf.int64)
    samples = _samples_of(feature, found, ids, num_samples)
    is_used = None
    if out_of_range == "drop":
        is_used = (ids >= 0) & (ids < table.num_rows)
    if feature.is_sequence and not found.inner_shape:
        activations = _place_in_sequence(
            feature, table, rows, ids, samples,
            _positions_of(feature, found, samples), num_samples, is_used)
        shape = [found.static_num_samples, feature.max_sequence_length]
    else:
        weights = found.weights if weight is not None else None
        if is_used is not None:
            ids, samples = (tf.boolean_mask(one, is_used)
                            for one in (ids, samples))
            if weights is not None:
                weights = tf.boolean_mask(weights, is_used)
        activations = _combine(
            table, rows, ids, samples, num_samples, weights)
        shape = [found.static_num_samples]
    if found.inner_shape:
        return _in_shape(feature, table, found, activations)
    if isinstance(value, tf.RaggedTensor) and feature.output_shape:
        shape = feature.output_shape
    return tf.ensure_shape(activations, [*shape, table.dim])


def _read(feature, value, weight, of_keys):
    """The input, ragged samples laid out over the positions of a shape."""
    read = feature_inputs.read_keys if of_keys else feature_inputs.read_feature
    found = read(feature, value, weight)
    shape = feature.output_shape
    if not isinstance(value, tf.RaggedTensor) or shape is None:
        return found
    if len(shape) == 1 and None in (shape[0], found.static_num_samples):
        return found
    return sample_positions.fill(feature, found, shape)


def _in_shape(feature, table, found, activations):
    """Divides the samples into the dimensions they came in."""
    if None in found.inner_shape:
        raise ValueError(
            f"Input {feature.name!r} must have sizes that are known while "
            "tracing, but for the first and the last. Received: "
            f"{list(found.inner_shape)} between them.")
    shape = [-1, *found.inner_shape, table.dim]
    activations = tf.reshape(activations, shape)
    if feature.output_shape is None:
        return activations
    return tf.ensure_shape(activations, [*feature.output_shape, table.dim])


def _gather(table, rows, ids):
    """The rows of ids, rounded where the table is quantized."""
    # Rows of 16 bits are read as the engine reads them.
    found = tf.cast(tf.gather(rows, ids), tf.float32)
    quantization = table.quantization
    if quantization is None:
        return found
    # In float32 throughout, as the engine does it.
    lower = tf.constant(quantization.lower, tf.float32)
    upper = tf.constant(quantization.upper, tf.float32)
    quantum = (upper - lower) / tf.cast(
        quantization.num_buckets - 1, tf.float32)
    clipped = tf.clip_by_value(found, lower, upper)
    bucket = tf.floor((clipped - lower) / quantum + 0.5)
    return bucket * quantum + lower


def _checked_ids(feature, table, ids):
    message = (f"Feature {feature.name!r}: ids must be in "
               f"[0, {table.num_rows}), the rows of table {table.name!r}.")
    checks = [
        tf.debugging.assert_non_negative(ids, message),
        tf.debugging.assert_less(
            ids, tf.constant(table.num_rows, tf.int64), message),
    ]
    with tf.control_dependencies([one for one in checks if one is not None]):
        return tf.identity(ids)


def _samples_of(feature, found, ids, num_samples):
    """Which sample each id belongs to: `[num_ids]` int64."""
    if found.splits.shape.rank == 2:
        samples = found.splits[:, 0]
        # Segment sums need them ascending; an unsorted sparse tensor would
        # be summed wrongly or fail without a name.
        check = tf.debugging.assert_non_negative(
            samples[1:] - samples[:-1],
            f"Feature {feature.name!r}: a sparse input must be in row-major "
            "order; see tf.sparse.reorder.")
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(samples)
    if found.splits.shape[0] == 0:
        per_sample = tf.math.floordiv(
            tf.size(ids, tf.int64), tf.maximum(num_samples, 1))
        return tf.repeat(tf.range(num_samples), per_sample)
    return tf.repeat(
        tf.range(num_samples), found.splits[1:] - found.splits[:-1])


def _combine(table, rows, ids, samples, num_samples, weights):
    """Sum of gain times row over the ids of each sample."""
    found = _gather(table, rows, ids)
    if weights is None and table.combiner == "sum":
        return tf.math.unsorted_segment_sum(found, samples, num_samples)
    if weights is None:
        weights = tf.ones_like(ids, tf.float32)
    if table.combiner == "mean":
        total = tf.math.unsorted_segment_sum(weights, samples, num_samples)
        weights = tf.math.divide_no_nan(weights, tf.gather(total, samples))
    elif table.combiner == "sqrtn":
        squares = tf.math.unsorted_segment_sum(
            tf.square(weights), samples, num_samples)
        weights = tf.math.divide_no_nan(
            weights, tf.gather(tf.sqrt(squares), samples))
    return tf.math.unsorted_segment_sum(
        found * weights[:, tf.newaxis], samples, num_samples)


def _positions_of(feature, found, samples):
    """Where in its sample each id of a sequence stands: `[num_ids]` int64."""
    if found.splits.shape.rank != 2:
        return tf.range(tf.size(samples, tf.int64), dtype=tf.int64) - (
            tf.searchsorted(samples, samples, side="left", out_type=tf.int64))
    positions = found.splits[:, 1]
    message = (f"Feature {feature.name!r}: the positions of a sequence in a "
               "sparse input must be at least 0 and ascend; see "
               "tf.sparse.reorder.")
    is_later = (samples[1:] > samples[:-1]) | (positions[1:] > positions[:-1])
    checks = [tf.debugging.assert_non_negative(positions, message),
              tf.debugging.Assert(tf.reduce_all(is_later), [message])]
    with tf.control_dependencies([one for one in checks if one is not None]):
        return tf.identity(positions)


def _place_in_sequence(feature, table, rows, ids, samples, positions,
                       num_samples, is_used):
    """Rows at their positions; what is longer is cut, what is shorter 0."""
    kept = positions < feature.max_sequence_length
    if is_used is not None:
        kept &= is_used
    kept = tf.where(kept)[:, 0]
    indices = tf.stack(
        [tf.gather(samples, kept), tf.gather(positions, kept)], axis=1)
    shape = tf.stack([num_samples,
                      tf.constant(feature.max_sequence_length, tf.int64),
                      tf.constant(table.dim, tf.int64)])
    return tf.scatter_nd(
        indices, _gather(table, rows, tf.gather(ids, kept)), shape)
