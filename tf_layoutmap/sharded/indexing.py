"""`sharded[...]`: the rows first, by what indexes axis 0, then all the rest.

Only the shards that own a wanted row are read. Python numbers and slices mean
what they mean for numpy; tensors, arrays and lists of row numbers or of bools
select rows.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.sharded import checks, elements, parts, routing
from tf_layoutmap.sharded.shards import Shards


def read(shards: Shards, index: Any) -> tf.Tensor:
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


def write(shards: Shards, verb: str, index: Any, value: Any) -> None:
    """Sets, adds to or subtracts from `table[index]`.

    Args:
      shards: The table.
      verb: `"update"`, `"add"` or `"sub"`.
      index: As for `read`. Rows that an array names twice are written twice,
        in order.
      value: Of a shape that broadcasts to that of `table[index]`.

    Raises:
      IndexError, TypeError: As `read`.
      ValueError: `value` does not broadcast. Nothing is written.
    """
    items = index if isinstance(index, tuple) else (index,)
    num_new_axes, selector, rest = _split(shards, items)
    value = tf.convert_to_tensor(value, dtype=shards.dtype)
    if _is_mask(selector) and (_array_rank(selector) or 0) > 1:
        if rest:
            raise TypeError(
                "A mask of single elements must stand alone to be assigned. "
                f"Received: {len(rest)} items after it (table "
                f"{shards.name!r}).")
        mask = _checked_mask(shards, selector)
        indices = tf.where(mask)
        shape = tf.concat(
            [tf.shape(indices)[:1], shards.shape[mask.shape.rank:]], axis=0)
        elements.scatter_nd(shards, verb, indices, _broadcast(
            shards, value, shape))
        return
    ids, drops_axis = _selected_ids(shards, selector)
    # Every element of a row has a number; indexing them tells which to write.
    row_shape = shards.row_shape.as_list()
    numbers = tf.reshape(tf.range(shards.row_shape.num_elements()), row_shape)
    if rest:
        numbers = numbers[rest]
    shape = tf.concat([[1] * num_new_axes,
                       [] if drops_axis else tf.shape(ids),
                       tf.shape(numbers)], axis=0)
    value = _broadcast(shards, value, tf.cast(shape, tf.int32))
    flat_ids = tf.reshape(ids, [-1])
    if all(item is Ellipsis or item is None or isinstance(item, slice)
           and item == slice(None) for item in rest):
        routing.scatter(shards, verb, flat_ids, tf.reshape(
            value, tf.concat([tf.shape(flat_ids), row_shape], axis=0)))
        return
    places = tf.transpose(tf.unravel_index(
        tf.reshape(numbers, [-1]), tf.constant(row_shape, tf.int32)))
    num_ids, num_places = tf.size(flat_ids), tf.shape(places)[0]
    indices = tf.concat([
        tf.repeat(tf.cast(flat_ids, tf.int64), num_places)[:, tf.newaxis],
        tf.tile(tf.cast(places, tf.int64), [num_ids, 1])], axis=1)
    indices.set_shape([None, 1 + len(row_shape)])
    elements.scatter_nd(shards, verb, indices, tf.reshape(value, [-1]))


def dense(shards: Shards) -> tf.Tensor:
    """Returns the whole table as one tensor, rows in order."""
    whole = (tf.convert_to_tensor(shards.variables[0])
             if len(shards.variables) == 1 else
             tf.concat([tf.convert_to_tensor(variable)
                        for variable in shards.variables], axis=shards.axis))
    if shards.partition.is_contiguous:
        return whole
    owners, local_rows = parts.assign(
        shards.partition, tf.range(shards.num_rows, dtype=tf.int64))
    starts = tf.constant(shards.partition.offsets[:-1], tf.int64)
    return tf.gather(whole, tf.gather(starts, owners) + local_rows)


def _split(shards: Shards,
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
            f"{shards.name!r} of shape {shards.shape}. "
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


def _read_rows(shards: Shards,
               selector: Any) -> tuple[tf.Tensor, bool]:
    """Returns the rows and whether axis 0 is gone from them."""
    if isinstance(selector, slice) and not _has_tensor_bound(selector):
        return _read_slice(shards, selector), False
    if _is_mask(selector) and (_array_rank(selector) or 0) > 1:
        return _read_mask(shards, selector), False
    if (shards.axis == 0 and shards.partition.placement != "callable"
            and not isinstance(selector, slice)
            and not _is_array(selector) and not _is_tensor(selector)
            and not isinstance(selector, (bool, np.bool_))):
        owner, local_row = shards.partition.locate(
            _row_number(shards, selector))
        # Not variable[local_row]: that reads, and often copies, the shard.
        return routing.gather_checked(
            shards.alone(int(owner)), tf.constant(local_row)), True
    ids, drops_axis = _selected_ids(shards, selector)
    return routing.gather(shards, ids), drops_axis


def _selected_ids(shards: Shards, selector: Any) -> tuple[tf.Tensor, bool]:
    """Returns the rows that are selected, and whether it is one by number."""
    if isinstance(selector, slice):
        if _has_tensor_bound(selector):
            return _slice_ids(shards, selector), False
        wanted = range(shards.num_rows)[selector]
        return tf.range(wanted.start, wanted.start + len(wanted) * wanted.step,
                        wanted.step, dtype=tf.int64), False
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
        mask = _checked_mask(shards, selector)
        return tf.reshape(tf.where(mask), [-1]), False
    if _is_array(selector) or _is_tensor(selector):
        ids = checks.ids_of(shards, selector)
        # Only ids from -num_rows to -1 become others, so that what is outside
        # is outside still, and refused by its own number.
        if shards.num_rows > ids.dtype.max:
            ids = tf.cast(ids, tf.int64)
        ids = tf.where(tf.logical_and(ids < 0, ids >= -shards.num_rows),
                       ids + shards.num_rows, ids)
        return ids, ids.shape.rank == 0
    return tf.constant(_row_number(shards, selector), tf.int64), True


def _row_number(shards: Shards, row: Any) -> int:
    num_rows = shards.num_rows
    try:
        return range(num_rows)[row]
    except IndexError:
        raise IndexError(
            f"Row {row} is outside table {shards.name!r} with {num_rows} "
            "rows.") from None
    except TypeError:
        raise TypeError(
            "An index must be made of ints, slices, `...`, `None`, or an "
            f"array, list or tensor for axis 0. Received: {row!r} (table "
            f"{shards.name!r}).") from None


def _has_tensor_bound(selector: slice) -> bool:
    return any(_is_tensor(bound) for bound in
               (selector.start, selector.stop, selector.step))


def _read_slice(shards: Shards, selector: slice) -> tf.Tensor:
    if shards.axis == 1 or not shards.partition.is_contiguous:
        if selector == slice(None):
            return dense(shards)
        return routing.gather(shards, _selected_ids(shards, selector)[0])
    wanted = range(shards.num_rows)[selector]
    is_reversed = wanted.step < 0
    if is_reversed:
        wanted = wanted[::-1]
    blocks = []
    offsets = shards.partition.offsets
    for number, (start, stop) in enumerate(zip(offsets, offsets[1:])):
        # The first wanted row at or after `start`, by rounding up.
        skipped = max(0, -(-(start - wanted.start) // wanted.step))
        mine = wanted[skipped:]
        mine = mine[:max(0, -(-(stop - mine.start) // wanted.step))]
        if len(mine) == stop - start and mine:
            blocks.append(tf.convert_to_tensor(shards.variables[number]))
        elif mine:
            blocks.append(routing.gather_checked(
                shards.alone(number), tf.range(
                    mine.start - start, mine[-1] + 1 - start, wanted.step)))
    if not blocks:
        return tf.zeros([0, *shards.row_shape], shards.dtype)
    rows = blocks[0] if len(blocks) == 1 else tf.concat(blocks, axis=0)
    return tf.reverse(rows, axis=[0]) if is_reversed else rows


def _slice_ids(shards: Shards, selector: slice) -> tf.Tensor:
    """Returns the row numbers of a slice whose bounds are tensors, int64.

    The same rule as Python's `slice.indices`.
    """
    num_rows = tf.constant(shards.num_rows, tf.int64)
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


def _read_mask(shards: Shards, mask: Any) -> tf.Tensor:
    mask = _checked_mask(shards, mask)
    if mask.shape.rank > 1:
        # Single elements of every row: there is no row to route.
        return tf.boolean_mask(dense(shards), mask)
    return routing.gather(shards, tf.reshape(tf.where(mask), [-1]))


def _checked_mask(shards: Shards, mask: Any) -> tf.Tensor:
    mask = tf.convert_to_tensor(mask, tf.bool)
    shape = shards.shape[:mask.shape.rank]
    if not mask.shape.is_compatible_with(shape):
        raise IndexError(
            f"A mask for table {shards.name!r} must have shape {shape}. "
            f"Received: {mask.shape}.")
    return checks.check_run_time_shape(shards, mask, shape, shape,
                                       what="A mask")


def _broadcast(shards: Shards, value: tf.Tensor,
               shape: tf.Tensor) -> tf.Tensor:
    known = tf.get_static_value(shape)
    if known is not None and value.shape.is_fully_defined():
        try:
            fits = np.broadcast_shapes(
                tuple(value.shape), tuple(known)) == tuple(known)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                "A value must broadcast to what is indexed, shape "
                f"{tuple(known.tolist())}. Received: shape {value.shape} "
                f"(table {shards.name!r}).")
    return tf.broadcast_to(value, shape)


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
