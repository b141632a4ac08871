"""Lays samples out over the positions of an activation's shape.

What the engine takes has one dimension of samples. An activation of shape
`[B, D, dim]` has `B * D` of them, its positions, in row-major order.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import build_shapes, feature_inputs


def fill(
    feature: config.FeatureSpec,
    found: feature_inputs.FeatureIds,
    shape: tuple[int | None, ...],
) -> feature_inputs.FeatureIds:
    """Lays ragged samples out over a shape.

    As TensorFlow has it: as many samples as the shape has positions fill them,
    in order; fewer samples are sequences, cut or filled to the positions that
    there are for each.

    Args:
      feature: Whose input it is.
      found: A ragged input. It is changed.
      shape: The activation's shape without `dim`.

    Returns:
      `found`, with the samples of the shape.

    Raises:
      ValueError: If sizes are unknown, the samples do not divide the positions,
        or sequences have weights.
    """
    given = found.static_num_samples
    if not build_shapes.is_known(shape) or given is None:
        raise ValueError(
            f"Ragged input {feature.name!r} with an output_shape of several "
            "dimensions must have sizes that are known while tracing. "
            f"Received: output_shape={shape}, {given} samples."
        )
    positions = math.prod(shape)
    found.inner_shape = tuple(shape[1:])
    if given == positions:
        return found
    if given < 1 or positions % given:
        raise ValueError(
            f"Ragged input {feature.name!r} must have a number of samples that "
            f"divides the {positions} positions of output_shape={shape}. "
            f"Received: {given} samples."
        )
    if found.weights.shape[0] != 0:
        raise ValueError(
            f"Weight specified for feature {feature.name!r}, whose samples are "
            f"sequences of output_shape={shape}: no combiner would use it; "
            "pass None."
        )
    _cut(feature, found, positions // given)
    found.num_samples = positions
    return found


def fill_sequences(
    feature: config.FeatureSpec,
    found: feature_inputs.FeatureIds,
    length: int,
) -> feature_inputs.FeatureIds:
    """Makes `length` samples of each, one for each position.

    Args:
      feature: Whose input it is.
      found: An input of rank 2 without weights, of any form. It is changed.
      length: Positions that are kept; the others are dropped.

    Returns:
      `found` with `length` times as many samples, each of one id at most.
    """
    num_samples = found.num_samples
    _cut(feature, found, length)
    found.num_samples = num_samples * length
    found.inner_shape = (length,)
    return found


def _cut(feature, found: feature_inputs.FeatureIds, length: int):
    """Ids and splits of at most `length` positions for each sample."""
    samples, positions, checks = _samples_and_positions(feature, found)
    # Checked here, because the engine sees the new samples only.
    with tf.control_dependencies([one for one in checks if one is not None]):
        kept = tf.where(positions < length)[:, 0]
    output = tf.gather(samples, kept) * length + tf.gather(positions, kept)
    found.ids = tf.gather(found.ids, kept)
    found.splits = tf.stack([output, tf.zeros_like(output)], axis=1)


def _samples_and_positions(feature, found):
    """Of each id, both `[num_ids]` int64, and what must hold of them."""
    num_samples = tf.cast(found.num_samples, tf.int64)
    num_ids = tf.size(found.ids, tf.int64)
    if found.splits.shape.rank == 2:
        samples, positions = tf.unstack(found.splits, 2, axis=1)
        message = (
            f"Feature {feature.name!r}: the indices of a sparse input must be "
            "inside its shape, and ascend; see tf.sparse.reorder."
        )
        ascends = (samples[1:] > samples[:-1]) | (
            (samples[1:] == samples[:-1]) & (positions[1:] > positions[:-1])
        )
        inside = (samples >= 0) & (samples < num_samples) & (positions >= 0)
        return (
            samples,
            positions,
            [
                tf.debugging.Assert(tf.reduce_all(ascends), [message]),
                tf.debugging.Assert(tf.reduce_all(inside), [message]),
            ],
        )
    numbers = tf.range(num_ids)
    if found.splits.shape[0] == 0:
        per_sample = tf.math.floordiv(num_ids, tf.maximum(num_samples, 1))
        return (
            tf.repeat(tf.range(num_samples), per_sample),
            numbers % tf.maximum(per_sample, 1),
            [],
        )
    samples = tf.repeat(
        tf.range(num_samples), found.splits[1:] - found.splits[:-1]
    )
    check = tf.debugging.assert_equal(
        tf.stack([found.splits[0], tf.size(samples, tf.int64)]),
        tf.stack([tf.constant(0, tf.int64), num_ids]),
        f"Feature {feature.name!r}: row_splits must start with 0 and end with "
        "the number of ids.",
    )
    return samples, numbers - tf.gather(found.splits, samples), [check]
