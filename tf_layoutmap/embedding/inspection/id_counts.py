"""Counts ids. Pure: numpy arrays in, numbers out."""

# DOC-MERGE: Counts keys, and proposes an open vocabulary for them. Pure: numpy.
#
# A key is served by a lookup that finds a row which an earlier step has given to
# it, as `share_known` of a vocabulary's `stats` counts it.
#
from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


class RowCounts:
    """How often each row of a table was looked up."""

    def __init__(self):
        """Starts with nothing seen."""
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
        """Rows that were looked up at least once."""
        return len(self._rows)

    @property
    def total(self) -> int:
        """All lookups."""
        return int(self._counts.sum())

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows that were looked up, ascending, and their lookups."""
        return self._rows, self._counts

    def descending(self) -> np.ndarray:
        """Lookups of each row, the hottest first."""
        return np.sort(self._counts)[::-1]

    def hottest(self, count: int) -> list[tuple[int, int]]:
        """The rows looked up most, with their lookups; ties by row."""
        order = np.lexsort([self._rows, -self._counts])[:count]
        return [(int(self._rows[i]), int(self._counts[i])) for i in order]

    def share_of_hottest(self, num_rows: int) -> float:
        """The part of all lookups that goes to the `num_rows` hottest rows.

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
    """What one feature's ids look like."""

    def __init__(self, num_rows: int | None, max_sequence_length: int):
        """Starts with nothing seen.

        Args:
          num_rows: Of the feature's table; None where any id is a key.
          max_sequence_length: 0 for a feature that is combined.
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
          sizes: `[num_samples]`, how many of the ids each sample has.
          positions: `[num_ids]`, where in its sample each id of a sequence
            stands; None for one after the other.
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
                one
                for one in (self.lowest_out_of_range, self.highest_out_of_range)
                if one is not None
            ]
            self.lowest_out_of_range = min([*known, int(outside.min())])
            self.highest_out_of_range = max([*known, int(outside.max())])
        rows, counts = np.unique(ids[inside], return_counts=True)
        self.rows.add(rows, counts)
        self._unique_in_batches += len(rows)
        self.samples_of_size.add(*np.unique(sizes, return_counts=True))
        if not len(sizes):
            return
        # Each batch is as wide as its longest sample, or as a sequence is.
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
        """The part of the positions of padded batches that hold no id."""
        if not self._num_places:
            return 0.0
        return 1 - self._num_filled / self._num_places

    @property
    def unique_ratio(self) -> float:
        """Distinct rows of a batch over its lookups, in all batches."""
        total = self.rows.total
        return self._unique_in_batches / total if total else 0.0


# How often a key must be seen before it gets a row: what is tried.
MIN_COUNTS = (1, 2, 3, 5, 8)
# Beyond this load a new key finds all of its places taken.
LOAD = 0.75


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Settings of an open vocabulary.

    Attributes:
      capacity: So that the keys which are admitted fill three quarters.
      min_count: How often a key must have been seen.
      num_keys: Keys that are admitted then.
      share_served: The part of all lookups that find a row.
      share_served_at_most: The same with a row for each key.
    """

    capacity: int
    min_count: int
    num_keys: int
    share_served: float
    share_served_at_most: float


class KeyCounts:
    """How often each key was looked up, and before it had a row."""

    def __init__(self):
        """Starts with nothing seen."""
        self._keys = np.zeros([0], np.int64)
        self._lookups = np.zeros([0], np.int64)
        # By key and by `MIN_COUNTS`: lookups until the end of the step that
        # gives it a row; -1 where none does.
        self._spent = np.zeros([0, len(MIN_COUNTS)], np.int64)

    def add(self, keys: np.ndarray) -> None:
        """Adds the keys of one step, `[num_keys]` int64."""
        found, counts = np.unique(keys, return_counts=True)
        places = np.searchsorted(self._keys, found)
        is_new = np.ones(len(found), bool)
        inside = places < len(self._keys)
        is_new[inside] = self._keys[places[inside]] != found[inside]
        new, at = found[is_new], places[is_new]
        self._keys = np.insert(self._keys, at, new)
        self._lookups = np.insert(self._lookups, at, 0)
        self._spent = np.insert(self._spent, at, -1, axis=0)
        places = np.searchsorted(self._keys, found)
        lookups = self._lookups[places] + counts
        self._lookups[places] = lookups
        spent = self._spent[places]
        admitted = (spent < 0) & (lookups[:, None] >= np.array(MIN_COUNTS))
        self._spent[places] = np.where(admitted, lookups[:, None], spent)

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys, ascending, and their lookups."""
        return self._keys, self._lookups

    def served(self, min_count: int) -> np.ndarray:
        """How many lookups of each admitted key find a row, most first.

        Args:
          min_count: One of `MIN_COUNTS`.
        """
        spent = self._spent[:, MIN_COUNTS.index(min_count)]
        served = (self._lookups - spent)[spent >= 0]
        return np.sort(served)[::-1]

    def share_served(self, min_count: int) -> float:
        """The part of all lookups that find a row, with a row for each key.

        >>> counts = KeyCounts()
        >>> for step in ([7, 7, 9], [7], [7, 8]):
        ...     counts.add(np.array(step))
        >>> counts.share_served(1), counts.share_served(3)
        (0.3333333333333333, 0.16666666666666666)
        """
        total = int(self._lookups.sum())
        return float(self.served(min_count).sum() / total) if total else 0.0

    def curve(self, min_count: int) -> list[tuple[int, float]]:
        """(rows, share of lookups served) for the keys that need rows most.

        At numbers of rows that a logarithmic axis can show.
        """
        served = self.served(min_count)
        if not len(served):
            return []
        shares = np.cumsum(served) / self._lookups.sum()
        rows = np.unique(np.geomspace(1, len(served), 100).astype(np.int64))
        return [(int(one), float(shares[one - 1])) for one in rows]

    def propose(self, kept_share: float) -> Proposal | None:
        """Returns settings; None if there are no keys.

        Args:
          kept_share: `min_count` is the largest of `MIN_COUNTS` that serves at
            least so much of what `min_count=1` does.
        """
        if not len(self._keys):
            return None
        most = self.share_served(1)
        min_count = max(
            one
            for one in MIN_COUNTS
            if one == 1
            or (
                len(self.served(one))
                and self.share_served(one) >= kept_share * most
            )
        )
        num_keys = len(self.served(min_count))
        return Proposal(
            math.ceil(num_keys / LOAD),
            min_count,
            num_keys,
            self.share_served(min_count),
            most,
        )


def describe_keys(counts: KeyCounts, kept_share: float) -> dict[str, Any]:
    """Returns the proposal and the curves as plain values."""
    proposal = counts.propose(kept_share)
    return {
        "proposal": proposal and dataclasses.asdict(proposal),
        "served_by_rows": {
            one: curve for one in MIN_COUNTS if (curve := counts.curve(one))
        },
    }
