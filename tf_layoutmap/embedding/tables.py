"""Creates tables and their slot variables.

They are plain variables on the host, under every strategy: one copy that all
replicas look into. A table that is partitioned is a `ShardedVariable`; the
engine reads its shards in place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private, partition
from tf_layoutmap.embedding import config
from tf_layoutmap.sharded import ShardedVariable, initial_value

HOST = "/device:CPU:0"
PARAMETERS = "parameters"
# Of a table with 16-bit rows: how often it was updated. The rounding depends
# on it, so it is saved with the table.
ROUNDING_STEPS = "rounding_steps"

Partitioner = Callable[..., Sequence[int]]


def create_tables(
    spec: config.EmbeddingSpec, partitioner: Partitioner | None,
) -> dict[str, dict[str, Any]]:
    """Creates the variables of all tables.

    Args:
      spec: The tables.
      partitioner: None, or a callable as those of
        `tf.distribute.experimental.partitioners`: of `shape` and `dtype`,
        giving the number of shards of each axis.

    Returns:
      `{table name: {"parameters": rows, slot name: slot variable}}`. Each is
      a `tf.Variable`, or a `ShardedVariable` where the partitioner cuts the
      table into more than one shard. A table with 16-bit rows also has
      `"rounding_steps"`, an int64 scalar.

    Raises:
      ValueError: If an initializer gives another shape, or values that the
        dtype of the table cannot hold, or the partitioner cuts along the
        columns; all name the table.
    """
    variables = {}
    with tf.device(HOST), tf.name_scope(""):
        for table in spec.tables:
            num_shards = _num_shards(table, partitioner)
            variables[table.name] = _create_table(table, num_shards)
    return variables


def shards_of(variable: Any) -> list[tf.Variable]:
    """Returns the shards of a table, in order; one if it is not cut."""
    return list(getattr(variable, "variables", None) or [variable])


def _num_shards(table: config.TableSpec, partitioner) -> int:
    if partitioner is None:
        return 1
    parts = [int(part) for part in partitioner(
        shape=tf.TensorShape([table.num_rows, table.dim]), dtype=tf.float32)]
    if len(parts) != 2 or parts[1] != 1 or parts[0] < 1:
        raise ValueError(
            "Argument `partitioner` must cut a table along its rows only, "
            "[num_shards, 1]. Received: "
            f"{parts} (table {table.name!r}).")
    # A shard without rows has nothing to hold.
    return min(parts[0], table.num_rows)


def _create_table(table: config.TableSpec, num_shards: int):
    shape = (table.num_rows, table.dim)
    cut = partition.RowPartition.div(table.num_rows, num_shards)
    initializer = bind_shape(table.initializer, shape)
    rows = [_in_dtype(table, initial_value.of_shard(
        initializer, shape, tf.float32, cut, shard, table.name))
        for shard in range(num_shards)]
    # The engine trains a table that has an optimizer; a tape and a second
    # optimizer must not find it among the trainable variables.
    variables = {PARAMETERS: _create_variable(
        table.name, rows, trainable=table.optimizer is None)}
    for slot in table.optimizer.slots if table.optimizer else ():
        variables[slot.name] = _create_variable(
            f"{table.name}/{slot.name}",
            [tf.fill([size, slot.dim(table.dim)],
                     tf.constant(slot.initial_value)) for size in cut.sizes],
            trainable=False)
    if table.is_half and table.optimizer is not None:
        variables[ROUNDING_STEPS] = _create_variable(
            f"{table.name}/{ROUNDING_STEPS}", [tf.constant(0, tf.int64)],
            trainable=False)
    return variables


def bind_shape(initializer: Callable[..., Any], shape):
    """Gives an initializer that knows shards the whole shape, as TF does.

    Others are returned as they are.
    """
    if "shard_info" not in inspect.signature(initializer).parameters:
        return initializer
    keywords = {}
    if "dtype" in inspect.signature(initializer).parameters:
        keywords["dtype"] = tf.float32
    return functools.partial(initializer, shape, **keywords)


def _in_dtype(table: config.TableSpec, rows: tf.Tensor) -> tf.Tensor:
    """The first rows of a table, rounded to the nearest where it has 16 bits.
    """
    if not table.is_half:
        return rows
    found = tf.cast(rows, table.dtype)
    if bool(tf.reduce_any(tf.math.is_finite(rows) & ~tf.math.is_finite(found))):
        raise ValueError(
            f"The first rows of a table in {table.dtype} must be at most "
            f"{tf.as_dtype(table.dtype).max} in magnitude. Received: "
            f"{float(tf.reduce_max(tf.abs(rows)))} (table {table.name!r}).")
    return found


def _create_variable(name: str, shards: list[tf.Tensor], trainable: bool):
    variables = [
        _tf_private.ResourceVariable(
            rows, trainable=trainable,
            name=name if len(shards) == 1 else f"{name}/part_{shard}")
        for shard, rows in enumerate(shards)]
    if len(variables) == 1:
        return variables[0]
    return ShardedVariable(variables, name=name)
