"""Counts the ids that SparseCores exchange in one step.

This module requires NumPy, but not TensorFlow. The counts are the numbers that
TensorFlow's op `SortListOfSparseCoreCooTensors` compares with the limits of a
`SparseCoreEmbeddingConfig`, and the buffer size that
`ConvertToSparseCoreCsrWrappedCooTensor` requires.

A TPU chip has several SparseCores, and a replica runs on one chip. The samples
of a replica are split into one block per SparseCore of the chip. Each
SparseCore sends the ids of its block to the SparseCores that own the rows: row
`id` of a table is owned by SparseCore `(id + rotation) % num_cores`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# The buffers of a SparseCore have a multiple of this number of ids for each
# SparseCore that receives ids.
PADDING = 8


@dataclasses.dataclass(frozen=True)
class FeatureIds:
    """Ids of one feature in one batch.

    Attributes:
      table: Index of the table in its stack.
      ids: `[num_ids]` integers.
      samples: Index of the sample of each id, `[num_ids]`.
      num_samples: Number of samples, a multiple of the number of blocks.
    """

    table: int
    ids: np.ndarray
    samples: np.ndarray
    num_samples: int


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Numbers that one stack of tables requires for one batch.

    Attributes:
      max_ids: Maximum number of ids that a SparseCore sends to a SparseCore. An
        id that occurs several times in a sample counts once.
      max_unique_ids: Maximum number of different ids that a SparseCore sends to
        a SparseCore.
      ids_per_chip_per_sample: Ids in the buffers of a chip, including padding,
        per sample of a replica. A chip with this value of
        `max_ids_per_chip_per_sample` has sufficient buffers.
    """

    max_ids: int
    max_unique_ids: int
    ids_per_chip_per_sample: int


def count_step(
    features: Sequence[FeatureIds],
    rotations: Sequence[int],
    *,
    num_cores: int,
    cores_per_chip: int,
    num_replicas: int,
) -> StepCounts:
    """Counts the ids of all features of one stack in one batch.

    >>> ids = np.array([0, 4, 4, 4])
    >>> feature = FeatureIds(0, ids, np.array([0, 0, 0, 1]), 2)
    >>> count_step(
    ...     [feature], [0], num_cores=4, cores_per_chip=1, num_replicas=1
    ... )
    StepCounts(max_ids=3, max_unique_ids=2, ids_per_chip_per_sample=4)

    Args:
      features: The features of all tables of the stack.
      rotations: Rotation of each table of the stack.
      num_cores: Number of SparseCores of all chips.
      cores_per_chip: Number of SparseCores of each chip.
      num_replicas: Number of replicas whose samples the batch contains.
    """
    num_blocks = num_replicas * cores_per_chip
    num_ids = np.zeros([num_blocks * num_cores], np.int64)
    num_unique = np.zeros([num_blocks * num_cores], np.int64)
    for table, rotation in enumerate(rotations):
        of_table = [value for value in features if value.table == table]
        if not of_table:
            continue
        ids = np.concatenate([value.ids for value in of_table]).astype(np.int64)
        blocks = np.concatenate(
            [
                value.samples // (value.num_samples // num_blocks)
                for value in of_table
            ]
        )
        # Samples of different features are different.
        offsets = np.cumsum([0, *(value.num_samples for value in of_table)])
        samples = np.concatenate(
            [value.samples + start for value, start in zip(of_table, offsets)]
        )
        order = np.lexsort([samples, ids, blocks])
        ids, blocks, samples = ids[order], blocks[order], samples[order]
        is_new_id = np.ones([len(ids)], bool)
        is_new_id[1:] = (ids[1:] != ids[:-1]) | (blocks[1:] != blocks[:-1])
        is_new_pair = is_new_id.copy()
        is_new_pair[1:] |= samples[1:] != samples[:-1]
        places = blocks * num_cores + (ids + rotation) % num_cores
        size = len(num_ids)
        num_ids += np.bincount(places[is_new_pair], minlength=size)
        num_unique += np.bincount(places[is_new_id], minlength=size)
    padded = -(-num_ids // PADDING) * PADDING
    per_chip = int(padded.reshape([num_replicas, -1]).sum(axis=1).max())
    samples_per_replica = sum(value.num_samples for value in features)
    samples_per_replica //= num_replicas
    return StepCounts(
        int(num_ids.max()),
        int(num_unique.max()),
        _per_sample(per_chip, samples_per_replica),
    )


def _per_sample(num_ids: int, num_samples: int) -> int:
    """Returns the smallest valid value of `max_ids_per_chip_per_sample`.

    >>> _per_sample(24, 12), _per_sample(32, 12)
    (2, 4)
    """
    per_sample = max(1, -(-num_ids // num_samples))
    # The size of the buffer must be a multiple of `PADDING`.
    divisor = PADDING // math.gcd(PADDING, num_samples)
    return -(-per_sample // divisor) * divisor


def limit_of(values: Sequence[int], confidence: float) -> int:
    """Returns the lowest limit that a share of the batches does not exceed.

    >>> limit_of([4, 9, 5, 5], 0.75), limit_of([4, 9, 5, 5], 1)
    (5, 9)

    Args:
      values: Required value of each batch; at least one.
      confidence: Share of the batches, in (0, 1].

    Returns:
      One of `values`, or 1 if it is 0, because a limit must be positive.
    """
    # The product can exceed an integer by a rounding error.
    rank = math.ceil(confidence * len(values) - 1e-9)
    return max(1, sorted(values)[max(rank, 1) - 1])


def overflow_curve(values: Sequence[int]) -> list[tuple[int, float]]:
    """Returns points (limit, share of the batches that exceed the limit).

    >>> overflow_curve([4, 9, 5, 5])
    [(4, 0.75), (5, 0.25), (9, 0.0)]
    """
    limits, counts = np.unique(np.maximum(values, 1), return_counts=True)
    above = len(values) - np.cumsum(counts)
    return [
        (int(limit), int(count) / len(values))
        for limit, count in zip(limits, above)
    ]
