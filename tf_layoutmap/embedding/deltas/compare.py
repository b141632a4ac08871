"""Which rows of a variable differ from what files hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_layoutmap.embedding.host.changes import WHOLE
from tf_layoutmap.vocabulary.state import shards_of

Array = np.ndarray[Any, Any]


def has_rows(name: str) -> bool:
    """Whether a variable of a table has a value for each of its rows."""
    return name not in WHOLE


def differing_rows(stored: Array, variable: Any) -> Array:
    """Returns the rows whose bits differ, int64.

    Args:
      stored: What files hold: `[num_rows, dim]`, or by bucket.
      variable: What is now, of that shape.
    """
    found, first = [], 0
    for shard in shards_of(variable):
        now = shard.numpy()
        rows = _bits(now) != _bits(stored[first : first + len(now)])
        # Of a vocabulary each lane of a bucket is a row.
        is_lane = now.dtype in (np.int64, np.int32)
        different = rows.ravel() if is_lane else rows.any(1)
        found.append(
            np.flatnonzero(different) + first * (now.shape[1] if is_lane else 1)
        )
        first += len(now)
    return np.concatenate(found)


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
