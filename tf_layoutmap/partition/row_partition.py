"""Which shard owns a global row, and as which local row."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_layoutmap import _checks

PLACEMENTS = ("div", "mod", "offsets")


@dataclasses.dataclass(frozen=True)
class RowPartition:
    """The rule that divides the rows of a table among shards.

    Make one with `div`, `mod` or `from_sizes`. Two partitions are equal when
    they place every row alike by the same rule.

    >>> partition = RowPartition.div(num_rows=5, num_shards=2)
    >>> partition.sizes
    (3, 2)
    >>> shards, local_rows = partition.locate([4, 0, 3])
    >>> shards.tolist(), local_rows.tolist()
    ([1, 0, 1], [1, 0, 0])

    Attributes:
      placement: `"div"`: contiguous blocks, the first `num_rows % num_shards`
        shards one row longer. `"mod"`: row `r` is local row `r // num_shards`
        of shard `r % num_shards`. `"offsets"`: contiguous blocks of any sizes.
      offsets: Cumulative shard sizes, `num_shards + 1` of them, from 0 to
        `num_rows`. For `"mod"` these count rows, they do not bound them.
    """

    placement: str
    offsets: tuple[int, ...]

    def __post_init__(self):
        _checks.check_one_of("placement", self.placement, PLACEMENTS)
        offsets = tuple(_checks.check_int("offsets", offset)
                        for offset in self.offsets)
        if len(offsets) < 2 or offsets[0] != 0 or any(
                later < earlier
                for earlier, later in itertools.pairwise(offsets)):
            raise ValueError(_checks.message(
                "offsets", "at least two numbers that start at 0 and do not "
                "decrease", offsets))
        object.__setattr__(self, "offsets", offsets)
        if self.placement != "offsets" and self.sizes != _even_sizes(
                self.num_rows, self.num_shards):
            raise ValueError(_checks.message(
                "offsets", f"even for placement {self.placement!r}", offsets))

    @classmethod
    def div(cls, num_rows: int, num_shards: int) -> "RowPartition":
        """Contiguous blocks, as even as whole rows allow."""
        return cls("div", _even_offsets(num_rows, num_shards))

    @classmethod
    def mod(cls, num_rows: int, num_shards: int) -> "RowPartition":
        """Rows dealt out in turn."""
        return cls("mod", _even_offsets(num_rows, num_shards))

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> "RowPartition":
        """Contiguous blocks of the given sizes; `"div"` when those are even.

        >>> RowPartition.from_sizes([3, 2]).placement
        'div'
        >>> RowPartition.from_sizes([1, 0, 4]).offsets
        (0, 1, 1, 5)
        """
        sizes = tuple(_checks.check_int("sizes", size, lowest=0)
                      for size in sizes)
        if not sizes:
            raise ValueError(_checks.message("sizes", "not empty", sizes))
        even = sizes == _even_sizes(sum(sizes), len(sizes))
        return cls("div" if even else "offsets", _cumulative(sizes))

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return self.offsets[-1]

    @property
    def num_shards(self) -> int:
        """Shards the table is cut into."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each shard."""
        return tuple(later - earlier
                     for earlier, later in itertools.pairwise(self.offsets))

    @property
    def is_contiguous(self) -> bool:
        """Whether each shard holds neighbouring rows, in order of shards."""
        return self.placement != "mod" or self.num_shards == 1

    def locate(self, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the owner of each global row and its row there.

        Args:
          rows: Global rows, whole numbers of any shape.

        Returns:
          `(shards, local_rows)`, shaped like `rows`: int32, and the integer
          dtype of `rows`.

        Raises:
          TypeError: `rows` are not whole numbers.
          ValueError: A row is outside the table.
        """
        rows = np.asarray(rows)
        if not rows.size and rows.dtype.kind == "f":
            rows = rows.astype(np.int64)  # numpy's dtype of an empty list
        if rows.dtype.kind not in "iu":
            raise TypeError(_checks.message(
                "rows", "whole numbers", rows.dtype.name))
        outside = (rows < 0) | (rows >= self.num_rows)
        if outside.any():
            raise ValueError(
                f"Row {int(rows[outside].flat[0])} is outside a table with "
                f"{self.num_rows} rows.")
        if self.placement == "mod":
            shards = rows % self.num_shards
            local_rows = rows // self.num_shards
        else:
            # Searching the ends (not the starts) skips empty shards.
            shards = np.searchsorted(self.offsets[1:], rows, side="right")
            starts = np.asarray(self.offsets[:-1], np.int64)
            local_rows = rows - starts[shards].astype(rows.dtype)
        return (np.asarray(shards, np.int32),
                np.asarray(local_rows, rows.dtype))

    def global_rows(self, shard: int) -> np.ndarray:
        """Returns the global rows of `shard`, int64, in order of local row.

        >>> RowPartition.mod(num_rows=5, num_shards=2).global_rows(1).tolist()
        [1, 3]
        """
        shard = _checks.check_int(
            "shard", shard, lowest=0, highest=self.num_shards - 1)
        if self.placement == "mod":
            return np.arange(shard, self.num_rows, self.num_shards,
                             dtype=np.int64)
        return np.arange(*self.offsets[shard:shard + 2], dtype=np.int64)


def _even_sizes(num_rows: int, num_shards: int) -> tuple[int, ...]:
    num_rows = _checks.check_int("num_rows", num_rows, lowest=0)
    num_shards = _checks.check_int("num_shards", num_shards, lowest=1)
    base, extra = divmod(num_rows, num_shards)
    return tuple(base + (shard < extra) for shard in range(num_shards))


def _even_offsets(num_rows: int, num_shards: int) -> tuple[int, ...]:
    return _cumulative(_even_sizes(num_rows, num_shards))


def _cumulative(sizes: Sequence[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(sizes))
