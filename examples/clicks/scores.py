"""Metrics of click prediction, and a naive Bayes baseline."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clicks.criteo import CATEGORIES

# Pseudo-count: each value starts with this many lines at the mean click rate.
_PRIOR = 20.0


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the exact area under the ROC curve.

    The area is the probability that a line with a click has a higher score than
    a line without a click. A tie counts as one half.

    >>> auc(np.array([0, 1, 0, 1]), np.array([0.1, 0.9, 0.4, 0.4]))
    0.875

    Raises:
      ValueError: All labels are equal.
    """
    labels = np.asarray(labels, bool)
    num_clicks = int(labels.sum())
    if num_clicks in (0, len(labels)):
        raise ValueError(
            "Labels must contain both 0 and 1. Received: "
            f"{num_clicks} of {len(labels)} labels are 1."
        )
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    # Ranks start at 1; equal scores get the mean of their ranks.
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    above = ranks[labels].sum() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * (len(labels) - num_clicks)))


def log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the log loss (mean negative log-likelihood), in nats."""
    probabilities = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(
        -np.mean(
            np.where(
                np.asarray(labels, bool),
                np.log(probabilities),
                np.log1p(-probabilities),
            )
        )
    )


class ClickRates:
    """A naive Bayes classifier that uses the click counts of each value.

    Values are treated as independent. Dense features are binned by magnitude.
    """

    def __init__(self, features: Mapping[str, np.ndarray], labels: np.ndarray):
        """Counts the clicks of each value.

        Args:
          features: Features of all lines, as `criteo.read_lines` returns them.
          labels: `[num_lines]` labels, 0 or 1.
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

    def probabilities(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the predicted click probability of each line."""
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
