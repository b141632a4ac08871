"""Lookup of one feature with TensorFlow's own operations.

`look_up` is the entry point. If its result is never exported, it can use the
fused op of this package. Other functions in this module implement the parts
of a lookup before and after the gather. `tf_layoutmap/serving` also uses these
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.sharded.routing import assertions, checks, parts
from tf_layoutmap.sharded.sharded_variable import ShardedVariable, to_shards
from tf_layoutmap.vocabulary import key_tensors


def samples_of(
    feature: config.FeatureSpec,
    feature_ids: inputs.FeatureIds,
    ids: tf.Tensor,
    num_samples: tf.Tensor,
) -> tf.Tensor:
    """Returns the sample index of each id as an int64 tensor `[num_ids]`."""
    if feature_ids.splits.shape.rank == 2:
        samples = feature_ids.splits[:, 0]
        # Segment sums require ascending samples. This check raises an error
        # that names the feature. Without the check, the sums of an unsorted
        # sparse tensor could be wrong.
        check = tf.debugging.assert_non_negative(
            samples[1:] - samples[:-1],
            f"Feature {feature.name!r}: a sparse input must be in row-major "
            "order; see tf.sparse.reorder.",
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(samples)
    if feature_ids.splits.shape[0] == 0:
        return tf.repeat(
            tf.range(num_samples), _ids_per_sample(ids, num_samples)
        )
    return tf.repeat(
        tf.range(num_samples), feature_ids.splits[1:] - feature_ids.splits[:-1]
    )


def _ids_per_sample(ids: tf.Tensor, num_samples: tf.Tensor) -> tf.Tensor:
    """Returns the number of ids of each sample of a dense input."""
    return tf.math.floordiv(tf.size(ids, tf.int64), tf.maximum(num_samples, 1))


def combine_rows(
    table: config.TableSpec,
    rows: tf.Tensor,
    samples: tf.Tensor,
    num_samples: tf.Tensor,
    weights: tf.Tensor | None,
) -> tf.Tensor:
    """Combines the rows of each sample with the combiner of the table.

    Args:
      table: Spec of the table.
      rows: Rows of the ids, `[num_ids, dim]` float32.
      samples: Sample index of each id, `[num_ids]` int64.
      num_samples: Scalar int64.
      weights: Weights of the ids, `[num_ids]` float32. None if all weights are
        1.
    """
    if weights is None and table.combiner == "sum":
        return tf.math.unsorted_segment_sum(rows, samples, num_samples)
    if weights is None:
        weights = tf.ones_like(samples, tf.float32)
    if table.combiner != "sum":
        weights = gains_of(table.combiner, weights, samples, num_samples)
    return tf.math.unsorted_segment_sum(
        rows * weights[:, tf.newaxis], samples, num_samples
    )


def gains_of(
    combiner: str,
    weights: tf.Tensor,
    samples: tf.Tensor,
    num_samples: tf.Tensor,
) -> tf.Tensor:
    """Returns weights divided by the divisors of their samples.

    As in the engine, divisors have double precision: the squares and sums of
    float32 weights are not always in the range of float32.
    """
    exact = tf.cast(weights, tf.float64)
    total = tf.math.unsorted_segment_sum(
        tf.square(exact) if combiner == "sqrtn" else exact, samples, num_samples
    )
    if combiner == "sqrtn":
        # The gradient of the square root of 0 would be NaN.
        is_zero = tf.equal(total, 0)
        root = tf.sqrt(tf.where(is_zero, tf.ones_like(total), total))
        total = tf.where(is_zero, tf.zeros_like(total), root)
    return tf.cast(
        tf.math.divide_no_nan(exact, tf.gather(total, samples)), tf.float32
    )


def positions_of(
    feature: config.FeatureSpec,
    feature_ids: inputs.FeatureIds,
    samples: tf.Tensor,
) -> tf.Tensor:
    """Returns the position of each id in its sequence as an int64 tensor."""
    if feature_ids.splits.shape.rank != 2:
        return tf.range(tf.size(samples, tf.int64), dtype=tf.int64) - (
            tf.searchsorted(samples, samples, side="left", out_type=tf.int64)
        )
    positions = feature_ids.splits[:, 1]
    message = (
        f"Feature {feature.name!r}: the positions of a sequence in a "
        "sparse input must be at least 0 and ascend; see "
        "tf.sparse.reorder."
    )
    is_later = (samples[1:] > samples[:-1]) | (positions[1:] > positions[:-1])
    conditions = [
        tf.debugging.assert_non_negative(positions, message),
        tf.debugging.Assert(tf.reduce_all(is_later), [message]),
    ]
    with tf.control_dependencies(
        [check for check in conditions if check is not None]
    ):
        return tf.identity(positions)


def kept_in_sequence(
    feature: config.FeatureSpec,
    samples: tf.Tensor,
    positions: tf.Tensor,
    is_used: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Truncates sequences to `max_sequence_length` positions.

    Returns:
      A tuple of two tensors: the indices of the remaining ids, `[num_kept]`
      int64, and the samples and positions of these ids, `[num_kept, 2]` int64.
    """
    is_kept = positions < feature.max_sequence_length
    if is_used is not None:
        is_kept &= is_used
    kept = tf.where(is_kept)[:, 0]
    return kept, tf.stack(
        [tf.gather(samples, kept), tf.gather(positions, kept)], axis=1
    )


