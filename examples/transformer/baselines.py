"""Baselines that count n-grams and use the same characters as the model."""

from __future__ import annotations

import numpy as np

_SEEN = 0.1  # This number is added to every count, so that no probability is 0.


def ngram_loss(
    training: np.ndarray, windows: np.ndarray, num_rows: int, order: int
) -> float:
    """Returns the log loss of an n-gram model.

    Each character is predicted from the previous `order - 1` characters, or
    from fewer at the start of a window.

    >>> training = np.array([1, 2] * 500)
    >>> windows = np.array([[1, 2, 1]])
    >>> round(ngram_loss(training, windows, 3, 1), 2)
    0.69
    >>> round(ngram_loss(training, windows, 3, 2), 2)
    0.0

    Args:
      training: `[num_characters]` rows of the training text.
      windows: `[num_windows, context + 1]` rows; the first character of a
        window is not predicted.
      num_rows: Size of the vocabulary.
      order: 1 for unigrams, 2 for bigrams, 3 for trigrams.

    Returns:
      The mean over all predicted characters, in nats.
    """
    log_probability = [
        _log_probabilities(training, num_rows, n) for n in range(1, order + 1)
    ]
    total = 0.0
    for place in range(1, windows.shape[1]):
        seen = min(order, place + 1)
        grams = _codes(windows[:, place + 1 - seen : place + 1], num_rows)
        total -= log_probability[seen - 1][grams].sum()
    return float(total / (windows.shape[0] * (windows.shape[1] - 1)))


def _log_probabilities(
    training: np.ndarray, num_rows: int, order: int
) -> np.ndarray:
    """Returns the log probability of the last character of every n-gram."""
    grams = np.lib.stride_tricks.sliding_window_view(training, order)
    counts = (
        np.bincount(_codes(grams, num_rows), minlength=num_rows**order) + _SEEN
    )
    counts = counts.reshape(-1, num_rows)
    return np.log(counts / counts.sum(axis=1, keepdims=True)).ravel()


def _codes(grams: np.ndarray, num_rows: int) -> np.ndarray:
    """Encodes each n-gram as a number whose digits are the rows."""
    codes = np.zeros(grams.shape[:-1], np.int64)
    for place in range(grams.shape[-1]):
        codes = codes * num_rows + grams[..., place]
    return codes
