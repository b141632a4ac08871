"""Converts the admission sketch of a vocabulary to another capacity.

The sketch counts keys without a row; cc/core/keys/sketch.h explains it. The
sketch does not contain the keys, so its cells are converted without them. A
key's segment and its two cells are intervals of the key's hashes. Each new cell
gets the maximum of all old cells whose intervals overlap its interval. Each old
cell of a key is among these cells, so the count of a key never decreases.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_layoutmap.vocabulary import bucket_layout

Array = np.ndarray[Any, Any]


def convert(cells: Array, sums: Array, num_buckets: int) -> tuple[Array, Array]:
    """Returns the sketch of a vocabulary with another number of buckets.

    If each old segment and each old cell is a union of new ones, the count of
    every key is equal in both sketches. This is the case if the number of
    segments does not decrease, and the new number of cells per segment is a
    multiple of the old one. Otherwise, a new cell can overlap several old
    cells, and the count of a key can be too high, but not too low.

    >>> old = np.zeros([1, 2, 256], np.uint8)
    >>> old[0, :, 3] = 5
    >>> new, sums = convert(old, np.array([64]), 2)
    >>> new[0, :, 3].tolist(), sums.tolist()
    ([5, 5], [64])

    Args:
      cells: Variable `SKETCH` of the old vocabulary, `[segments, 2, cells]`
        uint8.
      sums: Variable `SKETCH_SUMS` of the old vocabulary, `[segments]` int64:
        the number of ids in the current window of each segment.
      num_buckets: Number of buckets of the new vocabulary.

    Returns:
      The new values of both variables. The windows of new segments are
      completed to the same share as the least completed window of the old
      segments that a new segment overlaps.
    """
    num_segments, _, num_cells = bucket_layout.sketch_shape(num_buckets)
    old_segments, _, old_cells = cells.shape
    by_cell = _largest_of_overlapping(cells, num_cells, axis=2)
    new_cells = _largest_of_overlapping(by_cell, num_segments, axis=0)
    # The negative of the maximum of negative values is the minimum.
    least = -_largest_of_overlapping(-sums, num_segments, axis=0)
    # Windows consist of half as many ids as a row of the sketch has cells. The
    # result is less than the new window, because `least` is less than the old
    # window.
    new_sums = least * (num_cells // 2) // (old_cells // 2)
    return new_cells, new_sums.astype(sums.dtype)


def _largest_of_overlapping(values: Array, size: int, axis: int) -> Array:
    """Resizes an axis; returns the maximum of the overlapping old elements.

    Element `i` of an axis with `n` elements is the interval of the 32-bit
    hashes `x` with `x * n >> 32 == i`, which is approximately
    `[i / n, (i + 1) / n)` of the range of hashes.
    """
    old = values.shape[axis]
    if size == old:
        return values.copy()
    # The first hash of each new element, and of the element after the last one.
    # There are fewer than 2^28 elements, so the products are less than 2^63.
    first = ((np.arange(size + 1) << 32) + size - 1) // size
    begin = first[:-1] * old >> 32
    end = (first[1:] - 1) * old >> 32
    result = np.take(values, begin, axis=axis)
    for offset in range(1, int((end - begin).max()) + 1):
        other = np.take(values, np.minimum(begin + offset, end), axis=axis)
        np.maximum(result, other, out=result)
    return result
