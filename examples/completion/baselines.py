"""Two honest baselines: they see the same positions, and only count."""

from __future__ import annotations

import numpy as np

from completion.data.vocabulary import UNKNOWN, ItemVocabulary


def frequency_ranks(targets: np.ndarray) -> np.ndarray:
    """Ranks each target when the most frequent items are always offered.

    Rows stand in the order of their frequency, so the row is the rank.

    Returns:
      `[num_targets]` int64, 1 for the first offer, 0 for a target that is
      not in the vocabulary.
    """
    return targets.astype(np.int64)


class BigramCounts:
    """Offers what followed the previous item in training, most often first.

    Items that never followed it come after, the most frequent first; so
    does everything when there is no previous item.
    """

    def __init__(
        self,
        previous: np.ndarray,
        targets: np.ndarray,
        vocabulary: ItemVocabulary,
    ) -> None:
        """Counts.

        Args:
          previous: `[num_positions]` row before; `UNKNOWN` is one of them.
          targets: `[num_positions]` row that followed.
          vocabulary: Of both.
        """
        known = targets != UNKNOWN
        pairs = (
            previous[known].astype(np.int64) * vocabulary.num_rows
            + targets[known]
        )
        pairs, counts = np.unique(pairs, return_counts=True)
        before, after = np.divmod(pairs, vocabulary.num_rows)
        order = np.lexsort((after, -counts, before))
        self._after = after[order]
        self._splits = np.searchsorted(
            before[order], np.arange(vocabulary.num_rows + 1)
        )

    def followers(self, previous: int) -> np.ndarray:
        """Returns the rows seen after `previous`, most often first."""
        return self._after[self._splits[previous] : self._splits[previous + 1]]

    def ranks(self, previous: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Ranks each target, as `frequency_ranks` does."""
        ranks = np.zeros(len(targets), np.int64)
        for row in np.unique(previous):
            asked = np.flatnonzero((previous == row) & (targets != UNKNOWN))
            followers = self.followers(row)
            place = {
                after: rank
                for rank, after in enumerate(followers.tolist(), start=1)
            }
            # A more frequent item that is a follower was offered already, and
            # all followers stand before the first that is none.
            ascending = np.sort(followers)
            for index in asked:
                target = int(targets[index])
                more_frequent = np.searchsorted(ascending, target)
                ranks[index] = place.get(
                    target, len(followers) + target - more_frequent
                )
        return ranks


def recall_and_mrr(ranks: np.ndarray, at: int = 10) -> tuple[float, float]:
    """Returns the share of ranks up to `at` and the mean of 1 / rank.

    A rank of 0 is a miss and counts 0 in both.

    >>> recall_and_mrr(np.array([1, 4, 20, 0]))
    (0.5, 0.325)
    """
    if not len(ranks):
        raise ValueError("Argument `ranks` must not be empty.")
    found = ranks > 0
    hits = (found & (ranks <= at)).sum() / len(ranks)
    inverse = (1.0 / ranks[found]).sum() / len(ranks)
    return float(hits), float(inverse)
