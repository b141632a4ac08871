"""Interprets the items of an index, and returns the rows that they select."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.sharded.routing import checks
from tf_layoutmap.sharded.routing.checks import Shards


def split(shards: Shards, items: tuple) -> tuple[int, Any, tuple]:
    """Splits an index: new leading axes, item for axis 0, and other items.

    Raises:
      IndexError: If there are too many items, or several `...`.
      TypeError: If an array is used where it is not supported.
    """
    rank = 1 + shards.row_shape.rank
    num_used = sum(item is not Ellipsis and item is not None for item in items)
    num_ellipses = sum(item is Ellipsis for item in items)
    if num_ellipses > 1:
        raise IndexError(
            f"An index must have at most one `...`. Received: {num_ellipses} "
            f"(table {shards.name!r})."
        )
    selected = [
        item for item in items if item is not None and item is not Ellipsis
    ]
    mask_rank = (
        array_rank(selected[0]) or 1 if selected and is_mask(selected[0]) else 1
    )
    if num_used - 1 + mask_rank > rank and selected:
        raise IndexError(
            f"An index must have at most {rank} items for table "
            f"{shards.name!r} of shape {shards.shape}. "
            f"Received: {num_used}."
        )
    num_new_axes = 0
    selector, rest = slice(None), ()
    for position, item in enumerate(items):
        if item is None:
            num_new_axes += 1
        elif item is Ellipsis and num_used < rank:
            # `...` covers axis 0. `rest` also contains `...`, because `...`
            # also covers other axes.
            rest = items[position:]
            break
        elif item is not Ellipsis:
            selector, rest = item, items[position + 1 :]
            break
    for item in rest:
        if is_array(item):
            raise TypeError(
                "Arrays, lists and tensors of rank 1 or more must index axis "
                f"0. Received: {item!r} on a later axis (table "
                f"{shards.name!r})."
            )
    if is_array(selector) and num_new_axes:
        raise TypeError(
            "New axes must come after an array, list or tensor. Received: "
            f"{num_new_axes} new axes before it (table {shards.name!r})."
        )
    return num_new_axes, selector, rest


def selected_ids(shards: Shards, selector: Any) -> tuple[tf.Tensor, bool]:
    """Returns the selected rows, and whether the selector is one number."""
    if isinstance(selector, slice):
        if has_tensor_bound(selector):
            return _slice_ids(shards, selector), False
        wanted = range(shards.num_rows)[selector]
        return tf.range(
            wanted.start,
            wanted.start + len(wanted) * wanted.step,
            wanted.step,
            dtype=tf.int64,
        ), False
    if is_tensor(selector) and selector.shape.rank is None:
        raise TypeError(
            "A tensor that is used as an index must have a known rank. "
            f"Received: unknown rank (table {shards.name!r})."
        )
    if isinstance(selector, (bool, np.bool_)) or (
        is_mask(selector) and array_rank(selector) == 0
    ):
        raise TypeError(
            "An index must not be a single bool; use `tf.where`. Received: "
            f"{selector!r} (table {shards.name!r})."
        )
    if is_mask(selector):
        mask = checked_mask(shards, selector)
        return tf.reshape(tf.where(mask), [-1]), False
    if is_array(selector) or is_tensor(selector):
        ids = checks.ids_of(shards, selector)
        # Only ids from -num_rows to -1 are changed. An out-of-range id is not
        # changed, so that the error message contains the original id.
        if shards.num_rows > ids.dtype.max:
            ids = tf.cast(ids, tf.int64)
        ids = tf.where(
            tf.logical_and(ids < 0, ids >= -shards.num_rows),
            ids + shards.num_rows,
            ids,
        )
        return ids, ids.shape.rank == 0
    return tf.constant(row_number(shards, selector), tf.int64), True


def _slice_ids(shards: Shards, selector: slice) -> tf.Tensor:
    """Returns the int64 row numbers of a slice whose bounds are tensors.

    The bounds are interpreted as in Python's `slice.indices`.
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
    # tf.range would raise an error if the limit were on the wrong side of the
    # start.
    stop = tf.where(forward, tf.maximum(start, stop), tf.minimum(start, stop))
    return tf.range(start, stop, step)


def row_number(shards: Shards, row: Any) -> int:
    """Returns the row that a Python number selects, from 0 on.

    Raises:
      IndexError: If the number is out of range.
      TypeError: If `row` is not an integer.
    """
    num_rows = shards.num_rows
    try:
        return range(num_rows)[row]
    except IndexError:
        raise IndexError(
            f"Row {row} is outside table {shards.name!r} with {num_rows} rows."
        ) from None
    except TypeError:
        raise TypeError(
            "An index must consist of ints, slices, `...`, `None`, or an "
            f"array, list or tensor for axis 0. Received: {row!r} (table "
            f"{shards.name!r})."
        ) from None


def checked_mask(shards: Shards, mask: Any) -> tf.Tensor:
    """Checks the shape of a mask, and returns the mask as a tensor.

    Raises:
      IndexError: If the shape of the mask differs from the leading dimensions
        of the table's shape.
    """
    mask = tf.convert_to_tensor(mask, tf.bool)
    shape = shards.shape[: mask.shape.rank]
    if not mask.shape.is_compatible_with(shape):
        raise IndexError(
            f"A mask for table {shards.name!r} must have shape {shape}. "
            f"Received: {mask.shape}."
        )
    return checks.check_run_time_shape(
        shards, mask, shape, shape, label="A mask"
    )


def has_tensor_bound(selector: slice) -> bool:
    """Returns whether a bound or the step of a slice is a tensor."""
    return any(
        is_tensor(bound)
        for bound in (selector.start, selector.stop, selector.step)
    )


def is_tensor(item: Any) -> bool:
    """Returns whether `item` is a tensor or a variable."""
    return tf.is_tensor(item) or isinstance(item, tf.Variable)


def array_rank(item: Any) -> int | None:
    """Returns the rank of an item, or None if the rank is not known."""
    if is_tensor(item):
        return item.shape.rank
    return np.ndim(item)


def is_array(item: Any) -> bool:
    """Returns whether `item` selects several rows, by numbers or by bools."""
    if is_tensor(item):
        return item.shape.rank != 0
    return isinstance(item, list) or (
        isinstance(item, np.ndarray) and item.ndim > 0
    )


def is_mask(item: Any) -> bool:
    """Returns whether `item` selects by bools."""
    if not is_array(item):
        return is_tensor(item) and item.dtype == tf.bool
    if is_tensor(item):
        return item.dtype == tf.bool
    return np.asarray(item).dtype == np.bool_


def is_mask_of_elements(item: Any) -> bool:
    """Returns whether `item` selects single elements, not rows, by bools."""
    return is_mask(item) and (array_rank(item) or 0) > 1
