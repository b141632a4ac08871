"""Looks up keys with TensorFlow's own operations, for exported graphs.

The results are the same as for the op `FindKeys` (cc/core/keys/find_keys.h).
The keys are stored in a variable. An exported model therefore contains no
lookup table, which a program would have to initialize.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.sharded.routing import checks, routing
from tf_layoutmap.vocabulary import bucket_layout


def find_rows(
    stored: Any,
    num_buckets: int,
    keys: tf.Tensor,
) -> tf.Tensor:
    """Returns the row of each key, and `8 * num_buckets` for unknown keys.

    Args:
      stored: The vocabulary's keys, `[num_buckets, 8]` int64: a `tf.Variable`,
        a tensor or a `ShardedVariable`.
      num_buckets: Number of buckets.
      keys: Keys to look up, `[num_keys]` int64.

    Returns:
      `[num_keys]` int64.
    """
    first = _bucket_of(keys, num_buckets)
    segment = num_buckets // bucket_layout.num_segments(num_buckets)
    num_probes = min(bucket_layout.MAX_PROBES, segment)
    if num_probes == 1 or checks.in_vectorized_map() or checks.in_xla():
        # The shapes must not depend on the keys, because `tf.vectorized_map`
        # stacks the tensors of its iterations, and XLA compiles for shapes.
        buckets = _buckets_after(first, segment, range(num_probes))
        row = _row_in(stored, buckets, num_probes, keys)
    else:
        # Most keys are in the first bucket that is searched. This bucket is
        # therefore searched separately, because a gather of all four buckets
        # would read 256 bytes per key.
        row = _row_in(stored, first[:, tf.newaxis], 1, keys)
        left = tf.where(row < 0)
        others = _buckets_after(
            tf.gather_nd(first, left), segment, range(1, num_probes)
        )
        row = tf.tensor_scatter_nd_update(
            row,
            left,
            _row_in(stored, others, num_probes - 1, tf.gather_nd(keys, left)),
        )
    # The value that marks empty places is not a valid key.
    is_known = (row >= 0) & (keys != bucket_layout.EMPTY_KEY)
    return tf.where(
        is_known,
        row,
        tf.constant(num_buckets * bucket_layout.KEYS_PER_BUCKET, tf.int64),
    )


def _buckets_after(
    buckets: tf.Tensor, segment: int, distances: range
) -> tf.Tensor:
    """Returns the buckets at some distances behind other buckets.

    After the last bucket of a segment, the first bucket of the segment follows.

    Args:
      buckets: `[num_keys]` int64.
      segment: Number of buckets of a segment.
      distances: The distances.

    Returns:
      `[num_keys, len(distances)]` int64.
    """
    start = buckets // segment * segment
    inside = (buckets - start)[:, tf.newaxis] + tf.constant(
        list(distances), tf.int64
    )
    return start[:, tf.newaxis] + tf.math.floormod(inside, segment)


def _row_in(
    stored: Any,
    buckets: tf.Tensor,
    num_buckets: int,
    keys: tf.Tensor,
) -> tf.Tensor:
    """Returns the row of each key, or -1 if the key is not in its buckets.

    Args:
      stored: Same as for `find_rows`.
      buckets: Buckets to search, `[num_keys, num_buckets]`.
      num_buckets: Number of buckets per key.
      keys: Keys to look up, `[num_keys]` int64.
    """
    per_bucket = bucket_layout.KEYS_PER_BUCKET
    num_lanes = num_buckets * per_bucket
    is_key = tf.reshape(
        _gather(stored, buckets) == keys[:, tf.newaxis, tf.newaxis],
        [-1, num_lanes],
    )
    # At most one position matches a key. The product is therefore the index of
    # this position plus 1, or 0 if no position matches. The product is exact,
    # and is faster than `argmax`.
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
        # The value that marks empty places matches several positions, so
        # `place` may be out of range.
        inside = tf.clip_by_value(place, 0, num_lanes - 1)
        bucket = tf.gather(buckets, inside // per_bucket, batch_dims=1)
    return tf.where(
        place >= 0,
        bucket * per_bucket + tf.math.floormod(place, per_bucket),
        place,
    )


def _gather(stored: Any, buckets: tf.Tensor) -> tf.Tensor:
    """Returns the keys of valid buckets, in the shape `[..., 8]`."""
    if not hasattr(stored, "_shards"):
        return tf.gather(stored, buckets)
    # A `ShardedVariable` would check the buckets, which XLA does not support
    # for tables of integers.
    return routing.gather_checked(stored._shards(), buckets)


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
