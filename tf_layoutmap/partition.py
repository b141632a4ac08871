"""Which shard owns a global row, and as which local row."""

# DOC-MERGE: How many shards a table gets, from a number or from sizes in bytes.
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from tf_layoutmap._core import checks

PLACEMENTS = ("div", "mod", "offsets", "callable")

# Rows that a callable placement is asked for at once: large enough to be fast,
# small compared with any table.
_CHUNK_ROWS = 1 << 20


@dataclasses.dataclass(frozen=True)
class RowPartition:
    """The rule that divides the rows of a table among shards.

    Make one with `div`, `mod`, `from_sizes` or `from_callable`. Two partitions
    are equal when they place every row alike by the same rule.

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
        `"callable"`: whatever `function` says.
      offsets: Cumulative shard sizes, `num_shards + 1` of them, from 0 to
        `num_rows`. For `"mod"` and `"callable"` these count rows, they do not
        bound them.
      function: For `"callable"`: takes global rows, returns owners and local
        rows of the same shape.
    """

    placement: str
    offsets: tuple[int, ...]
    function: Callable[[Any], tuple[Any, Any]] | None = None

    def __post_init__(self):
        checks.check_one_of("placement", self.placement, PLACEMENTS)
        offsets = tuple(
            checks.check_int("offsets", offset) for offset in self.offsets
        )
        if (
            len(offsets) < 2
            or offsets[0] != 0
            or any(
                later < earlier
                for earlier, later in itertools.pairwise(offsets)
            )
        ):
            raise ValueError(
                checks.message(
                    "offsets",
                    "at least two numbers that start at 0 and do not decrease",
                    offsets,
                )
            )
        object.__setattr__(self, "offsets", offsets)
        if (self.placement == "callable") != callable(self.function):
            raise TypeError(
                checks.message(
                    "function",
                    "callable for placement 'callable' only",
                    self.function,
                )
            )
        if self.placement in ("div", "mod") and self.sizes != _even_sizes(
            self.num_rows, self.num_shards
        ):
            raise ValueError(
                checks.message(
                    "offsets", f"even for placement {self.placement!r}", offsets
                )
            )

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
        sizes = tuple(
            checks.check_int("sizes", size, lowest=0) for size in sizes
        )
        if not sizes:
            raise ValueError(checks.message("sizes", "not empty", sizes))
        even = sizes == _even_sizes(sum(sizes), len(sizes))
        return cls("div" if even else "offsets", _cumulative(sizes))

    @classmethod
    def from_callable(
        cls, function: Callable[[Any], tuple[Any, Any]], sizes: Sequence[int]
    ) -> "RowPartition":
        """Rows wherever `function` puts them, checked for every row.

        >>> swapped = RowPartition.from_callable(
        ...     lambda rows: (1 - rows % 2, rows // 2), sizes=[2, 3])
        >>> swapped.global_rows(1).tolist()
        [0, 2, 4]

        Args:
          function: `function(rows) -> (shards, local_rows)`. It is given
            numpy arrays and, by `ShardedVariable`, tensors: make it of
            operators that both have, like `%` and `//`.
          sizes: Rows of each shard.

        Raises:
          ValueError: It does not fill every row of every shard once.
        """
        partition = cls("callable", cls.from_sizes(sizes).offsets, function)
        partition._rows_in_shard_order  # noqa: B018 (computed, so checked)
        return partition

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
        return tuple(
            later - earlier
            for earlier, later in itertools.pairwise(self.offsets)
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether each shard holds neighbouring rows, in order of shards."""
        return (
            self.placement in ("div", "offsets")
            or self.placement == "mod"
            and self.num_shards == 1
        )

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
            raise TypeError(
                checks.message("rows", "whole numbers", rows.dtype.name)
            )
        outside = (rows < 0) | (rows >= self.num_rows)
        if outside.any():
            raise ValueError(
                f"Row {int(rows[outside].flat[0])} is outside a table with "
                f"{self.num_rows} rows."
            )
        if self.placement == "callable":
            assert self.function is not None
            shards, local_rows = self.function(rows)
        elif self.placement == "mod":
            shards = rows % self.num_shards
            local_rows = rows // self.num_shards
        else:
            # Searching the ends (not the starts) skips empty shards.
            shards = cast(
                "np.ndarray",
                np.searchsorted(self.offsets[1:], rows, side="right"),
            )
            starts = np.asarray(self.offsets[:-1], np.int64)
            local_rows = rows - starts[shards].astype(rows.dtype)
        return (
            np.asarray(shards, np.int32),
            np.asarray(local_rows, rows.dtype),
        )

    def global_rows(self, shard: int) -> np.ndarray:
        """Returns the global rows of `shard`, int64, in order of local row.

        >>> RowPartition.mod(num_rows=5, num_shards=2).global_rows(1).tolist()
        [1, 3]
        """
        shard = checks.check_int(
            "shard", shard, lowest=0, highest=self.num_shards - 1
        )
        if self.placement == "mod":
            return np.arange(
                shard, self.num_rows, self.num_shards, dtype=np.int64
            )
        if self.placement == "callable":
            return self._rows_in_shard_order[
                slice(*self.offsets[shard : shard + 2])
            ]
        return np.arange(*self.offsets[shard : shard + 2], dtype=np.int64)

    @functools.cached_property
    def _rows_in_shard_order(self) -> np.ndarray:
        """The inverse of a callable placement: shard by shard, int64."""
        found = np.full(self.num_rows, -1, np.int64)
        starts = np.asarray(self.offsets[:-1], np.int64)
        sizes = np.asarray(self.sizes, np.int64)
        for first in range(0, self.num_rows, _CHUNK_ROWS):
            rows = np.arange(
                first, min(first + _CHUNK_ROWS, self.num_rows), dtype=np.int64
            )
            shards, local_rows = (
                np.asarray(part, np.int64) for part in self.locate(rows)
            )
            inside = (shards >= 0) & (shards < self.num_shards)
            inside[inside] = (local_rows[inside] >= 0) & (
                local_rows[inside] < sizes[shards[inside]]
            )
            if shards.shape != rows.shape or not inside.all():
                wrong = (
                    int(rows[~inside][0])
                    if (shards.shape == rows.shape)
                    else first
                )
                raise ValueError(
                    "A callable placement must put each row into a row of a "
                    f"shard. Received: row {wrong} outside the shards of "
                    f"sizes {self.sizes}."
                )
            found[starts[shards] + local_rows] = rows
        if (found < 0).any():
            # As many rows as positions: if one is empty, another is taken
            # twice.
            position = int(np.argmin(found))
            shard = int(np.searchsorted(self.offsets[1:], position, "right"))
            raise ValueError(
                "A callable placement must fill every row of every shard "
                "once. Received: nothing for local row "
                f"{position - self.offsets[shard]} of shard {shard}."
            )
        return found


def _even_sizes(num_rows: int, num_shards: int) -> tuple[int, ...]:
    num_rows = checks.check_int("num_rows", num_rows, lowest=0)
    num_shards = checks.check_int("num_shards", num_shards, lowest=1)
    base, extra = divmod(num_rows, num_shards)
    return tuple(base + (shard < extra) for shard in range(num_shards))


def _even_offsets(num_rows: int, num_shards: int) -> tuple[int, ...]:
    return _cumulative(_even_sizes(num_rows, num_shards))


def _cumulative(sizes: Sequence[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(sizes))


__all__ = [
    "PLACEMENTS",
    "RowPartition",
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


def __dir__() -> list[str]:
    return __all__


class Partitioner:
    """Base of all partitioners: a callable `(shape, dtype, axis=0)`.

    A partitioner of tf_layoutmap also serves as `variable_partitioner` of
    `tf.distribute.ParameterServerStrategy`.
    """

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis.

        Args:
          shape: Shape of the whole table: `tf.TensorShape`, list or tuple;
            fully defined, rank at least 1.
          dtype: `tf.DType`, or anything `np.dtype` takes.
          axis: The axis to cut, in `[-rank, rank)`.

        Returns:
          One number per axis: 1 for every axis but `axis`, and there at
          least 1 and at most the size of that axis (1 when it is empty).
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement `__call__`."
        )


class FixedShardsPartitioner(Partitioner):
    """Cuts into a fixed number of shards, but never into empty ones.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int):
        """Makes the partitioner.

        Args:
          num_shards: Shards wanted, at least 1.
        """
        self._num_shards = _check_positive("num_shards", num_shards)

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        shape, axis = _check_shape(shape, axis)
        return _shards_along(shape, axis, self._num_shards)


