"""Slice specs, which describe a block of a tensor in a checkpoint.

The ops `SaveV2` and `RestoreV2` write and read the block of a spec. An empty
string is the spec of the full tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# The type of `TensorShape.as_list()`. All sizes must be known.
Shape = Sequence[int | None]


def of_block(shape: Shape, offsets: Sequence[int], sizes: Shape) -> str:
    """Returns the slice spec of a block.

    >>> of_block([10, 4], offsets=[2, 1], sizes=[3, 2])
    '10 4 2,3:1,2'

    Args:
      shape: Shape of the full tensor.
      offsets: First index of the block along each axis.
      sizes: Shape of the block.
    """
    return tf.Variable.SaveSliceInfo(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
        # The spec does not contain the name of the tensor.
        full_name="",
        full_shape=list(shape),
        var_offset=list(offsets),
        var_shape=list(sizes),
    ).spec


def of_rows(shape: Shape, first: int, count: int) -> str:
    """Returns the slice spec of consecutive rows.

    >>> of_rows([10, 4], first=2, count=3)
    '10 4 2,3:0,4'

    Args:
      shape: Shape of the full tensor.
      first: Index of the first row.
      count: Number of rows.
    """
    row_shape = shape[1:]
    return of_block(
        shape, [first, *(0 for _ in row_shape)], [count, *row_shape]
    )
