"""Partitions, which assign the rows of a table to shards, and partitioners.

`RowPartition` maps each global row to a shard and a local row. A `Partitioner`
returns the number of shards for a table. The number is fixed, or is computed
from the size of the table in bytes. A `TableSummary` describes the shards of a
table. The module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np

from tf_layoutmap._core import checks, user_warnings

if TYPE_CHECKING:
    import numpy.typing as npt

    from tf_layoutmap._core.types import DTypeLike, PlacementFunction

PLACEMENTS = ("div", "mod", "offsets", "callable")

# Number of rows that are passed to a callable placement in one call. A call
# with this number of rows is fast, and needs little memory compared with a
# table.
_CHUNK_ROWS = 1 << 20


@dataclasses.dataclass(frozen=True)
class RowPartition:
    """A rule that assigns the rows of a table to shards.

    Create a partition with `div`, `mod`, `from_sizes` or `from_callable`. Two
    partitions are equal if they have the same rule and the same offsets.

    >>> partition = RowPartition.div(num_rows=5, num_shards=2)
    >>> partition.sizes
    (3, 2)
    >>> shards, local_rows = partition.locate([4, 0, 3])
    >>> shards.tolist(), local_rows.tolist()
    ([1, 0, 1], [1, 0, 0])

    Attributes:
      placement: `"div"`: contiguous blocks of even sizes, where the first
        `num_rows % num_shards` shards have one row more than the others.
        `"mod"`: shard `r % num_shards` holds row `r` as its local row
        `r // num_shards`. `"offsets"`: contiguous blocks of any sizes.
        `"callable"`: the attribute `function` computes the placement.
      offsets: Cumulative shard sizes from 0 to `num_rows`, of length
        `num_shards + 1`. For `"mod"` and `"callable"`, the offsets only define
        the sizes of the shards, because the rows of a shard are not contiguous.
      function: Function of global rows that returns shards and local rows of
        the same shape. None unless `placement` is `"callable"`.
    """

    placement: str
    offsets: tuple[int, ...]
    function: PlacementFunction | None = None

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
    def div(cls, num_rows: int, num_shards: int) -> RowPartition:
        """Returns a partition into contiguous blocks of even sizes.

        The first `num_rows % num_shards` shards have one row more than the
        others.
        """
        return cls("div", _even_offsets(num_rows, num_shards))

    @classmethod
    def mod(cls, num_rows: int, num_shards: int) -> RowPartition:
        """Returns a partition in which row `r` is in shard `r % num_shards`."""
        return cls("mod", _even_offsets(num_rows, num_shards))

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> RowPartition:
        """Returns a partition into contiguous blocks of the given sizes.

        The placement is `"div"` if the sizes are even.

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
        cls, function: PlacementFunction, sizes: Sequence[int]
    ) -> RowPartition:
        """Returns a partition that a function defines.

        The method checks the result of the function for every row.

        >>> swapped = RowPartition.from_callable(
        ...     lambda rows: (1 - rows % 2, rows // 2), sizes=[2, 3])
        >>> swapped.global_rows(1).tolist()
        [0, 2, 4]

        Args:
          function: `function(rows) -> (shards, local_rows)`. The function is
            called with numpy arrays. `ShardedVariable` also calls it with
            tensors. Use only operators that arrays and tensors both support,
            such as `%` and `//`.
          sizes: Number of rows of each shard.

        Raises:
          ValueError: If the function does not assign exactly one global row to
            each row of each shard.
        """
        partition = cls("callable", cls.from_sizes(sizes).offsets, function)
        partition._rows_in_shard_order  # noqa: B018 (computed, so checked)
        return partition

    @property
    def num_rows(self) -> int:
        """Number of rows of the full table."""
        return self.offsets[-1]

    @property
    def num_shards(self) -> int:
        """Number of shards of the table."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each shard."""
        return tuple(
            later - earlier
            for earlier, later in itertools.pairwise(self.offsets)
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether each shard holds contiguous rows, in the order of shards."""
        return (
            self.placement in ("div", "offsets")
            or self.placement == "mod"
            and self.num_shards == 1
        )

    def locate(self, rows: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shard and the local row of each global row.

        Args:
          rows: Integer array of global rows, of any shape.

        Returns:
          `(shards, local_rows)` with the shape of `rows`. The dtype of `shards`
          is int32. The dtype of `local_rows` is the dtype of `rows`.

        Raises:
          TypeError: If `rows` are not integers.
          ValueError: If a row is outside the table.
        """
        rows = np.asarray(rows)
        if not rows.size and rows.dtype.kind == "f":
            rows = rows.astype(np.int64)  # numpy converts [] to float64.
        if rows.dtype.kind not in "iu":
            raise TypeError(checks.message("rows", "integers", rows.dtype.name))
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
            # The search uses the ends of the shards, because a search in the
            # starts would not skip empty shards.
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
        """Returns the global row of each local row of a shard, int64.

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
        """Global rows of a callable placement in the order of shards, int64."""
        global_rows = np.full(self.num_rows, -1, np.int64)
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
                    "A callable placement must assign each global row to a "
                    f"row of a shard. Received: row {wrong} outside the "
                    f"shards of sizes {self.sizes}."
                )
            global_rows[starts[shards] + local_rows] = rows
        if (global_rows < 0).any():
            # There are as many rows as positions. If a position has no row,
            # another position therefore has several rows.
            position = int(np.argmin(global_rows))
            shard = int(np.searchsorted(self.offsets[1:], position, "right"))
            raise ValueError(
                "A callable placement must assign one global row to every "
                "row of every shard. Received: no global row for local row "
                f"{position - self.offsets[shard]} of shard {shard}."
            )
        return global_rows


def _even_sizes(num_rows: int, num_shards: int) -> tuple[int, ...]:
    num_rows = checks.check_int("num_rows", num_rows, lowest=0)
    num_shards = checks.check_int("num_shards", num_shards, lowest=1)
    base, extra = divmod(num_rows, num_shards)
    return tuple(base + (shard < extra) for shard in range(num_shards))


def _even_offsets(num_rows: int, num_shards: int) -> tuple[int, ...]:
    return _cumulative(_even_sizes(num_rows, num_shards))


def _cumulative(sizes: Sequence[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(sizes))


@dataclasses.dataclass(frozen=True)
class ShardSummary:
    """Summary of one shard.

    Attributes:
      name: Name of the shard's variable.
      shape: Shape of the shard's variable.
      rows: Number of rows, or of columns if the table is sharded along axis 1.
      num_bytes: Size of the value in bytes. For a string variable, the
        computation uses the size that TensorFlow reports for the string dtype.
      device: Device of the variable.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    num_bytes: int
    device: str


@dataclasses.dataclass(frozen=True)
class TableSummary:
    """Summary of a table.

    The summary can be printed with `print`, and in color with `rich.print`.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> table = tlm.ShardedVariable.create(tf.zeros([5, 2]), num_shards=2)
    >>> summary = table.summary()
    >>> summary.shape, summary.num_bytes
    ((5, 2), 40)
    >>> [shard.rows for shard in summary.shards]
    [3, 2]

    Attributes:
      name: Name of the table.
      shape: Shape of the full table.
      dtype: Name of the table's dtype.
      axis: The axis that is sharded.
      placement: Placement of the partition.
      shards: One `ShardSummary` per shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int
    placement: str
    shards: tuple[ShardSummary, ...]

    @property
    def num_bytes(self) -> int:
        """Total size of all shards in bytes."""
        return sum(shard.num_bytes for shard in self.shards)

    def __rich__(self) -> Any:
        import rich.table

        table = rich.table.Table(
            title=f"{self.name}: {self.dtype} {list(self.shape)}, "
            f"{self.placement} along axis {self.axis}",
            show_footer=True,
        )
        table.add_column("shard", "total")
        table.add_column(
            "columns" if self.axis == 1 else "rows",
            f"{sum(shard.rows for shard in self.shards):,}",
            justify="right",
        )
        table.add_column("bytes", f"{self.num_bytes:,}", justify="right")
        table.add_column("device")
        for shard in self.shards:
            table.add_row(
                shard.name,
                f"{shard.rows:,}",
                f"{shard.num_bytes:,}",
                shard.device,
            )
        return table

    def __str__(self) -> str:
        return user_warnings.printed(self, width=120)


__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "RowPartition",
    "ShardSummary",
    "TableSummary",
]


def __dir__() -> list[str]:
    return __all__


class Partitioner:
    """Base class of partitioners, which return a number of shards.

    A partitioner can also be used as `variable_partitioner` of
    `tf.distribute.ParameterServerStrategy`.
    """

    def __call__(
        self,
        shape: Iterable[SupportsIndex | None],
        dtype: DTypeLike,
        axis: int = 0,
    ) -> list[int]:
        """Returns the number of shards along each axis.

        Args:
          shape: Shape of the full table, as `tf.TensorShape`, list or tuple.
            The shape must be fully defined, with rank at least 1.
          dtype: `tf.DType`, or a value that `np.dtype` accepts.
          axis: Axis to shard, in `[-rank, rank)`.

        Returns:
          One number per axis. The number is 1 for all axes except `axis`. The
          number for `axis` is at least 1 and at most the size of the axis. If
          the size is 0, the number is 1.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement `__call__`."
        )


