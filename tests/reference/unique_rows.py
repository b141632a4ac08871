"""Reference of the gains and the unique rows of a batch."""

import numpy as np


def gains(row_splits, weights, combiner: str) -> np.ndarray:
    """Returns one factor per id; divisors are computed in float64."""
    out = np.zeros(row_splits[-1], np.float32)
    for start, end in zip(row_splits[:-1], row_splits[1:], strict=True):
        divisor = 0.0
        for weight in weights[start:end].astype(np.float64):
            divisor += {"sum": 0.0, "mean": weight, "sqrtn": weight * weight}[
                combiner
            ]
        divisor = {"sum": 1.0, "mean": divisor, "sqrtn": np.sqrt(divisor)}[
            combiner
        ]
        if divisor != 0:
            out[start:end] = weights[start:end].astype(np.float64) / divisor
    return out


def find_unique_rows(ids, row_splits, weights, combiner: str):
    """Returns (gains, unique_rows, unique_splits, positions)."""
    if weights.size == 0:
        weights = np.ones(len(ids), np.float32)
    rows = np.unique(ids)
    places = [np.flatnonzero(ids == row) for row in rows]
    splits = np.cumsum([0] + [len(one) for one in places])
    return (
        gains(row_splits, weights, combiner),
        rows.astype(ids.dtype),
        splits.astype(np.int64),
        np.concatenate([*places, []]).astype(np.int32),
    )
