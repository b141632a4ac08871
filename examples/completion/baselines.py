"""Two baselines that count items and use the same positions as the model."""

from __future__ import annotations

import numpy as np

from completion.data.vocabulary import UNKNOWN, ItemVocabulary


def frequency_ranks(targets: np.ndarray) -> np.ndarray:
    """Returns the rank of each target when items are sorted by frequency.

    Rows are sorted by frequency, so the row of an item is its rank.

    Returns:
      `[num_targets]` int64: 1 for the most frequent item, 0 for a target that
      is not in the vocabulary.
    """
    return targets.astype(np.int64)


class BigramCounts:
    """A bigram model, which predicts the most frequent followers of an item.

    All other items are ranked after the followers, sorted by frequency. If
    there is no previous item, all items are sorted by frequency.
    """

    def __init__(
        self,
        previous: np.ndarray,
        targets: np.ndarray,
        vocabulary: ItemVocabulary,
    ) -> None:
        """Counts the pairs of consecutive items.

        Args:
          previous: `[num_positions]` rows of the previous items, which may be
            `UNKNOWN`.
          targets: `[num_positions]` rows of the items that follow.
          vocabulary: Vocabulary of the previous items and the targets.
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
        """Returns the rows that follow `previous`, most frequent first."""
        return self._after[self._splits[previous] : self._splits[previous + 1]]

    def ranks(self, previous: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Returns the rank of each target, like `frequency_ranks`."""
        ranks = np.zeros(len(targets), np.int64)
        for row in np.unique(previous):
            asked = np.flatnonzero((previous == row) & (targets != UNKNOWN))
            followers = self.followers(row)
            place = {
                after: rank
                for rank, after in enumerate(followers.tolist(), start=1)
            }
            # All followers rank before all other items. Followers that are more
            # frequent than the target are therefore not counted a second time.
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

    A rank of 0 is a miss and contributes 0 to both.

    >>> recall_and_mrr(np.array([1, 4, 20, 0]))
    (0.5, 0.325)
    """
    if not len(ranks):
        raise ValueError("Argument `ranks` must not be empty.")
    found = ranks > 0
    hits = (found & (ranks <= at)).sum() / len(ranks)
    inverse = (1.0 / ranks[found]).sum() / len(ranks)
    return float(hits), float(inverse)
