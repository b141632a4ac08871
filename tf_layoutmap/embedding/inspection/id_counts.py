"""Counts ids and keys, and proposes settings of an open vocabulary.

This module requires NumPy, but not TensorFlow. A lookup of a key is called
served if an earlier step has assigned a row to the key. The number
`hit_rate` in the `stats` of a vocabulary uses the same definition.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


class RowCounts:
    """Number of lookups of each row of a table."""

    def __init__(self):
        """Creates a counter without lookups."""
        self._rows = np.zeros([0], np.int64)
        self._counts = np.zeros([0], np.int64)

    def add(self, rows: np.ndarray, counts: np.ndarray):
        """Adds `counts[i]` lookups of `rows[i]`."""
        all_rows, positions = np.unique(
            np.concatenate([self._rows, rows]), return_inverse=True
        )
        totals = np.zeros(len(all_rows), np.int64)
        np.add.at(totals, positions, np.concatenate([self._counts, counts]))
        self._rows, self._counts = all_rows, totals

    @property
    def num_distinct(self) -> int:
        """Number of rows that were looked up at least once."""
        return len(self._rows)

    @property
    def total(self) -> int:
        """Number of all lookups."""
        return int(self._counts.sum())

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct rows, ascending, and their lookup counts."""
        return self._rows, self._counts

    def descending(self) -> np.ndarray:
        """Returns the lookup counts of all rows, in descending order."""
        return np.sort(self._counts)[::-1]

    def hottest(self, count: int) -> list[tuple[int, int]]:
        """Returns the `count` rows with the most lookups, and their counts.

        Rows with equal counts are in ascending order.
        """
        order = np.lexsort([self._rows, -self._counts])[:count]
        return [(int(self._rows[i]), int(self._counts[i])) for i in order]

    def share_of_hottest(self, num_rows: int) -> float:
        """Returns the share of lookups that read the `num_rows` hottest rows.

        >>> counts = RowCounts()
        >>> counts.add(np.array([7, 9]), np.array([3, 1]))
        >>> counts.share_of_hottest(1)
        0.75
        """
        total = self.total
        if not total:
            return 0.0
        return float(self.descending()[:num_rows].sum() / total)


class FeatureCounts:
    """Statistics of the ids of one feature."""

    def __init__(self, num_rows: int | None, max_sequence_length: int):
        """Creates statistics without samples.

        Args:
          num_rows: Number of rows of the table, or None if the ids are keys.
          max_sequence_length: Number of positions of a sequence feature. The
            value is 0 for all other features, whose ids are combined.
        """
        self._num_rows = num_rows
        self._length = max_sequence_length
        self.rows = RowCounts()
        self.num_samples = 0
        self.num_ids = 0
        self.num_empty = 0
        self.num_truncated = 0
        self.num_out_of_range = 0
        self.lowest_out_of_range: int | None = None
        self.highest_out_of_range: int | None = None
        self._num_places = 0
        self._num_filled = 0
        self._unique_in_batches = 0
        self.samples_of_size = RowCounts()

    def add(
        self,
        ids: np.ndarray,
        sizes: np.ndarray,
        positions: np.ndarray | None = None,
    ):
        """Adds a batch.

        Args:
          ids: `[num_ids]` integers.
          sizes: Number of ids of each sample, `[num_samples]`.
          positions: Position of each id in its sequence, `[num_ids]`. None if
            the ids are at consecutive positions.
        """
        ids = ids.astype(np.int64)
        self.num_samples += len(sizes)
        self.num_ids += len(ids)
        self.num_empty += int((sizes == 0).sum())
        inside = (
            np.ones(len(ids), bool)
            if self._num_rows is None
            else (ids >= 0) & (ids < self._num_rows)
        )
        outside = ids[~inside]
        if len(outside):
            self.num_out_of_range += len(outside)
            known = [
                bound
                for bound in (
                    self.lowest_out_of_range,
                    self.highest_out_of_range,
                )
                if bound is not None
            ]
            self.lowest_out_of_range = min([*known, int(outside.min())])
            self.highest_out_of_range = max([*known, int(outside.max())])
        rows, counts = np.unique(ids[inside], return_counts=True)
        self.rows.add(rows, counts)
        self._unique_in_batches += len(rows)
        self.samples_of_size.add(*np.unique(sizes, return_counts=True))
        if not len(sizes):
            return
        # Width of the padded batch. A sequence feature is padded to
        # `max_sequence_length`. Other features are padded to the longest
        # sample.
        width = self._length or int(sizes.max())
        filled = int(
            (positions < width).sum()
            if self._length and positions is not None
            else np.minimum(sizes, width).sum()
        )
        self.num_truncated += len(ids) - filled
        self._num_filled += filled
        self._num_places += width * len(sizes)

    @property
    def padding_waste(self) -> float:
        """Share of empty positions in padded batches."""
        if not self._num_places:
            return 0.0
        return 1 - self._num_filled / self._num_places

    @property
    def unique_ratio(self) -> float:
        """Ratio of the distinct rows, summed over all batches, to the lookups.

        The ratio is 1 if no batch looks up a row twice.
        """
        total = self.rows.total
        return self._unique_in_batches / total if total else 0.0