def in_sequence(
    feature: config.FeatureSpec,
    table: config.TableSpec,
    indices: tf.Tensor,
    rows: tf.Tensor,
    num_samples: tf.Tensor,
) -> tf.Tensor:
    """Writes rows to sequences. Positions without a row contain zeros."""
    shape = tf.stack(
        [
            num_samples,
            tf.constant(feature.max_sequence_length, tf.int64),
            tf.constant(table.dim, tf.int64),
        ]
    )
    return tf.scatter_nd(indices, rows, shape)


def rounded_rows(table: config.TableSpec, rows: tf.Tensor) -> tf.Tensor:
    """Rounds float32 rows if the table is quantized."""
    quantization = table.quantization
    if quantization is None:
        return rows
    # As in the engine, all computations use float32.
    lower = tf.constant(quantization.lower, tf.float32)
    upper = tf.constant(quantization.upper, tf.float32)
    quantum = (upper - lower) / tf.cast(
        quantization.num_buckets - 1, tf.float32
    )
    clipped = tf.clip_by_value(rows, lower, upper)
    bucket = tf.floor((clipped - lower) / quantum + 0.5)
    return bucket * quantum + lower


def look_up(
    feature: config.FeatureSpec,
    table: config.TableSpec,
    rows: Any,
    value: Any,
    weight: Any,
    out_of_range: str,
    rows_of_keys: Callable[..., tf.Tensor] | None = None,
    *,
    may_fuse: bool = False,
) -> tf.Tensor:
    """Returns the activations of one feature.

    Args:
      feature: Spec of the feature.
      table: Spec of the feature's table.
      rows: Rows of the table, `[num_rows, dim]`, as a `tf.Variable`, a tensor
        or a `ShardedVariable`.
      value: Integer ids in any form that `read_feature` accepts.
      weight: None, or the float weights of the ids, in the same form as the
        ids.
      out_of_range: One of `config.OUT_OF_RANGE`.
      rows_of_keys: For a table whose ids are keys, `Vocabulary.rows_of_keys`.
        Otherwise None.
      may_fuse: Whether ops of this package find the keys, and look up and
        combine the rows in one pass, if the rows, the input and the device of
        the table allow it. The results are bitwise identical.

    Returns:
      Float32 activations, as documented in `serving_embedding_lookup`.

    Raises:
      TypeError, ValueError: See `serving_embedding_lookup`.
    """
    feature_ids = read(feature, value, weight, rows_of_keys is not None)
    value = key_tensors.ids_of(value)
    shape = tf.TensorShape(rows.shape)
    if not shape.is_compatible_with([table.num_rows, table.dim]):
        raise ValueError(
            f"Table {table.name!r} must be of shape "
            f"[{table.num_rows}, {table.dim}]. Received: {shape} (feature "
            f"{feature.name!r})."
        )
    ids = tf.cast(feature_ids.ids, tf.int64)
    num_samples = tf.cast(feature_ids.num_samples, tf.int64)
    part = (
        _fused_part(table, rows)
        if may_fuse
        and out_of_range != "drop"
        and feature_ids.splits.shape.rank == 1
        and not (feature.is_sequence and not feature_ids.inner_shape)
        else None
    )
    if rows_of_keys is not None:
        ids = rows_of_keys(ids, feature_ids.kind, by_op=part is not None)
        out_of_range = "error"
    elif out_of_range == "clip":
        ids = tf.clip_by_value(ids, 0, table.num_rows - 1)
    elif out_of_range == "error" and feature.validate and part is None:
        ids = _checked_ids(feature, table, ids)
    if part is not None:
        activations = _fused_lookup(
            feature,
            table,
            part,
            ids,
            feature_ids,
            num_samples,
            feature_ids.weights if weight is not None else None,
        )
        return in_shape(feature, table, value, feature_ids, activations)
    samples = samples_of(feature, feature_ids, ids, num_samples)
    is_used = None
    if out_of_range == "drop":
        is_used = (ids >= 0) & (ids < table.num_rows)
    if feature.is_sequence and not feature_ids.inner_shape:
        kept, indices = kept_in_sequence(
            feature,
            samples,
            positions_of(feature, feature_ids, samples),
            is_used,
        )
        activations = in_sequence(
            feature,
            table,
            indices,
            _gather(table, rows, tf.gather(ids, kept)),
            num_samples,
        )
    else:
        weights = feature_ids.weights if weight is not None else None
        if is_used is not None:
            ids, samples = (
                tf.boolean_mask(tensor, is_used) for tensor in (ids, samples)
            )
            if weights is not None:
                weights = tf.boolean_mask(weights, is_used)
        activations = combine_rows(
            table, _gather(table, rows, ids), samples, num_samples, weights
        )
    return in_shape(feature, table, value, feature_ids, activations)


