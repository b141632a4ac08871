"""`sharded[...]`: the rows first, by what indexes axis 0, then all the rest.

Only the shards that own a wanted row are read. Python numbers and slices mean
what they mean for numpy; tensors, arrays and lists of row numbers or of bools
select rows.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.sharded import routing


def read(shards: routing.Shards, index: Any) -> tf.Tensor:
    """Returns `table[index]` as a tensor.

    Args:
      shards: The table, of rank at least 1.
      index: One item or a tuple of them: int, scalar tensor, slice (bounds
        may be tensors), `...`, `None`. What indexes axis 0 may also be an
        int or bool array, list or tensor. Ints and slices count from the end
        when negative.

    Raises:
      IndexError: A Python number is out of range, or a mask has another
        length than the table.
      TypeError: An item is of a kind that cannot index here.
      tf.errors.InvalidArgumentError: A row number in a tensor is outside.
    """
    items = index if isinstance(index, tuple) else (index,)
    num_new_axes, selector, rest = _split(shards, items)
    rows, drops_axis = _read_rows(shards, selector)
    if drops_axis:
        remaining = (None,) * num_new_axes + rest
    else:
        num_row_axes = rows.shape.rank - shards.row_shape.rank
        remaining = ((None,) * num_new_axes + (slice(None),) * num_row_axes
                     + rest)
    return rows[remaining]


def dense(shards: routing.Shards) -> tf.Tensor:
    """Returns the whole table as one tensor, rows in order."""
    if len(shards.variables) == 1:
        return tf.convert_to_tensor(shards.variables[0])
    return tf.concat([tf.convert_to_tensor(variable)
                      for variable in shards.variables], axis=0)


def _split(shards: routing.Shards,
           items: tuple) -> tuple[int, Any, tuple]:
    """Returns the new axes in front, what indexes axis 0, and the rest."""
    rank = 1 + shards.row_shape.rank
    num_used = sum(item is not Ellipsis and item is not None
                   for item in items)
    num_ellipses = sum(item is Ellipsis for item in items)
    if num_ellipses > 1:
        raise IndexError(
            f"An index must have at most one `...`. Received: {num_ellipses} "
            f"(table {shards.name!r}).")
    selected = [item for item in items
                if item is not None and item is not Ellipsis]
    mask_rank = (_array_rank(selected[0]) or 1
                 if selected and _is_mask(selected[0]) else 1)
    if num_used - 1 + mask_rank > rank and selected:
        raise IndexError(
            f"An index must have at most {rank} items for table "
            f"{shards.name!r} of shape {_shape(shards)}. "
            f"Received: {num_used}.")
    num_new_axes = 0
    selector, rest = slice(None), ()
    for place, item in enumerate(items):
        if item is None:
            num_new_axes += 1
        elif item is Ellipsis and num_used < rank:
            # It covers axis 0, and the rest still needs it for the others.
            rest = items[place:]
            break
        elif item is not Ellipsis:
            selector, rest = item, items[place + 1:]
            break
    for item in rest:
        if _is_array(item):
            raise TypeError(
                "Only axis 0 takes arrays, lists and tensors of rank 1 or "
                f"more. Received: {item!r} on a later axis (table "
                f"{shards.name!r}).")
    if _is_array(selector) and num_new_axes:
        raise TypeError(
            "New axes must come after an array, list or tensor. Received: "
            f"{num_new_axes} before it (table {shards.name!r}).")
    return num_new_axes, selector, rest


def _read_rows(shards: routing.Shards,
               selector: Any) -> tuple[tf.Tensor, bool]:
    """Returns the rows and whether axis 0 is gone from them."""
    if isinstance(selector, slice):
        if any(_is_tensor(bound) for bound in
               (selector.start, selector.stop, selector.step)):
            return routing.gather(shards, _slice_ids(shards, selector)), False
        return _read_slice(shards, selector), False
    if _is_tensor(selector) and selector.shape.rank is None:
        raise TypeError(
            "A tensor must have a known rank to be an index. Received: "
            f"unknown rank (table {shards.name!r}).")
    if isinstance(selector, (bool, np.bool_)) or (
            _is_mask(selector) and _array_rank(selector) == 0):
        raise TypeError(
            "An index must not be a single bool; use `tf.where`. Received: "
            f"{selector!r} (table {shards.name!r}).")
    if _is_mask(selector):
        return _read_mask(shards, selector), False
    if _is_array(selector) or _is_tensor(selector):
        ids = routing.check_ids(
            shards, selector, lowest=-shards.partition.num_rows)
        ids = tf.where(ids < 0, ids + shards.partition.num_rows, ids)
        return routing.gather(shards, ids), ids.shape.rank == 0
    return _read_row(shards, selector), True


def _read_row(shards: routing.Shards, row: Any) -> tf.Tensor:
    num_rows = shards.partition.num_rows
    try:
        row = range(num_rows)[row]
    except IndexError:
        raise IndexError(
            f"Row {row} is outside table {shards.name!r} with {num_rows} "
            "rows.") from None
    except TypeError:
        raise TypeError(
            "An index must be made of ints, slices, `...`, `None`, or an "
            f"array, list or tensor for axis 0. Received: {row!r} (table "
            f"{shards.name!r}).") from None
    owner, local_row = shards.partition.locate(row)
    # Not variable[local_row]: that reads, and often copies, the whole shard.
    return shards.variables[int(owner)].sparse_read(int(local_row))


def _read_slice(shards: routing.Shards, selector: slice) -> tf.Tensor:
    wanted = range(shards.partition.num_rows)[selector]
    is_reversed = wanted.step < 0
    if is_reversed:
        wanted = wanted[::-1]
    parts = []
    offsets = shards.partition.offsets
    for variable, start, stop in zip(shards.variables, offsets, offsets[1:]):
        # The first wanted row at or after `start`, by rounding up.
        skipped = max(0, -(-(start - wanted.start) // wanted.step))
        mine = wanted[skipped:]
        mine = mine[:max(0, -(-(stop - mine.start) // wanted.step))]
        if len(mine) == stop - start and mine:
            parts.append(tf.convert_to_tensor(variable))
        elif mine:
            parts.append(variable.sparse_read(tf.range(
                mine.start - start, mine[-1] + 1 - start, wanted.step)))
    if not parts:
        return tf.zeros([0, *shards.row_shape], shards.dtype)
    rows = parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
    return tf.reverse(rows, axis=[0]) if is_reversed else rows


def _slice_ids(shards: routing.Shards, selector: slice) -> tf.Tensor:
    """Returns the row numbers of a slice whose bounds are tensors, int64.

    The same rule as Python's `slice.indices`.
    """
    num_rows = tf.constant(shards.partition.num_rows, tf.int64)
    step = tf.cast(1 if selector.step is None else selector.step, tf.int64)
    forward = step > 0
    lowest = tf.where(forward, tf.constant(0, tf.int64), -1)
    highest = tf.where(forward, num_rows, num_rows - 1)

    def bound(value: Any, default: tf.Tensor) -> tf.Tensor:
        if value is None:
            return default
        value = tf.cast(value, tf.int64)
        value = tf.where(value < 0, value + num_rows, value)
        return tf.clip_by_value(value, lowest, highest)

    start = bound(selector.start, tf.where(forward, lowest, highest))
    stop = bound(selector.stop, tf.where(forward, highest, lowest))
    # tf.range refuses a limit on the wrong side of its start.
    stop = tf.where(forward, tf.maximum(start, stop),
                    tf.minimum(start, stop))
    return tf.range(start, stop, step)


def _read_mask(shards: routing.Shards, mask: Any) -> tf.Tensor:
    mask = tf.convert_to_tensor(mask, tf.bool)
    shape = _shape(shards)
    if not mask.shape.is_compatible_with(shape[:mask.shape.rank]):
        raise IndexError(
            f"A mask for table {shards.name!r} must have shape "
            f"{shape[:mask.shape.rank]}. Received: {mask.shape}.")
    mask = routing.check_shape(
        shards, mask, shape[:mask.shape.rank], shape[:mask.shape.rank],
        what="A mask")
    if mask.shape.rank > 1:
        # Single elements of every row: there is no row to route.
        return tf.boolean_mask(dense(shards), mask)
    return routing.gather(shards, tf.reshape(tf.where(mask), [-1]))


def _shape(shards: routing.Shards) -> tf.TensorShape:
    return tf.TensorShape([shards.partition.num_rows]).concatenate(
        shards.row_shape)


def _is_tensor(item: Any) -> bool:
    return tf.is_tensor(item) or isinstance(item, tf.Variable)


def _array_rank(item: Any) -> int | None:
    if _is_tensor(item):
        return item.shape.rank
    return np.ndim(item)


def _is_array(item: Any) -> bool:
    """Whether `item` selects several rows, each by number or by a bool."""
    if _is_tensor(item):
        return item.shape.rank != 0
    return isinstance(item, list) or (
        isinstance(item, np.ndarray) and item.ndim > 0)


def _is_mask(item: Any) -> bool:
    if not _is_array(item):
        return _is_tensor(item) and item.dtype == tf.bool
    if _is_tensor(item):
        return item.dtype == tf.bool
    return np.asarray(item).dtype == np.bool_