# Values of `min_count` from which a proposal selects. A vocabulary admits a key
# when the key has this number of lookups.
MIN_COUNTS = (1, 2, 3, 5, 8)
# Load factor of a proposed vocabulary. With a higher load factor, all slots
# that are possible for a new key can be occupied.
LOAD = 0.75


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Proposed settings of an open vocabulary.

    Attributes:
      capacity: Capacity of the vocabulary. The admitted keys fill three
        quarters of the capacity.
      min_count: Number of lookups after which a key is admitted.
      num_keys: Number of admitted keys.
      hit_rate: Share of all lookups that are served.
      max_hit_rate: Value of `hit_rate` if all keys were admitted.
    """

    capacity: int
    min_count: int
    num_keys: int
    hit_rate: float
    max_hit_rate: float


class KeyCounts:
    """Number of lookups of each key, in total and before its admission."""

    def __init__(self):
        """Creates a counter without lookups."""
        self._keys = np.zeros([0], np.int64)
        self._lookups = np.zeros([0], np.int64)
        # For each key and each value in `MIN_COUNTS`: the number of lookups of
        # the key until the end of the step that admits the key. The number is
        # -1 if the key is not admitted.
        self._unserved = np.zeros([0, len(MIN_COUNTS)], np.int64)

    def add(self, keys: np.ndarray) -> None:
        """Adds the keys of one step. `keys` is `[num_keys]` int64."""
        unique_keys, counts = np.unique(keys, return_counts=True)
        places = np.searchsorted(self._keys, unique_keys)
        is_new = np.ones(len(unique_keys), bool)
        inside = places < len(self._keys)
        is_new[inside] = self._keys[places[inside]] != unique_keys[inside]
        new, at = unique_keys[is_new], places[is_new]
        self._keys = np.insert(self._keys, at, new)
        self._lookups = np.insert(self._lookups, at, 0)
        self._unserved = np.insert(self._unserved, at, -1, axis=0)
        places = np.searchsorted(self._keys, unique_keys)
        lookups = self._lookups[places] + counts
        self._lookups[places] = lookups
        unserved = self._unserved[places]
        admitted = (unserved < 0) & (lookups[:, None] >= np.array(MIN_COUNTS))
        self._unserved[places] = np.where(admitted, lookups[:, None], unserved)

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys in ascending order, and their lookup counts."""
        return self._keys, self._lookups

    def served(self, min_count: int) -> np.ndarray:
        """Returns the number of served lookups per key, in descending order.

        Args:
          min_count: One of `MIN_COUNTS`.
        """
        unserved = self._unserved[:, MIN_COUNTS.index(min_count)]
        served = (self._lookups - unserved)[unserved >= 0]
        return np.sort(served)[::-1]

    def hit_rate(self, min_count: int) -> float:
        """Returns the share of served lookups if no admitted key is evicted.

        >>> counts = KeyCounts()
        >>> for step in ([7, 7, 9], [7], [7, 8]):
        ...     counts.add(np.array(step))
        >>> counts.hit_rate(1), counts.hit_rate(3)
        (0.3333333333333333, 0.16666666666666666)
        """
        total = int(self._lookups.sum())
        return float(self.served(min_count).sum() / total) if total else 0.0

    def curve(self, min_count: int) -> list[tuple[int, float]]:
        """Returns points `(number of rows, share of served lookups)`.

        At each point, the rows are assigned to the keys with the most served
        lookups. The points are evenly spaced on a logarithmic axis.
        """
        served = self.served(min_count)
        if not len(served):
            return []
        shares = np.cumsum(served) / self._lookups.sum()
        rows = np.unique(np.geomspace(1, len(served), 100).astype(np.int64))
        return [
            (int(num_rows), float(shares[num_rows - 1])) for num_rows in rows
        ]

    def propose(self, relative_hit_rate: float) -> Proposal | None:
        """Returns the proposed settings, or None if there are no keys.

        Args:
          relative_hit_rate: Number in [0, 1]. The proposed `min_count` is the
            largest value in `MIN_COUNTS` whose hit rate is at least
            `relative_hit_rate` times the hit rate with `min_count=1`.
        """
        if not len(self._keys):
            return None
        most = self.hit_rate(1)
        min_count = max(
            count
            for count in MIN_COUNTS
            if count == 1
            or (
                len(self.served(count))
                and self.hit_rate(count) >= relative_hit_rate * most
            )
        )
        num_keys = len(self.served(min_count))
        return Proposal(
            math.ceil(num_keys / LOAD),
            min_count,
            num_keys,
            self.hit_rate(min_count),
            most,
        )


def describe_keys(
    counts: KeyCounts, relative_hit_rate: float
) -> dict[str, Any]:
    """Returns the proposal and the curves as values for JSON."""
    proposal = counts.propose(relative_hit_rate)
    return {
        "proposal": proposal and dataclasses.asdict(proposal),
        "hit_rate_by_rows": {
            min_count: curve
            for min_count in MIN_COUNTS
            if (curve := counts.curve(min_count))
        },
    }