class PartitionerByName(Partitioner):
    """Base class of partitioners that get the name of each table.

    `TPUEmbedding` passes the name as the argument `name`.
    """

    def __call__(
        self,
        shape: Iterable[SupportsIndex | None],
        dtype: DTypeLike,
        axis: int = 0,
        *,
        name: str | None = None,
    ) -> list[int]:
        """Returns the number of shards of the table `name` along each axis."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `__call__`."
        )

    def check_servers(self, num_servers: int) -> None:
        """Raises ValueError if the partitioner requires other servers.

        Args:
          num_servers: Number of parameter servers, or 0 for tables on a host.
        """

    def servers_of(self, name: str) -> list[int]:
        """Returns the index of the server of each shard of the table `name`."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `servers_of`."
        )


class FixedShardsPartitioner(Partitioner):
    """A partitioner with a fixed number of shards. No shard is empty.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int):
        """Creates the partitioner.

        Args:
          num_shards: Number of shards, at least 1.
        """
        self._num_shards = _check_positive("num_shards", num_shards)

    def __call__(
        self,
        shape: Iterable[SupportsIndex | None],
        dtype: DTypeLike,
        axis: int = 0,
    ) -> list[int]:
        shape, axis = _check_shape(shape, axis)
        return _shards_along(shape, axis, self._num_shards)


class MinSizePartitioner(Partitioner):
    """A partitioner with a minimum size of shards.

    The number of shards is the size of the table divided by `min_shard_bytes`,
    rounded up as in TensorFlow. Because of the rounding, shards can be slightly
    smaller than `min_shard_bytes`. There are at most `max_shards` shards.

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
        """Creates the partitioner.

        Args:
          min_shard_bytes: Minimum size of a shard, in bytes.
          max_shards: Maximum number of shards.
          bytes_per_string: Size of one element of a string table, in bytes.
        """
        self._min_shard_bytes = _check_positive(
            "min_shard_bytes", min_shard_bytes
        )
        self._max_shards = _check_positive("max_shards", max_shards)
        self._bytes_per_string = _check_positive(
            "bytes_per_string", bytes_per_string
        )

    def __call__(
        self,
        shape: Iterable[SupportsIndex | None],
        dtype: DTypeLike,
        axis: int = 0,
    ) -> list[int]:
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
    """A partitioner with a maximum size of shards.

    The number of shards is the smallest number for which no shard is larger
    than `max_shard_bytes`. A shard can be larger in two cases: if `max_shards`
    limits the number of shards, or if a single index along `axis`, such as one
    row, is larger.

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
        """Creates the partitioner.

        Args:
          max_shard_bytes: Maximum size of a shard, in bytes.
          max_shards: Maximum number of shards. This maximum has priority over
            `max_shard_bytes`. None: there is no maximum.
          bytes_per_string: Size of one element of a string table, in bytes.
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

    def __call__(
        self,
        shape: Iterable[SupportsIndex | None],
        dtype: DTypeLike,
        axis: int = 0,
    ) -> list[int]:
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
    # The error message is the same as in
    # tf.distribute.experimental.partitioners.
    if checks.check_int(argument, value) < 1:
        raise ValueError(checks.message(argument, "positive", value))
    return int(value)


def _check_shape(shape: Any, axis: Any) -> tuple[tuple[int, ...], int]:
    """Checks both arguments; returns a tuple and a nonnegative axis."""
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
    # A tf.DType is recognized by its attributes, because this module does not
    # import TensorFlow. A tf.DType is not converted to a np.dtype, because
    # np.dtype does not support bfloat16 and tf.string.
    if getattr(dtype, "name", dtype) == "string":
        return bytes_per_string
    if hasattr(dtype, "as_numpy_dtype"):
        return dtype.size
    return np.dtype(dtype).itemsize
