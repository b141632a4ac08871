"""Reads and writes of single rows by global ids.

If all shards are on the CPU of this process, one fused op checks the ids and
reads or writes the rows. Otherwise the functions first check all ids and
values, then assign the ids to parts (`parts.py`), and then access the shards.
If a call raises an error, no shard is changed. A table with one shard needs no
routing. In exported graphs, all tables have one shard.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.sharded.routing import checks, parts
from tf_layoutmap.sharded.routing.checks import Shards

VERBS = ("add", "sub", "mul", "div", "min", "max", "update")
SCATTER_VERBS = tuple(f"scatter_{verb}" for verb in VERBS)


def gather(shards: Shards, ids: Any, name: str | None = None) -> tf.Tensor:
    """Returns the rows of `ids`, in the order of `ids`.

    Args:
      shards: The table.
      ids: Global rows: any shape, int32 or int64.
      name: Name of the operations.

    Returns:
      Shape `ids.shape + row_shape`, dtype of the table.

    Raises:
      TypeError: If `ids` are not int32 or int64.
      tf.errors.InvalidArgumentError: If an id is out of range.
    """
    with tf.name_scope(name or "sharded_gather"):
        ids = checks.ids_of(shards, ids)
        table_parts = _parts_of(shards)
        outside = None
        if not _checks_ids_itself(shards, table_parts):
            if checks.in_xla():
                ids, outside = checks.poison_ids(shards, ids)
            else:
                ids = checks.check_ids(shards, ids)
        rows = _gather_from(shards, table_parts, ids)
        if outside is not None:
            rows = checks.nan_where(outside, rows)
        return tf.identity(rows, name="rows")


def gather_checked(shards: Shards, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of `ids`. The caller must have checked the ids."""
    return _gather_from(shards, _parts_of(shards), ids)


def _gather_from(
    shards: Shards, table_parts: Sequence[parts.Part], ids: tf.Tensor
) -> tf.Tensor:
    """Returns the rows of valid ids from the parts of a table."""
    if shards.axis == 1:
        columns = shards.single_shards()
        if len(columns) == 1:
            return gather_checked(columns[0], ids)
        if ids.shape.rank is None:
            rows = _gather_from(shards, table_parts, tf.reshape(ids, [-1]))
            return tf.reshape(
                rows, tf.concat([tf.shape(ids), shards.row_shape], axis=0)
            )
        return tf.concat(
            [gather_checked(column, ids) for column in columns],
            axis=ids.shape.rank,
        )
    if _needs_no_route(shards, table_parts):
        return parts.gather(table_parts[0], ids)
    if len(table_parts) > 1 and (checks.in_vectorized_map() or checks.in_xla()):
        rows = _gather_masked(shards, table_parts, tf.reshape(ids, [-1]))
        return _in_shape_of(shards, rows, ids)
    route = parts.route(shards, table_parts, tf.reshape(ids, [-1]))
    if len(table_parts) == 1:
        rows = parts.gather(table_parts[0], route.rows[0])
    else:
        rows = tf.dynamic_stitch(
            route.positions,
            [
                parts.gather(part, part_rows)
                for part, part_rows in zip(table_parts, route.rows)
            ],
        )
    return _in_shape_of(shards, rows, ids)


