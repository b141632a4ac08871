"""Buckets and segments, which determine the positions of keys in a table.

This module contains only arithmetic. The functions compute the same numbers as
cc/core/keys/bucket_layout.h, which explains the design.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_layoutmap import partition
from tf_layoutmap._core import checks

KEYS_PER_BUCKET = 8
MAX_SEGMENTS = 64
MAX_PROBES = 4
# Value that marks a place without a key.
EMPTY_KEY = -(2**63)
# Minimum number of cells per segment in each row of the admission sketch.
_LEAST_CELLS = 256


def num_buckets_for(capacity: int) -> int:
    """Returns the number of buckets of a vocabulary with this capacity.

    >>> num_buckets_for(1), num_buckets_for(100), num_buckets_for(2_000_000)
    (1, 14, 250048)

    Args:
      capacity: Number of keys, in [1, 2^32 - 4096].

    Raises:
      TypeError: If `capacity` is not an integer.
      ValueError: If `capacity` is out of range.
    """
    checks.check_int("capacity", capacity, lowest=1, highest=2**32 - 4096)
    needed = -(-capacity // KEYS_PER_BUCKET)
    segments = num_segments(needed)
    return -(-needed // segments) * segments


def buckets_of(
    keys: np.ndarray[Any, Any], num_buckets: int
) -> np.ndarray[Any, Any]:
    """Returns the bucket at which the search for each key begins.

    All possible places of a key are in the segment of this bucket.

    >>> buckets_of(np.array([5, 6]), 8).tolist()
    [5, 6]

    Args:
      keys: int64 keys.
      num_buckets: Number of buckets of the vocabulary.
    """
    bits = keys.view(np.uint64)
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9),
        (27, 0x94D049BB133111EB),
    ):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits = bits ^ (bits >> np.uint64(31))
    scaled = (bits >> np.uint64(32)) * np.uint64(num_buckets)
    return (scaled >> np.uint64(32)).astype(np.int64)


def num_segments(num_buckets: int) -> int:
    """Returns the number of segments into which the buckets are grouped."""
    segments = 1
    while segments < MAX_SEGMENTS and 2 * segments * MAX_PROBES <= num_buckets:
        segments *= 2
    return segments


def sketch_shape(num_buckets: int) -> tuple[int, int, int]:
    """Returns the shape of the admission sketch."""
    segments = num_segments(num_buckets)
    cells = 2 * KEYS_PER_BUCKET * (num_buckets // segments)
    return segments, 2, max(cells, _LEAST_CELLS)


def bucket_partition(
    num_buckets: int,
    num_shards: int,
) -> partition.RowPartition:
    """Returns the partition of the buckets into shards of similar sizes."""
    return partition.RowPartition.div(num_buckets, num_shards)


def segment_partition(
    num_buckets: int,
    num_shards: int,
) -> partition.RowPartition:
    """Returns the partition of the buckets into shards of complete segments.

    With this partition, all possible positions of a key are in one shard, for
    example on one parameter server.

    >>> segment_partition(32, 3).sizes
    (12, 12, 8)

    Args:
      num_buckets: Number of buckets of the vocabulary.
      num_shards: Number of shards, at most `num_segments(num_buckets)`.
    """
    segments = num_segments(num_buckets)
    return partition.RowPartition.from_sizes(
        [
            size * (num_buckets // segments)
            for size in partition.RowPartition.div(segments, num_shards).sizes
        ]
    )


def partition_over_processes(
    num_buckets: int, num_processes: int
) -> partition.RowPartition:
    """Returns the partition of the buckets of a sharded vocabulary.

    If there are more processes than segments, only the first processes have
    buckets.

    >>> partition_over_processes(32, 3).sizes
    (12, 12, 8)

    Args:
      num_buckets: Number of buckets of the vocabulary.
      num_processes: Number of processes.
    """
    return segment_partition(
        num_buckets, min(num_processes, num_segments(num_buckets))
    )


def row_partition(buckets: partition.RowPartition) -> partition.RowPartition:
    """Returns the partition of the table's rows into shards.

    Each shard has the rows of its buckets. The last shard has one more row,
    which all unknown keys share.

    Args:
      buckets: The partition of the buckets.
    """
    sizes = [KEYS_PER_BUCKET * size for size in buckets.sizes]
    sizes[-1] += 1
    return partition.RowPartition.from_sizes(sizes)
