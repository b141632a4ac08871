"""Reads and writes of `sharded[...]`, and of elements by index tuples.

A read first gathers the rows that the item for axis 0 selects, and then applies
the other items to these rows. Only shards that own a selected row are read.
Python numbers and slices have the same meaning as in numpy. A tensor, an array
or a list selects rows by their numbers or by bools.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.sharded import selectors
from tf_layoutmap.sharded.routing import checks, parts, routing
from tf_layoutmap.sharded.routing.checks import Shards, known_sizes

UPDATE_METHODS = ("add", "sub", "min", "max", "update")


def gather_nd(
    shards: Shards, indices: Any, name: str | None = None
) -> tf.Tensor:
    """Returns `tf.gather_nd(table, indices)`.

    Args:
      shards: The table.
      indices: `[..., k]`, int32 or int64, `k` from 1 to the table's rank.
      name: Name of the operations.

    Returns:
      Shape `indices.shape[:-1] + table.shape[k:]`.
    """
    with tf.name_scope(name or "sharded_gather_nd"):
        indices, depth = _checked_depth(shards, indices)
        if depth == 1:
            return routing.gather(shards, indices[..., 0])
        flat = tf.reshape(indices, [-1, depth])
        flat, outside = _inside(shards, flat, depth)
        rows = routing.gather_checked(shards, flat[:, 0])
        values = tf.gather_nd(rows, flat[:, 1:], batch_dims=1)
        if outside is not None:
            values = checks.nan_where(outside, values)
        inner = shards.shape[depth:]
        shape = indices.shape[:-1].concatenate(inner)
        full_shape = tf.concat([tf.shape(indices)[:-1], inner], axis=0)  # pyright: ignore[reportArgumentType, reportCallIssue] The stub of tf.concat takes no shapes.
        values = tf.reshape(values, full_shape)
        values.set_shape(shape)
        return values


def scatter_nd(
    shards: Shards,
    verb: str,
    indices: Any,
    updates: Any,
    name: str | None = None,
) -> None:
    """Applies `scatter_nd_<verb>` of `tf.Variable`.

    Args:
      shards: The table.
      verb: One of `VERBS`.
      indices: `[..., k]`, int32 or int64, `k` from 1 to the table's rank. If an
        index is repeated, all of its updates are applied. With the verb
        `update`, the last value remains.
      updates: Shape `indices.shape[:-1] + table.shape[k:]`.
      name: Name of the operations.
    """
    checks.check_devices_in_xla(shards)
    with tf.name_scope(name or f"scatter_nd_{verb}"):
        indices, depth = _checked_depth(shards, indices)
        updates = tf.convert_to_tensor(updates, dtype=shards.dtype)
        inner = shards.shape[depth:]
        shape = indices.shape[:-1].concatenate(inner)
        checks.check_shape(shards, updates, shape, "Updates")
        if depth == 1 and updates.shape.rank != 0:
            routing.scatter(shards, verb, indices[..., 0], updates)
            return
        flat = tf.reshape(indices, [-1, depth])
        flat, outside = _inside(shards, flat, depth)
        full_shape = tf.concat([tf.shape(indices)[:-1], inner], axis=0)  # pyright: ignore[reportArgumentType, reportCallIssue] The stub of tf.concat takes no shapes.
        updates = checks.check_run_time_shape(
            shards, updates, shape, full_shape, "Updates"
        )
        updates = tf.reshape(updates, [-1, *inner.as_list()])
        if outside is not None:
            updates = checks.nan_where(tf.reduce_any(outside), updates)
        if verb == "update":
            updates = tf.gather(
                updates, parts.last_of_equal(_numbers(shards, flat, depth))
            )
        for variable, (local, values) in zip(
            shards.variables, _by_shard(shards, flat, updates)
        ):
            # NaN in `updates` marks an invalid index. `min` and `max` would
            # drop NaN, but XLA does not compile these two methods.
            getattr(variable, f"scatter_nd_{verb}")(local, values)


def _checked_depth(shards: Shards, indices: Any) -> tuple[tf.Tensor, int]:
    indices = checks.ids_of(shards, indices)
    rank = shards.shape.rank
    depth = indices.shape[-1] if indices.shape.rank else None
    if depth is None or not 1 <= depth <= rank:
        raise ValueError(
            "The size of the last axis of `indices` must be known and from 1 "
            f"to {rank} for table {shards.name!r} of shape {shards.shape}. "
            f"Received: shape {indices.shape}."
        )
    return indices, depth


def _inside(
    shards: Shards, flat: tf.Tensor, depth: int
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns checked indices.

    In XLA, the function also returns a mask of the invalid indices.
    """
    columns = tf.unstack(flat, num=depth, axis=1)
    if not checks.in_xla():
        return _stack(
            [
                checks.check_ids(shards, column, axis=axis)
                for axis, column in enumerate(columns)
            ]
        ), None
    poisoned = [
        checks.poison_ids(shards, column, axis)
        for axis, column in enumerate(columns)
    ]
    outside = tf.reduce_any(tf.stack([wrong for _, wrong in poisoned]), axis=0)
    return _stack([column for column, _ in poisoned]), outside


