"""Where keys may be in a table: arithmetic of buckets and segments.

Pure. The same as cc/core/keys/bucket_layout.h, which says why.
"""

from __future__ import annotations

from tf_layoutmap import partition
from tf_layoutmap._core import checks

KEYS_PER_BUCKET = 8
MAX_SEGMENTS = 64
MAX_PROBES = 4
# Marks a place without a key.
EMPTY_KEY = -(2**63)
# Of each row of the admission's sketch, in one segment.
_LEAST_CELLS = 256


def num_buckets_for(capacity: int) -> int:
    """Returns how many buckets a vocabulary of so many keys has.

    >>> num_buckets_for(1), num_buckets_for(100), num_buckets_for(2_000_000)
    (1, 14, 250048)

    Args:
      capacity: Keys that it shall hold, in [1, 2^32].

    Raises:
      TypeError: If it is not an integer.
      ValueError: If it is outside of that.
    """
    checks.check_int("capacity", capacity, lowest=1, highest=2**32 - 4096)
    needed = -(-capacity // KEYS_PER_BUCKET)
    segments = num_segments(needed)
    return -(-needed // segments) * segments


def num_segments(num_buckets: int) -> int:
    """Returns into how many segments buckets are divided."""
    segments = 1
    while segments < MAX_SEGMENTS and 2 * segments * MAX_PROBES <= num_buckets:
        segments *= 2
    return segments


def sketch_shape(num_buckets: int) -> tuple[int, int, int]:
    """Returns the shape of the counts of keys that have no row."""
    segments = num_segments(num_buckets)
    cells = 2 * KEYS_PER_BUCKET * (num_buckets // segments)
    return segments, 2, max(cells, _LEAST_CELLS)


def bucket_partition(
    num_buckets: int,
    num_shards: int,
) -> partition.RowPartition:
    """Returns which shard has which buckets: whole ones, as even as can be."""
    return partition.RowPartition.div(num_buckets, num_shards)


def segment_partition(
    num_buckets: int,
    num_shards: int,
) -> partition.RowPartition:
    """Returns which shard has which buckets where no segment is divided.

    So all places that a key may have are in one shard, which can be a server's.

    >>> segment_partition(32, 3).sizes
    (12, 12, 8)

    Args:
      num_buckets: Of the vocabulary.
      num_shards: At most `num_segments(num_buckets)`.
    """
    segments = num_segments(num_buckets)
    return partition.RowPartition.from_sizes(
        [
            size * (num_buckets // segments)
            for size in partition.RowPartition.div(segments, num_shards).sizes
        ]
    )


def row_partition(buckets: partition.RowPartition) -> partition.RowPartition:
    """Returns which shard has which rows of the table.

    They are those of its buckets. The last shard has one more: the row of
    keys that have none of their own.

    Args:
      buckets: Which shard has which buckets.
    """
    sizes = [KEYS_PER_BUCKET * size for size in buckets.sizes]
    sizes[-1] += 1
    return partition.RowPartition.from_sizes(sizes)