class MinSizePartitioner(Partitioner):
    """Makes many shards, of about a size in bytes or more.

    The number is the table's size over `min_shard_bytes`, rounded up as
    TensorFlow does, so that shards may be smaller by what was rounded.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
    [2, 1]
    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=10)((6, 1), "float32")
    [6, 1]
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ):
        """Makes the partitioner.

        Args:
          min_shard_bytes: Bytes that each shard should have at least.
          max_shards: Shards at most.
          bytes_per_string: What one element of a string table counts.
        """
        self._min_shard_bytes = _check_positive(
            "min_shard_bytes", min_shard_bytes
        )
        self._max_shards = _check_positive("max_shards", max_shards)
        self._bytes_per_string = _check_positive(
            "bytes_per_string", bytes_per_string
        )

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        shape, axis = _check_shape(shape, axis)
        num_bytes = math.prod(shape) * _element_bytes(
            dtype, self._bytes_per_string
        )
        return _shards_along(
            shape,
            axis,
            min(-(-num_bytes // self._min_shard_bytes), self._max_shards),
        )


class MaxSizePartitioner(Partitioner):
    """Makes as few shards as possible, none over a size in bytes.

    A slice of one index along `axis` is never cut, so a shard is larger than
    `max_shard_bytes` when one slice is, or when `max_shards` is reached.

    >>> MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
    [6, 1]
    >>> MaxSizePartitioner(max_shard_bytes=1024)((6, 1), "float32")
    [1, 1]
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = 16,
    ):
        """Makes the partitioner.

        Args:
          max_shard_bytes: Bytes that each shard has at most.
          max_shards: Shards at most, which wins over `max_shard_bytes`; None
            for any number.
          bytes_per_string: What one element of a string table counts.
        """
        self._max_shard_bytes = _check_positive(
            "max_shard_bytes", max_shard_bytes
        )
        self._max_shards = (
            None
            if max_shards is None
            else _check_positive("max_shards", max_shards)
        )
        self._bytes_per_string = _check_positive(
            "bytes_per_string", bytes_per_string
        )

    def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
        shape, axis = _check_shape(shape, axis)
        slice_bytes = _element_bytes(dtype, self._bytes_per_string) * (
            math.prod(size for i, size in enumerate(shape) if i != axis)
        )
        if slice_bytes == 0:
            return _shards_along(shape, axis, 1)
        slices_per_shard = max(1, self._max_shard_bytes // slice_bytes)
        num_shards = -(-shape[axis] // slices_per_shard)
        if self._max_shards is not None:
            num_shards = min(num_shards, self._max_shards)
        return _shards_along(shape, axis, num_shards)


def _shards_along(
    shape: tuple[int, ...], axis: int, num_shards: int
) -> list[int]:
    counts = [1] * len(shape)
    counts[axis] = max(1, min(num_shards, shape[axis]))
    return counts


def _check_positive(argument: str, value: Any) -> int:
    # The words are those of tf.distribute.experimental.partitioners.
    if checks.check_int(argument, value) < 1:
        raise ValueError(checks.message(argument, "positive", value))
    return int(value)


def _check_shape(shape: Any, axis: Any) -> tuple[tuple[int, ...], int]:
    """Returns `shape` as a tuple and `axis` counted from the front."""
    try:
        sizes = shape.as_list() if hasattr(shape, "as_list") else list(shape)
    except (TypeError, ValueError):
        sizes = None
    if not sizes or any(size is None for size in sizes):
        raise ValueError(
            checks.message(
                "shape", "fully defined, with at least one axis", shape
            )
        )
    sizes = tuple(checks.check_int("shape", size, lowest=0) for size in sizes)
    rank = len(sizes)
    axis = checks.check_int("axis", axis, lowest=-rank, highest=rank - 1)
    return sizes, axis % rank


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    # tf.DType is told by its attributes, so that this file needs no
    # TensorFlow; np.dtype does not know bfloat16 and tf.string.
    if getattr(dtype, "name", dtype) == "string":
        return bytes_per_string
    if hasattr(dtype, "as_numpy_dtype"):
        return dtype.size
    return np.dtype(dtype).itemsize
