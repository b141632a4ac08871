"""Creates the variables of tables, slot variables and open vocabularies.

Under every strategy, the variables are plain variables on the host, and all
replicas share one copy. A partitioned table is a `ShardedVariable`, whose
shards the engine reads and updates without a copy. For each variable, the
module calls the creators of `tf.variable_creator_scope`, except the creators of
strategies, which would create copies for replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import (
    checks,
    freed_gradients,
    random_tensors,
    tf_private,
)
from tf_layoutmap.embedding import table_variable
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.table_variable import HOST, shards_of
from tf_layoutmap.sharded import ShardedVariable, creation_progress
from tf_layoutmap.vocabulary import bucket_layout, state
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary

__all__ = [
    "HOST",
    "PARAMETERS",
    "ROUNDING_STEPS",
    "Partitioner",
    "create_tables",
    "shards_of",
]

PARAMETERS = "parameters"
# Variable with the number of updates of a table with 16-bit rows. The
# stochastic rounding depends on this number, so checkpoints contain it.
ROUNDING_STEPS = "rounding_steps"

Partitioner = Callable[..., Sequence[int]]

# Function that returns the device of each shard of a table.
Place = Callable[[config.TableSpec, partition.RowPartition], Sequence[str]]


def create_tables(
    spec: config.EmbeddingSpec,
    partitioner: Partitioner | None,
    *,
    place: Place | None = None,
    only: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Creates the variables of all tables.

    Args:
      spec: Spec of the tables.
      partitioner: None, or a callable like
        `tf.distribute.experimental.partitioners`. The callable takes `shape`
        and `dtype`, and returns the number of shards of each axis. A
        `partition.PartitionerByName` also gets the name of the table.
      place: Callable that returns the device of each shard, or None for the
        host. If a callable is passed, user creators are not called. The caller
        must then create the variables of open vocabularies. Each segment of a
        vocabulary is in a single shard.
      only: Index of the only shard to create for each table, or None for all
        shards. If an index is passed, the shard is a plain variable, and user
        creators are not called. If a table has no shard with this index, its
        variable has one row. The caller must create the variables of open
        vocabularies, as with `place`.

    Returns:
      A dict `{table name: {"parameters": rows, slot name: slot
      variable}}`. Each variable is a `tf.Variable`, or a `ShardedVariable` if
      the partitioner returns more than one shard for the table. A table with
      16-bit rows and an optimizer also has an int64 scalar `"rounding_steps"`.
      A table that owns an open vocabulary also has all variables of the
      vocabulary.

    Raises:
      TypeError: If a variable creator does not return a variable.
      ValueError: If an initializer returns another shape, or values that exceed
        the range of the table's dtype. The function also raises this error if
        the partitioner splits columns, or if the engine cannot train a variable
        that a variable creator returned. The message names the table.
    """
    if place is None and isinstance(partitioner, partition.PartitionerByName):
        partitioner.check_servers(0)
    variables = {}
    with (
        tf.device(HOST),
        tf.name_scope(""),
        creation_progress.show_progress(sum(map(_num_bytes, spec.tables))),
    ):
        for table in spec.tables:
            num_shards = _num_shards(
                owner_of(spec, table),
                partitioner,
                by_segment=place is not None or only is not None,
            )
            variables[table.name] = _create_table(
                table, num_shards, place, only
            )
    freed_gradients.free_with_variables(
        part
        for made in variables.values()
        for value in made.values()
        for part in shards_of(value)
    )
    return variables


def _num_bytes(table: config.TableSpec) -> int:
    """Returns the size of the float32 initial values in bytes."""
    slots = table.optimizer.slots if table.optimizer else ()
    return (
        4
        * table.num_rows
        * (table.dim + sum(slot.dim(table.dim) for slot in slots))
    )


def create_table(
    spec: config.EmbeddingSpec,
    table: int,
    partitioner: Partitioner | None,
) -> dict[str, Any]:
    """Creates the variables of one table; see `create_tables`."""
    one = spec.tables[table]
    num_shards = _num_shards(owner_of(spec, one), partitioner)
    with tf.device(HOST), tf.name_scope(""):
        return _create_table(one, num_shards, None)


def owner_of(
    spec: config.EmbeddingSpec, table: config.TableSpec
) -> config.TableSpec:
    """Returns the table that owns the vocabulary of a table.

    Tables that share a vocabulary have the same shards, so that a key and its
    rows are in shards with the same index.
    """
    owner = None if table.vocabulary is None else table.vocabulary.owner
    return table if owner is None else spec.tables[owner]


def _num_shards(
    table: config.TableSpec, partitioner, *, by_segment: bool = False
) -> int:
    if partitioner is None:
        return 1
    checks.check_partitioner(partitioner, f"table {table.name!r}")
    shape = tf.TensorShape([table.num_rows, table.dim])
    parts = [
        int(part)
        for part in (
            partitioner(shape=shape, dtype=tf.float32, name=table.name)
            if isinstance(partitioner, partition.PartitionerByName)
            else partitioner(shape=shape, dtype=tf.float32)
        )
    ]
    if len(parts) != 2 or parts[1] != 1 or parts[0] < 1:
        raise ValueError(
            "Argument `partitioner` must split a table along its rows only, "
            "[num_shards, 1]. Received: "
            f"{parts} (table {table.name!r})."
        )
    # Each shard must have at least one row.
    if table.vocabulary is None:
        return min(parts[0], table.num_rows)
    num_buckets = table.vocabulary.settings.num_buckets
    return min(
        parts[0],
        bucket_layout.num_segments(num_buckets) if by_segment else num_buckets,
    )


