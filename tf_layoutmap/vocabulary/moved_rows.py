"""Where the rows of keys go in a vocabulary of another capacity."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_layoutmap import _ops
from tf_layoutmap.vocabulary import bucket_layout, state
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class MovedRows:
    """The rows of keys, before and after.

    Attributes:
      sources: `[num_kept]` int64, the rows that keys had.
      targets: The rows that they get.
      dropped: `[num_dropped]` int64, rows of keys that found no place.
      num_rows: Of the new table, that of unknown keys among them.
      vocabulary: Its variables by name.
    """

    sources: Array
    targets: Array
    dropped: Array
    num_rows: int
    vocabulary: dict[str, Array]

    @property
    def conversion(self) -> state.Conversion:
        """What became of the keys."""
        return state.Conversion(len(self.targets), len(self.dropped))

    def of(self, value: Array) -> Array:
        """Returns the rows of the new table, `[num_rows, dim]`.

        Rows without a key are zeros, until a key gets them. The last one, of
        unknown keys, stays.

        Args:
          value: The rows of the old one.
        """
        rows = np.zeros((self.num_rows, *value.shape[1:]), value.dtype)
        rows[self.targets] = value[self.sources]
        rows[-1] = value[-1]
        return rows


def move(
    keys: Array,
    last_steps: Array,
    counts: Array,
    numbers: Array,
    settings: OpenVocabulary,
) -> MovedRows:
    """Finds a place for keys in a vocabulary of these settings.

    Where there is not room for all, those with the highest score stay, by its
    `evict`. What was counted of keys without a row is forgotten.

    Args:
      keys: Of any shape, int64; -2^63 where none is.
      last_steps: Of each, int32.
      counts: Of each, int32.
      numbers: What the old vocabulary has counted.
      settings: Of the new one.
    """
    stored = keys.ravel()
    found = _ops.native.put_keys(
        stored,
        last_steps.ravel(),
        counts.ravel(),
        step=int(numbers[0]),
        capacity=settings.capacity,
        evict=settings.evict,
        half_life_steps=settings.half_life_steps or 0,
    )
    by_bucket = (-1, bucket_layout.KEYS_PER_BUCKET)
    sketch = bucket_layout.sketch_shape(settings.num_buckets)
    vocabulary = {
        state.KEYS: found["keys"].reshape(by_bucket),
        state.LAST_STEPS: found["last_step"].reshape(by_bucket),
        state.COUNTS: found["count"].reshape(by_bucket),
        state.SKETCH: np.zeros(sketch, np.uint8),
        state.SKETCH_SUMS: np.zeros(sketch[:1], np.int64),
        state.NUMBERS: numbers,
    }
    had_row = np.flatnonzero(stored != bucket_layout.EMPTY_KEY)
    return MovedRows(
        found["from"],
        found["to"],
        np.setdiff1d(had_row, found["from"]),
        settings.num_rows,
        vocabulary,
    )