def _fused_part(table: config.TableSpec, rows: Any) -> parts.Part | None:
    """Returns the shards of a table if one op can look up in all of them."""
    if (
        rows.dtype != tf.float32
        or table.quantization is not None
        or tf_private.in_save_context()
        or checks.in_vectorized_map()
    ):
        return None
    if not isinstance(rows, (ShardedVariable, tf_private.BaseResourceVariable)):
        return None
    shards = to_shards(rows)
    if shards.axis != 0:
        return None
    part, *others = parts.parts_of(shards)
    return None if others or not part.is_fused else part


def _fused_lookup(
    feature: config.FeatureSpec,
    table: config.TableSpec,
    part: parts.Part,
    ids: tf.Tensor,
    feature_ids: inputs.FeatureIds,
    num_samples: tf.Tensor,
    weights: tf.Tensor | None,
) -> tf.Tensor:
    """Returns the combined rows of each sample, `[num_samples, dim]`."""
    splits = feature_ids.splits
    if splits.shape[0] == 0:
        splits = tf.range(num_samples + 1) * _ids_per_sample(ids, num_samples)
    if weights is None:
        weights = tf.ones([tf.size(ids)], tf.float32)
    if table.combiner != "sum":
        weights = gains_of(
            table.combiner,
            weights,
            samples_of(feature, feature_ids, ids, num_samples),
            num_samples,
        )
    return parts.combine(
        part, ids, splits, weights, feature=feature.name, table=table.name
    )


def rows_of_ids(
    table: config.TableSpec,
    rows: Any,
    feature_ids: inputs.FeatureIds,
    out_of_range: str,
    rows_of_keys: Callable[..., tf.Tensor] | None = None,
) -> tf.Tensor:
    """Returns the row of each id, `[num_ids, dim]` float32.

    The arguments are described in `look_up`. Ids that `out_of_range="drop"`
    ignores have rows of zeros.
    """
    ids = tf.cast(feature_ids.ids, tf.int64)
    if rows_of_keys is not None:
        return _gather(table, rows, rows_of_keys(ids, feature_ids.kind))
    nearest = tf.clip_by_value(ids, 0, table.num_rows - 1)
    gathered = _gather(table, rows, nearest)
    if out_of_range != "drop":
        return gathered
    return tf.where(
        tf.equal(ids, nearest)[:, tf.newaxis], gathered, tf.zeros([1, 1])
    )


def read(
    feature: config.FeatureSpec, value: Any, weight: Any, of_keys: bool = False
) -> inputs.FeatureIds:
    """Reads an input, and applies `output_shape` to a ragged input."""
    read_input = inputs.read_keys if of_keys else inputs.read_feature
    feature_ids = read_input(feature, value, weight)
    value = key_tensors.ids_of(value)
    shape = feature.output_shape
    if not isinstance(value, tf.RaggedTensor) or shape is None:
        return feature_ids
    if len(shape) == 1 and None in (shape[0], feature_ids.static_num_samples):
        return feature_ids
    return inputs.fill_samples(feature, feature_ids, shape)


def in_shape(
    feature: config.FeatureSpec,
    table: config.TableSpec,
    value: Any,
    feature_ids: inputs.FeatureIds,
    activations: tf.Tensor,
) -> tf.Tensor:
    """Reshapes activations to match the dimensions of the input.

    Args:
      feature: Spec of the feature.
      table: Spec of the feature's table.
      value: The input.
      feature_ids: Return value of `read` for the input.
      activations: Activations `[num_samples, dim]`. For a sequence feature,
        `[num_samples, max_sequence_length, dim]`.
    """
    if not feature_ids.inner_shape:
        shape = [feature_ids.static_num_samples]
        if feature.is_sequence:
            shape.append(feature.max_sequence_length)
        if isinstance(value, tf.RaggedTensor) and feature.output_shape:
            shape = feature.output_shape
        return tf.ensure_shape(activations, [*shape, table.dim])
    if None in feature_ids.inner_shape:
        raise ValueError(
            f"Input {feature.name!r} must have static sizes except in its "
            "first and last dimension. Received: "
            f"{list(feature_ids.inner_shape)} between them."
        )
    shape = [-1, *feature_ids.inner_shape, table.dim]
    activations = tf.reshape(activations, shape)
    if feature.output_shape is None:
        return activations
    return tf.ensure_shape(activations, [*feature.output_shape, table.dim])


def _gather(table, rows, ids):
    """Reads the rows of ids, and rounds them if the table is quantized."""
    # As in the engine, 16-bit rows are converted to float32.
    return rounded_rows(table, tf.cast(tf.gather(rows, ids), tf.float32))


def _checked_ids(feature, table, ids):
    message = (
        f"Feature {feature.name!r}: ids must be in [0, {table.num_rows}), the "
        f"rows of table {table.name!r}; `out_of_range` sets how other ids are "
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
    conditions = [
        tf.debugging.assert_non_negative(ids, message),
        tf.debugging.assert_less(
            ids, tf.constant(table.num_rows, tf.int64), message
        ),
    ]
    with tf.control_dependencies(conditions):
        return tf.identity(ids)