def _create_table(
    table: config.TableSpec,
    num_shards: int,
    place: Place | None,
    only: int | None = None,
):
    settings = table.vocabulary and table.vocabulary.settings
    if settings is None:
        cut = partition.RowPartition.div(table.num_rows, num_shards)
    else:
        # Shards of several servers or processes consist of complete segments,
        # so that a server or process stores all slots that are possible for a
        # key.
        buckets = (
            bucket_layout.bucket_partition
            if place is None and only is None
            else bucket_layout.segment_partition
        )
        cut = bucket_layout.row_partition(
            buckets(settings.num_buckets, num_shards)
        )
    devices = None if place is None else place(table, cut)
    # If a table has an optimizer, the engine trains the table. In this case,
    # the table must not be a trainable variable, because a gradient tape and
    # another optimizer would also use the variable.
    rows = table_variable.create(
        table,
        table.name,
        # The engine initializes a row of an open table when it admits the key
        # of the row.
        table.initializer if settings is None else tf.zeros_initializer(),
        cut,
        dim=table.dim,
        trainable=table.optimizer is None,
        dtype=table.dtype,
        devices=devices,
        only=only,
    )
    variables = {PARAMETERS: rows}
    for slot in table.optimizer.slots if table.optimizer else ():
        variables[slot.name] = table_variable.create(
            table,
            f"{table.name}/{slot.name}",
            tf.constant_initializer(slot.initial_value),
            cut,
            dim=slot.dim(table.dim),
            trainable=False,
            devices=devices,
            only=only,
        )
        table_variable.check_same_cut(table, rows, variables[slot.name])
    if table.is_half and table.optimizer is not None:
        variables[ROUNDING_STEPS] = tf_private.ResourceVariable(
            tf.constant(0, tf.int64),
            trainable=False,
            name=f"{table.name}/{ROUNDING_STEPS}",
            distribute_strategy=table_variable.strategy_in_scope(),
        )
    if (
        settings is not None
        and place is None
        and only is None
        and table.vocabulary.owner is None
    ):
        variables.update(
            create_vocabulary_variables(settings, table.name, num_shards)
        )
    return variables


def create_vocabulary_variables(
    vocabulary: OpenVocabulary,
    table: str,
    num_shards: int,
) -> dict[str, Any]:
    """Creates the variables of an empty vocabulary.

    Args:
      vocabulary: Settings of the vocabulary.
      table: Name of the table.
      num_shards: Number of shards of the table. Each bucket is in a single
        shard.

    Returns:
      A dict from names, such as `state.KEYS`, to variables. If there are
      several shards, the keys, steps and counts are `ShardedVariable` objects.
      The shape of these three variables is `[num_buckets, 8]`.
    """
    cut = bucket_layout.bucket_partition(vocabulary.num_buckets, num_shards)

    def by_bucket(name, value, dtype):
        shards = [
            # `random_tensors.fill` is used because buckets are accessed in
            # random order, like rows.
            _variable(
                random_tensors.fill(
                    (size, bucket_layout.KEYS_PER_BUCKET), value, dtype
                ),
                f"{table}/{name}"
                + (f"/part_{shard}" if num_shards > 1 else ""),
            )
            for shard, size in enumerate(cut.sizes)
        ]
        return (
            shards[0]
            if num_shards == 1
            else ShardedVariable(shards, name=f"{table}/{name}")
        )

    variables = {
        state.KEYS: by_bucket(state.KEYS, bucket_layout.EMPTY_KEY, tf.int64),
        state.LAST_STEPS: by_bucket(state.LAST_STEPS, 0, tf.int32),
        state.COUNTS: by_bucket(state.COUNTS, 0, tf.int32),
    }
    if vocabulary.has_sketch:
        shape = bucket_layout.sketch_shape(vocabulary.num_buckets)
        variables[state.SKETCH] = _variable(
            tf.zeros(shape, tf.uint8), f"{table}/{state.SKETCH}"
        )
        variables[state.SKETCH_SUMS] = _variable(
            tf.zeros(shape[:1], tf.int64), f"{table}/{state.SKETCH_SUMS}"
        )
    variables[state.NUMBERS] = _variable(
        tf.zeros([len(state.NUMBERS_HELD)], tf.int64),
        f"{table}/{state.NUMBERS}",
    )
    return variables


def text_variable(value: Any, name: str) -> tf.Variable:
    """Creates a variable that describes the tables in checkpoints."""
    with tf.device(HOST):
        return _variable(tf.constant(value), name)


def _variable(value: tf.Tensor, name: str) -> tf.Variable:
    return tf_private.ResourceVariable(
        value,
        trainable=False,
        name=name,
        distribute_strategy=table_variable.strategy_in_scope(),
    )
