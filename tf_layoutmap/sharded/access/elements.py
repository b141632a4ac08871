"""Reads and writes of parts of rows, by index tuples."""

from typing import Any

import tensorflow as tf

from tf_layoutmap.sharded.routing import checks, parts, routing
from tf_layoutmap.sharded.routing.shards import Shards

VERBS = ("add", "sub", "min", "max", "update")


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
        found = tf.gather_nd(rows, flat[:, 1:], batch_dims=1)
        if outside is not None:
            found = checks.nan_where(outside, found)
        inner = shards.shape[depth:]
        shape = indices.shape[:-1].concatenate(inner)
        full_shape = tf.concat([tf.shape(indices)[:-1], inner], axis=0)  # pyright: ignore[reportArgumentType, reportCallIssue] The stub of tf.concat takes no shapes.
        found = tf.reshape(found, full_shape)
        found.set_shape(shape)
        return found


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
      indices: `[..., k]`, int32 or int64, `k` from 1 to the table's rank.
        Repeated ones all apply; of several updates the last stays.
      updates: `indices.shape[:-1] + table.shape[k:]`.
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
            # XLA compiles no `min` and `max`, which would drop the poison.
            getattr(variable, f"scatter_nd_{verb}")(local, values)


def _checked_depth(shards: Shards, indices: Any) -> tuple[tf.Tensor, int]:
    indices = checks.ids_of(shards, indices)
    rank = shards.shape.rank
    depth = indices.shape[-1] if indices.shape.rank else None
    if depth is None or not 1 <= depth <= rank:
        raise ValueError(
            f"The last axis of `indices` must be known, and from 1 to {rank} "
            f"for table {shards.name!r} of shape {shards.shape}. Received: "
            f"shape {indices.shape}."
        )
    return indices, depth


def _inside(
    shards: Shards, flat: tf.Tensor, depth: int
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns checked indices; under XLA also which were outside."""
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
    """Returns one number per index tuple, equal for equal tuples."""
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
