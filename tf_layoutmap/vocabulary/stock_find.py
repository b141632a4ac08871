"""The rows of keys by TensorFlow's own operations, for graphs that leave us.

The same as `FindKeys` (cc/core/keys/find_keys.h): the key tensor is a plain
variable, so an exported model needs no lookup table and no initialization.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.vocabulary import bucket_layout


def find_rows(
    stored: Any,
    num_buckets: int,
    keys: tf.Tensor,
) -> tf.Tensor:
    """Returns the row of each key, and of an unknown one `8 * num_buckets`.

    Args:
      stored: The vocabulary's keys, `[num_buckets, 8]` int64: a `tf.Variable`,
        a tensor or a `ShardedVariable`.
      num_buckets: Their number.
      keys: `[num_keys]` int64.

    Returns:
      `[num_keys]` int64.
    """
    first = _bucket_of(keys, num_buckets)
    # Most keys are in the bucket where the search for them begins. All four
    # of each key would be a gather of 256 bytes a key.
    row = _row_in(stored, first[:, tf.newaxis], 1, keys)
    segment = num_buckets // bucket_layout.num_segments(num_buckets)
    num_probes = min(bucket_layout.MAX_PROBES, segment)
    if num_probes > 1:
        left = tf.where(row < 0)[:, 0]
        bucket = tf.gather(first, left)
        # Buckets that wrap around in their segment: [num_left, num_probes - 1].
        start = bucket // segment * segment
        others = (
            start[:, tf.newaxis]
            + (
                (bucket - start)[:, tf.newaxis]
                + tf.range(1, num_probes, dtype=tf.int64)
            )
            % segment
        )
        row = tf.tensor_scatter_nd_update(
            row,
            left[:, tf.newaxis],
            _row_in(stored, others, num_probes - 1, tf.gather(keys, left)),
        )
    # The mark of an empty place is no key.
    is_known = (row >= 0) & (keys != bucket_layout.EMPTY_KEY)
    return tf.where(
        is_known,
        row,
        tf.constant(num_buckets * bucket_layout.KEYS_PER_BUCKET, tf.int64),
    )


def _row_in(
    stored: Any,
    buckets: tf.Tensor,
    num_buckets: int,
    keys: tf.Tensor,
) -> tf.Tensor:
    """The row of each key in its `[num_keys, num_buckets]`; -1 for none."""
    per_bucket = bucket_layout.KEYS_PER_BUCKET
    num_lanes = num_buckets * per_bucket
    is_key = tf.reshape(
        tf.gather(stored, buckets) == keys[:, tf.newaxis, tf.newaxis],
        [-1, num_lanes],
    )
    # A key has one lane at most, so this is its number, and 0 if it has none:
    # exact, and faster than `argmax`.
    place = (
        tf.cast(
            tf.linalg.matvec(
                tf.cast(is_key, tf.float32),
                tf.range(1, num_lanes + 1, dtype=tf.float32),
            ),
            tf.int64,
        )
        - 1
    )
    if num_buckets == 1:
        bucket = buckets[:, 0]
    else:
        # Also of the mark of an empty place, which has several lanes.
        inside = tf.clip_by_value(place, 0, num_lanes - 1)
        bucket = tf.gather(buckets, inside // per_bucket, batch_dims=1)
    return tf.where(
        place >= 0,
        bucket * per_bucket + tf.math.floormod(place, per_bucket),
        place,
    )


def _bucket_of(keys: tf.Tensor, num_buckets: int) -> tf.Tensor:
    bits = tf.bitcast(keys, tf.uint64)
    bits = _shift_xor(bits, 30) * _uint64(0xBF58476D1CE4E5B9)
    bits = _shift_xor(bits, 27) * _uint64(0x94D049BB133111EB)
    bits = _shift_xor(bits, 31)
    high = tf.bitwise.right_shift(bits, _uint64(32))
    return tf.cast(
        tf.bitwise.right_shift(high * _uint64(num_buckets), _uint64(32)),
        tf.int64,
    )


def _shift_xor(bits: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(
        bits, tf.bitwise.right_shift(bits, _uint64(by))
    )


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
