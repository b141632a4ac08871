"""What a lookup by TensorFlow's own operations does around its gather."""

from __future__ import annotations

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs


def samples_of(
    feature: config.FeatureSpec,
    found: feature_inputs.FeatureIds,
    ids: tf.Tensor,
    num_samples: tf.Tensor,
) -> tf.Tensor:
    """Returns which sample each id belongs to: `[num_ids]` int64."""
    if found.splits.shape.rank == 2:
        samples = found.splits[:, 0]
        # Segment sums need them ascending; an unsorted sparse tensor would
        # be summed wrongly or fail without a name.
        check = tf.debugging.assert_non_negative(
            samples[1:] - samples[:-1],
            f"Feature {feature.name!r}: a sparse input must be in row-major "
            "order; see tf.sparse.reorder.",
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(samples)
    if found.splits.shape[0] == 0:
        per_sample = tf.math.floordiv(
            tf.size(ids, tf.int64), tf.maximum(num_samples, 1)
        )
        return tf.repeat(tf.range(num_samples), per_sample)
    return tf.repeat(
        tf.range(num_samples), found.splits[1:] - found.splits[:-1]
    )


def combine(
    table: config.TableSpec,
    found: tf.Tensor,
    samples: tf.Tensor,
    num_samples: tf.Tensor,
    weights: tf.Tensor | None,
) -> tf.Tensor:
    """Returns the sum of gain times row over the ids of each sample.

    Args:
      table: Whose rows they are.
      found: `[num_ids, dim]` float32, the rows of the ids.
      samples: `[num_ids]` int64, the sample of each id.
      num_samples: Scalar int64.
      weights: `[num_ids]` float32, or None for 1 each.
    """
    if weights is None and table.combiner == "sum":
        return tf.math.unsorted_segment_sum(found, samples, num_samples)
    if weights is None:
        weights = tf.ones_like(samples, tf.float32)
    if table.combiner == "mean":
        total = tf.math.unsorted_segment_sum(weights, samples, num_samples)
        weights = tf.math.divide_no_nan(weights, tf.gather(total, samples))
    elif table.combiner == "sqrtn":
        squares = tf.math.unsorted_segment_sum(
            tf.square(weights), samples, num_samples
        )
        weights = tf.math.divide_no_nan(
            weights, tf.gather(tf.sqrt(squares), samples)
        )
    return tf.math.unsorted_segment_sum(
        found * weights[:, tf.newaxis], samples, num_samples
    )


def positions_of(
    feature: config.FeatureSpec,
    found: feature_inputs.FeatureIds,
    samples: tf.Tensor,
) -> tf.Tensor:
    """Returns where each id of a sequence stands: `[num_ids]` int64."""
    if found.splits.shape.rank != 2:
        return tf.range(tf.size(samples, tf.int64), dtype=tf.int64) - (
            tf.searchsorted(samples, samples, side="left", out_type=tf.int64)
        )
    positions = found.splits[:, 1]
    message = (
        f"Feature {feature.name!r}: the positions of a sequence in a "
        "sparse input must be at least 0 and ascend; see "
        "tf.sparse.reorder."
    )
    is_later = (samples[1:] > samples[:-1]) | (positions[1:] > positions[:-1])
    checks = [
        tf.debugging.assert_non_negative(positions, message),
        tf.debugging.Assert(tf.reduce_all(is_later), [message]),
    ]
    with tf.control_dependencies([one for one in checks if one is not None]):
        return tf.identity(positions)


def kept_in_sequence(
    feature: config.FeatureSpec,
    samples: tf.Tensor,
    positions: tf.Tensor,
    is_used: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns which ids are kept, and their samples and positions.

    What is behind the last position of a sequence is cut off.

    Returns:
      `[num_kept]` int64 indices of ids, and `[num_kept, 2]` int64.
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
    found: tf.Tensor,
    num_samples: tf.Tensor,
) -> tf.Tensor:
    """Returns rows at their positions, and zeros where there is no row."""
    shape = tf.stack(
        [
            num_samples,
            tf.constant(feature.max_sequence_length, tf.int64),
            tf.constant(table.dim, tf.int64),
        ]
    )
    return tf.scatter_nd(indices, found, shape)


def rounded(table: config.TableSpec, found: tf.Tensor) -> tf.Tensor:
    """Returns float32 rows, rounded if the table is quantized."""
    quantization = table.quantization
    if quantization is None:
        return found
    # In float32 throughout, as the engine does it.
    lower = tf.constant(quantization.lower, tf.float32)
    upper = tf.constant(quantization.upper, tf.float32)
    quantum = (upper - lower) / tf.cast(
        quantization.num_buckets - 1, tf.float32
    )
    clipped = tf.clip_by_value(found, lower, upper)
    bucket = tf.floor((clipped - lower) / quantum + 0.5)
    return bucket * quantum + lower
