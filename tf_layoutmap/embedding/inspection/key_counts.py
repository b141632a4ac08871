"""Counts keys, and proposes an open vocabulary for them. Pure: numpy.

A key is served by a lookup that finds a row which an earlier step has given to
it, as `share_known` of a vocabulary's `stats` counts it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

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


def describe(counts: KeyCounts, kept_share: float) -> dict[str, Any]:
    """Returns the proposal and the curves as plain values."""
    proposal = counts.propose(kept_share)
    return {
        "proposal": proposal and dataclasses.asdict(proposal),
        "served_by_rows": {
            one: curve for one in MIN_COUNTS if (curve := counts.curve(one))
        },
    }