def _in_shape_of(shards: Shards, rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Reshapes `[num_ids, ...]` rows to `ids.shape + row_shape`."""
    rows = tf.reshape(
        rows, tf.concat([tf.shape(ids), shards.row_shape], axis=0)
    )
    rows.set_shape(ids.shape.concatenate(shards.row_shape))
    return rows


def _gather_masked(
    shards: Shards, table_parts: Sequence[parts.Part], flat_ids: tf.Tensor
) -> tf.Tensor:
    """Gathers rows. The shapes of all tensors are independent of the ids.

    tf.vectorized_map stacks the tensors of its iterations, which must therefore
    have equal shapes. XLA compiles `tf.dynamic_stitch` only for known
    positions. Each part reads one row for each id. If an id belongs to another
    part, the part reads its own first row.
    """
    rows, numbers = parts.locate(shards, table_parts, flat_ids)
    rank = 1 + shards.row_shape.rank
    gathered = None
    for number, part in enumerate(table_parts):
        if not part.shards.num_rows:
            continue
        is_here = tf.equal(numbers, number)
        here = parts.gather(part, tf.where(is_here, rows, tf.zeros_like(rows)))
        gathered = (
            here
            if gathered is None
            else tf.where(
                tf.reshape(is_here, [-1] + [1] * (rank - 1)), here, gathered
            )
        )
    if gathered is None:  # The table has no rows.
        return tf.zeros(
            tf.concat([tf.shape(flat_ids), shards.row_shape], axis=0),
            shards.dtype,
        )
    return gathered


def scatter(
    shards: Shards, verb: str, ids: Any, values: Any, name: str | None = None
) -> None:
    """Applies a scatter verb to the rows of `ids`.

    Args:
      shards: The table.
      verb: One of `VERBS`.
      ids: Global rows: any shape, int32 or int64. If an id is repeated, all its
        updates are applied in order, and for `update` the last value remains.
      values: Tensor of shape `ids.shape + row_shape`, or a scalar for all
        elements.
      name: Name of the operations.

    Raises:
      TypeError: If `ids` are not int32 or int64.
      ValueError: If the shape or the dtype of `values` is wrong.
      tf.errors.InvalidArgumentError: If an id is out of range, a shape that is
        known only at run time is wrong, or integers are divided by 0. No shard
        is written.
    """
    with tf.name_scope(name or f"scatter_{verb}"):
        ids = checks.ids_of(shards, ids)
        values = tf.convert_to_tensor(values, dtype=shards.dtype)
        is_scalar = values.shape.rank == 0
        shape = ids.shape.concatenate(shards.row_shape)
        if not is_scalar:
            checks.check_shape(shards, values, shape)
        table_parts = _parts_of(shards)
        if _checks_ids_itself(shards, table_parts):
            return parts.scatter(table_parts[0], verb, ids, values)
        outside = None
        if checks.in_xla():
            ids, outside = checks.poison_ids(shards, ids)
            # If an id is invalid, all values become NaN, because the invalid id
            # itself has no row that could become NaN.
            values = checks.nan_where(tf.reduce_any(outside), values)
        else:
            ids = checks.check_ids(shards, ids)
        if not is_scalar:
            full_shape = tf.concat([tf.shape(ids), shards.row_shape], axis=0)
            if values.shape.rank is None:
                # Whether `values` is a scalar is known only at run time.
                values = tf.cond(
                    tf.equal(tf.rank(values), 0),
                    lambda: tf.broadcast_to(values, full_shape),
                    lambda: tf.identity(values),
                )
            values = checks.check_run_time_shape(
                shards, values, shape, full_shape
            )
        if verb == "div" and shards.dtype.is_integer:
            values = checks.check_divisors(shards, values)
        flat_ids = tf.reshape(ids, [-1])
        if not is_scalar:
            values = tf.reshape(
                values,
                tf.concat([tf.shape(flat_ids), shards.row_shape], axis=0),
            )
            if verb == "update":
                values = tf.gather(values, parts.last_of_equal(flat_ids))
        _scatter_to(shards, table_parts, verb, flat_ids, values)
        if (
            outside is not None
            and verb in ("min", "max")
            and shards.dtype.is_floating
        ):
            _scatter_to(
                shards,
                table_parts,
                "add",
                flat_ids,
                checks.poison_to_add(outside, values),
            )


def _scatter_to(
    shards: Shards,
    table_parts: Sequence[parts.Part],
    verb: str,
    flat_ids: tf.Tensor,
    values: tf.Tensor,
) -> None:
    """Writes the rows of valid ids to the parts of a table."""
    is_scalar = values.shape.rank == 0
    if shards.axis == 1:
        columns = shards.single_shards()
        blocks = (
            [values] * len(columns)
            if is_scalar
            else tf.split(values, shards.partition.sizes, axis=1)
        )
        for column, block in zip(columns, blocks):
            _scatter_to(column, _parts_of(column), verb, flat_ids, block)
        return
    if _needs_no_route(shards, table_parts):
        parts.scatter(table_parts[0], verb, flat_ids, values)
        return
    route = parts.route(shards, table_parts, flat_ids)
    for part, rows, positions in zip(table_parts, route.rows, route.positions):
        if not part.shards.num_rows:
            continue  # XLA does not compile a scatter into no rows.
        parts.scatter(
            part,
            verb,
            rows,
            values
            if is_scalar or positions is None
            else tf.gather(values, positions),
        )


def _parts_of(shards: Shards) -> Sequence[parts.Part]:
    """Returns the parts of a table; empty if its columns are sharded.

    A call of `gather` or `scatter` calls this function once.
    """
    return [] if shards.axis == 1 else parts.parts_of(shards)


def _checks_ids_itself(
    shards: Shards, table_parts: Sequence[parts.Part]
) -> bool:
    """Returns whether one fused op accesses all shards and checks the ids."""
    return _needs_no_route(shards, table_parts) and table_parts[0].is_fused


def _needs_no_route(shards: Shards, table_parts: Sequence[parts.Part]) -> bool:
    return len(table_parts) == 1 and shards.partition.placement != "callable"
