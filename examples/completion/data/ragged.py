"""Ragged arrays: rows of different lengths as flat values and offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """A ragged array. Row `r` is `values[splits[r]:splits[r + 1]]`.

    >>> table = Ragged.from_lists([[7], [], [8, 9]])
    >>> table.take(np.array([2, 0, 2])).to_lists()
    [[8, 9], [7], [8, 9]]
    """

    values: np.ndarray  # [num_values] int32
    splits: np.ndarray  # [num_rows + 1] int64

    @classmethod
    def from_lists(cls, rows: Iterable[Sequence[int]]) -> Ragged:
        """Returns a ragged array with the given rows."""
        rows = list(rows)
        lengths = np.array([len(row) for row in rows], np.int64)
        values = [value for row in rows for value in row]
        return cls(np.array(values, np.int32), splits_of(lengths))

    @classmethod
    def from_mask(cls, values: np.ndarray, mask: np.ndarray) -> Ragged:
        """Returns the values of each row of a matrix where the mask is True."""
        return cls(
            values[mask].astype(np.int32),
            splits_of(mask.sum(axis=1, dtype=np.int64)),
        )

    def take(self, rows: np.ndarray) -> Ragged:
        """Returns the given rows, in the given order."""
        starts = self.splits[rows]
        lengths = self.splits[rows + 1] - starts
        splits = splits_of(lengths)
        # All values of a row move by the same number of positions.
        shift = np.repeat(starts - splits[:-1], lengths)
        return Ragged(self.values[np.arange(splits[-1]) + shift], splits)

    def join(self, other: Ragged) -> Ragged:
        """Returns each row concatenated with the same row of `other`."""
        left, right = np.diff(self.splits), np.diff(other.splits)
        splits = splits_of(left + right)
        values = np.empty(splits[-1], np.int32)
        from_left = np.repeat(
            np.tile([True, False], len(left)),
            np.stack([left, right], axis=1).ravel(),
        )
        values[from_left] = self.values
        values[~from_left] = other.values
        return Ragged(values, splits)

    def to_lists(self) -> list[list[int]]:
        """Returns the rows as nested lists."""
        return [
            part.tolist() for part in np.split(self.values, self.splits[1:-1])
        ]


def splits_of(lengths: np.ndarray) -> np.ndarray:
    """Returns the offsets of rows of the given lengths.

    >>> splits_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
