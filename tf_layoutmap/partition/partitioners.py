"""How many shards a table gets, from a number or from sizes in bytes."""

import math
from typing import Any

import numpy as np

from tf_layoutmap import _checks

__all__ = [
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
    if _checks.check_int(argument, value) < 1:
        raise ValueError(_checks.message(argument, "positive", value))
    return int(value)


def _check_shape(shape: Any, axis: Any) -> tuple[tuple[int, ...], int]:
    """Returns `shape` as a tuple and `axis` counted from the front."""
    try:
        sizes = shape.as_list() if hasattr(shape, "as_list") else list(shape)
    except (TypeError, ValueError):
        sizes = None
    if not sizes or any(size is None for size in sizes):
        raise ValueError(
            _checks.message(
                "shape", "fully defined, with at least one axis", shape
            )
        )
    sizes = tuple(_checks.check_int("shape", size, lowest=0) for size in sizes)
    rank = len(sizes)
    axis = _checks.check_int("axis", axis, lowest=-rank, highest=rank - 1)
    return sizes, axis % rank


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    # tf.DType is told by its attributes, so that this file needs no
    # TensorFlow; np.dtype does not know bfloat16 and tf.string.
    if getattr(dtype, "name", dtype) == "string":
        return bytes_per_string
    if hasattr(dtype, "as_numpy_dtype"):
        return dtype.size
    return np.dtype(dtype).itemsize
