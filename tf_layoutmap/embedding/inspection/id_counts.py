"""Counts ids. Pure: numpy arrays in, numbers out."""

from __future__ import annotations

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
