"""How well clicks are foretold, and by what little one could do it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clicks.criteo import CATEGORIES

# Lines of the average kind that each value is believed to have had before.
_PRIOR = 20.0


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the chance that a click scores above a line without one.

    Ties count half: the area under the ROC curve, exactly.

    >>> auc(np.array([0, 1, 0, 1]), np.array([0.1, 0.9, 0.4, 0.4]))
    0.875

    Raises:
      ValueError: All labels are the same.
    """
    labels = np.asarray(labels, bool)
    num_clicks = int(labels.sum())
    if num_clicks in (0, len(labels)):
        raise ValueError(
            "Labels must hold clicks and lines without. Received: "
            f"{num_clicks} clicks of {len(labels)}."
        )
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    # Ranks from 1; equal scores share the mean of theirs.
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    above = ranks[labels].sum() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * (len(labels) - num_clicks)))


def log_loss(labels: np.ndarray, chances: np.ndarray) -> float:
    """Returns the mean negative log-likelihood, in nats."""
    chances = np.clip(chances.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(
        -np.mean(
            np.where(
                np.asarray(labels, bool), np.log(chances), np.log1p(-chances)
            )
        )
    )


class ClickRates:
    """Adds up what each value says alone: naive Bayes on counts.

    No value knows of another one. Numbers count by their magnitude.
    """

    def __init__(self, features: Mapping[str, np.ndarray], labels: np.ndarray):
        """Counts clicks by value.

        Args:
          features: As `criteo.read_lines` gives them, of all lines.
          labels: `[num_lines]`.
        """
        labels = np.asarray(labels, np.float64)
        self.mean = labels.mean()
        self._base = np.log(self.mean / (1 - self.mean))
        self._evidence = []
        for values in _columns(features):
            lines = np.bincount(values)
            clicks = np.bincount(values, labels)
            self._evidence.append(
                np.log(
                    (clicks + _PRIOR * self.mean)
                    / (lines - clicks + _PRIOR * (1 - self.mean))
                )
                - self._base
            )

    def chances(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the chance of a click in each line."""
        logits = self._base
        for evidence, values in zip(self._evidence, _columns(features)):
            known = values < len(evidence)
            logits = logits + np.where(
                known, evidence[np.where(known, values, 0)], 0
            )
        return 1 / (1 + np.exp(-logits))


def _columns(features):
    for name in CATEGORIES:
        yield features[name]
    yield from np.round(2 * features["numbers"].T).astype(np.int64)