def _stack(columns: list[tf.Tensor]) -> tf.Tensor:
    if len({column.dtype for column in columns}) > 1:
        columns = [tf.cast(column, tf.int64) for column in columns]
    return tf.stack(columns, axis=1)


def _numbers(shards: Shards, flat: tf.Tensor, depth: int) -> tf.Tensor:
    """Returns one number per index tuple. Equal tuples have equal numbers."""
    number = tf.zeros_like(flat[:, 0], tf.int64)
    for axis, size in zip(range(depth), shards.sizes):
        number = number * size + tf.cast(flat[:, axis], tf.int64)
    return number


def _by_shard(
    shards: Shards, flat: tf.Tensor, updates: tf.Tensor
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    num_shards = len(shards.variables)
    if num_shards == 1 and shards.partition.is_contiguous:
        return [(flat, updates)]
    columns = tf.unstack(flat, axis=1)
    owners, columns[shards.axis] = parts.assign(
        shards.partition, columns[shards.axis]
    )
    local = tf.stack(columns, axis=1)
    return list(
        zip(
            tf.dynamic_partition(local, owners, num_shards),
            tf.dynamic_partition(updates, owners, num_shards),
        )
    )


def read(shards: Shards, index: Any) -> tf.Tensor:
    """Returns `table[index]` as a tensor.

    Args:
      shards: The table, of rank at least 1.
      index: One item or a tuple of items: int, scalar tensor, slice (bounds
        may be tensors), `...`, `None`. The item for axis 0 may also be an int
        or bool array, list or tensor. Negative ints and negative bounds of
        slices count from the end.

    Raises:
      IndexError: If a Python number is out of range, or a mask does not have
        the length of the table.
      TypeError: If an item has an unsupported type.
      tf.errors.InvalidArgumentError: If a row number in a tensor is out of
        range.
    """
    checks.check_devices_in_xla(shards)
    items = index if isinstance(index, tuple) else (index,)
    num_new_axes, selector, rest = selectors.split(shards, items)
    rows, drops_axis = _read_rows(shards, selector)
    if drops_axis:
        remaining = (None,) * num_new_axes + rest
    else:
        num_row_axes = rows.shape.rank - shards.row_shape.rank
        remaining = (
            (None,) * num_new_axes + (slice(None),) * num_row_axes + rest
        )
    return rows[remaining]


def write(shards: Shards, verb: str, index: Any, value: Any) -> None:
    """Sets, adds to or subtracts from `table[index]`.

    Args:
      shards: The table.
      verb: `"update"`, `"add"` or `"sub"`.
      index: Same as for `read`. If an array contains a row twice, the row is
        written twice, in order.
      value: A value whose shape broadcasts to the shape of `table[index]`.

    Raises:
      IndexError, TypeError: Same as for `read`.
      ValueError: If `value` does not broadcast to the shape of `table[index]`.
        No shard is written.
    """
    checks.check_devices_in_xla(shards)
    items = index if isinstance(index, tuple) else (index,)
    num_new_axes, selector, rest = selectors.split(shards, items)
    value = tf.convert_to_tensor(value, dtype=shards.dtype)
    if selectors.is_mask_of_elements(selector):
        if rest:
            raise TypeError(
                "A mask of single elements must be the only item of an index "
                f"to assign to. Received: {len(rest)} items after the mask "
                f"(table {shards.name!r})."
            )
        mask = selectors.checked_mask(shards, selector)
        indices = tf.where(mask)
        rest_of_shape = shards.shape[mask.shape.rank :]
        shape = tf.concat([tf.shape(indices)[:1], rest_of_shape], axis=0)  # pyright: ignore[reportArgumentType, reportCallIssue] The stub of tf.concat takes no shapes.
        scatter_nd(shards, verb, indices, _broadcast(shards, value, shape))
        return
    ids, drops_axis = selectors.selected_ids(shards, selector)
    # Each element of a row gets a number. Indexing these numbers with `rest`
    # selects the elements to write.
    row_shape = known_sizes(shards)[1:]
    numbers = tf.reshape(tf.range(shards.row_shape.num_elements()), row_shape)
    if rest:
        numbers = numbers[rest]
    shape = tf.concat(
        [
            [1] * num_new_axes,
            [] if drops_axis else tf.shape(ids),
            tf.shape(numbers),
        ],
        axis=0,
    )
    value = _broadcast(shards, value, tf.cast(shape, tf.int32))
    flat_ids = tf.reshape(ids, [-1])
    if all(
        item is Ellipsis
        or item is None
        or isinstance(item, slice)
        and item == slice(None)
        for item in rest
    ):
        routing.scatter(
            shards,
            verb,
            flat_ids,
            tf.reshape(
                value, tf.concat([tf.shape(flat_ids), row_shape], axis=0)
            ),
        )
        return
    positions = tf.transpose(
        tf.unravel_index(
            tf.reshape(numbers, [-1]), tf.constant(row_shape, tf.int32)
        )
    )
    num_ids, num_positions = tf.size(flat_ids), tf.shape(positions)[0]
    indices = tf.concat(
        [
            tf.repeat(tf.cast(flat_ids, tf.int64), num_positions)[
                :, tf.newaxis
            ],
            tf.tile(tf.cast(positions, tf.int64), [num_ids, 1]),
        ],
        axis=1,
    )
    indices.set_shape([None, 1 + len(row_shape)])
    scatter_nd(shards, verb, indices, tf.reshape(value, [-1]))


def dense(shards: Shards) -> tf.Tensor:
    """Returns the full table as one tensor, with its rows in order."""
    checks.check_devices_in_xla(shards)
    joined = (
        tf.convert_to_tensor(shards.variables[0])
        if len(shards.variables) == 1
        else tf.concat(
            [tf.convert_to_tensor(variable) for variable in shards.variables],
            axis=shards.axis,
        )
    )
    if shards.partition.is_contiguous:
        return joined
    owners, local_rows = parts.assign(
        shards.partition, tf.range(shards.num_rows, dtype=tf.int64)
    )
    starts = tf.constant(shards.partition.offsets[:-1], tf.int64)
    return tf.gather(joined, tf.gather(starts, owners) + local_rows)


def _read_rows(shards: Shards, selector: Any) -> tuple[tf.Tensor, bool]:
    """Returns the selected rows, and whether the selector removes axis 0."""
    if isinstance(selector, slice) and not selectors.has_tensor_bound(selector):
        return _read_slice(shards, selector), False
    if selectors.is_mask_of_elements(selector):
        return _read_mask(shards, selector), False
    if (
        shards.axis == 0
        and shards.partition.placement != "callable"
        and not isinstance(selector, slice)
        and not selectors.is_array(selector)
        and not selectors.is_tensor(selector)
        and not isinstance(selector, (bool, np.bool_))
    ):
        owner, local_row = shards.partition.locate(
            selectors.row_number(shards, selector)
        )
        # A gather is used, because variable[local_row] would read, and often
        # copy, the complete shard.
        return routing.gather_checked(
            shards.single_shard(int(owner)), tf.constant(local_row)
        ), True
    ids, drops_axis = selectors.selected_ids(shards, selector)
    return routing.gather(shards, ids), drops_axis


def _read_slice(shards: Shards, selector: slice) -> tf.Tensor:
    if shards.axis == 1 or not shards.partition.is_contiguous:
        if selector == slice(None):
            return dense(shards)
        ids, _ = selectors.selected_ids(shards, selector)
        return routing.gather(shards, ids)
    wanted = range(shards.num_rows)[selector]
    is_reversed = wanted.step < 0
    if is_reversed:
        wanted = wanted[::-1]
    blocks = []
    offsets = shards.partition.offsets
    for number, (start, stop) in enumerate(zip(offsets, offsets[1:])):
        # The number is rounded up to the first selected row at or after
        # `start`.
        skipped = max(0, -(-(start - wanted.start) // wanted.step))
        mine = wanted[skipped:]
        mine = mine[: max(0, -(-(stop - mine.start) // wanted.step))]
        if len(mine) == stop - start and mine:
            blocks.append(tf.convert_to_tensor(shards.variables[number]))
        elif mine:
            blocks.append(
                routing.gather_checked(
                    shards.single_shard(number),
                    tf.range(
                        mine.start - start, mine[-1] + 1 - start, wanted.step
                    ),
                )
            )
    if not blocks:
        return tf.zeros([0, *shards.row_shape], shards.dtype)
    rows = blocks[0] if len(blocks) == 1 else tf.concat(blocks, axis=0)
    return tf.reverse(rows, axis=[0]) if is_reversed else rows


def _read_mask(shards: Shards, mask: Any) -> tf.Tensor:
    mask = selectors.checked_mask(shards, mask)
    if mask.shape.rank > 1:
        # A mask of rank 2 or more selects single elements of all rows, so the
        # complete table is read.
        return tf.boolean_mask(dense(shards), mask)
    return routing.gather(shards, tf.reshape(tf.where(mask), [-1]))


def _broadcast(shards: Shards, value: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    known = tf.get_static_value(shape)
    if known is not None and value.shape.is_fully_defined():
        try:
            fits = np.broadcast_shapes(
                tuple(known_sizes(value)), tuple(known)
            ) == tuple(known)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                "A value must broadcast to the indexed elements, of shape "
                f"{tuple(known.tolist())}. Received: shape {value.shape} "
                f"(table {shards.name!r})."
            )
    return tf.broadcast_to(value, shape)
