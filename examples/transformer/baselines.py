"""Honest baselines: they see the same characters, and only count."""

from __future__ import annotations

import numpy as np

_SEEN = 0.1  # added to every count, so that nothing is impossible


def ngram_loss(
    training: np.ndarray, windows: np.ndarray, num_rows: int, order: int
) -> float:
    """Returns the cross-entropy of counting what follows what.

    Each character is guessed from the `order - 1` before it. Where a window
    does not show that many, fewer are used.

    >>> training = np.array([1, 2] * 500)
    >>> windows = np.array([[1, 2, 1]])
    >>> round(ngram_loss(training, windows, 3, 1), 2)
    0.69
    >>> round(ngram_loss(training, windows, 3, 2), 2)
    0.0

    Args:
      training: `[num_characters]` rows that are counted.
      windows: `[num_windows, context + 1]` rows; the first of each is given.
      num_rows: Size of the vocabulary.
      order: 1 for unigrams, 2 for bigrams, 3 for trigrams.

    Returns:
      The mean in nats over all characters but the first of each window.
    """
    log_chance = [
        _log_chances(training, num_rows, n) for n in range(1, order + 1)
    ]
    total = 0.0
    for place in range(1, windows.shape[1]):
        seen = min(order, place + 1)
        grams = _codes(windows[:, place + 1 - seen : place + 1], num_rows)
        total -= log_chance[seen - 1][grams].sum()
    return float(total / (windows.shape[0] * (windows.shape[1] - 1)))


def _log_chances(training: np.ndarray, num_rows: int, order: int) -> np.ndarray:
    """Returns the log chance of the last row of every `order` rows."""
    grams = np.lib.stride_tricks.sliding_window_view(training, order)
    counts = (
        np.bincount(_codes(grams, num_rows), minlength=num_rows**order) + _SEEN
    )
    counts = counts.reshape(-1, num_rows)
    return np.log(counts / counts.sum(axis=1, keepdims=True)).ravel()


def _codes(grams: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns a number per n-gram: its rows are the digits."""
    codes = np.zeros(grams.shape[:-1], np.int64)
    for place in range(grams.shape[-1]):
        codes = codes * num_rows + grams[..., place]
    return codes
