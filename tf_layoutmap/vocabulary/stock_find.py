"""The rows of keys by TensorFlow's own operations, for graphs that leave us.

The same as `FindKeys` (cc/core/keys/find_keys.h): the key tensor is a plain
variable, so an exported model needs no lookup table and no initialization.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.vocabulary import bucket_layout


def find_rows(
    stored: Any, num_buckets: int, keys: tf.Tensor,
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
    segment = num_buckets // bucket_layout.num_segments(num_buckets)
    num_probes = min(bucket_layout.MAX_PROBES, segment)
    first = _bucket_of(keys, num_buckets)
    start = first // segment * segment
    # Buckets that wrap around in their segment: [num_keys, num_probes].
    probes = start[:, tf.newaxis] + (
        (first - start)[:, tf.newaxis]
        + tf.range(num_probes, dtype=tf.int64)) % segment
    found = tf.gather(stored, probes)
    is_key = tf.reshape(
        found == keys[:, tf.newaxis, tf.newaxis],
        [-1, num_probes * bucket_layout.KEYS_PER_BUCKET])
    # The mark of an empty place is no key.
    is_known = tf.reduce_any(is_key, 1) & (keys != bucket_layout.EMPTY_KEY)
    place = tf.argmax(tf.cast(is_key, tf.int8), 1)
    per_bucket = bucket_layout.KEYS_PER_BUCKET
    bucket = tf.gather(probes, place // per_bucket, batch_dims=1)
    return tf.where(
        is_known, bucket * per_bucket + tf.math.floormod(place, per_bucket),
        tf.constant(num_buckets * per_bucket, tf.int64))


def _bucket_of(keys: tf.Tensor, num_buckets: int) -> tf.Tensor:
    bits = tf.bitcast(keys, tf.uint64)
    bits = _shift_xor(bits, 30) * _uint64(0xBF58476D1CE4E5B9)
    bits = _shift_xor(bits, 27) * _uint64(0x94D049BB133111EB)
    bits = _shift_xor(bits, 31)
    high = tf.bitwise.right_shift(bits, _uint64(32))
    return tf.cast(tf.bitwise.right_shift(
        high * _uint64(num_buckets), _uint64(32)), tf.int64)


def _shift_xor(bits: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(
        bits, tf.bitwise.right_shift(bits, _uint64(by)))


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
