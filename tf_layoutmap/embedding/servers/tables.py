"""Creation of tables, slot variables and vocabularies on parameter servers.

`ServerTables` creates tables that are sharded over the servers. `Placement`
assigns shards to servers by their sizes, unless a plan assigns the shards.
`CopiedCount` is a counter with one copy per shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import strategies, tf_private
from tf_layoutmap.embedding import table_variable, tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.vocabulary import bucket_layout, state
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.sharded_numbers import SavedAsOne


class CopiedCount(SavedAsOne):
    """An int64 counter with one copy per shard.

    All copies are equal while no step is in flight. A checkpoint contains the
    counter as a single value. For tables on a host, the counter has the same
    form in a checkpoint.

    Attributes:
      copies: Variable of each shard.
      shape: `[]`.
      dtype: int64.
    """

    def numpy(self) -> Any:
        """Returns the value.

        Raises:
          RuntimeError: If the copies differ because a step is in flight.
        """
        values = {int(one.numpy()) for one in self.copies}
        if len(values) > 1:
            raise RuntimeError(
                "Tables on servers can be saved and compared only while no "
                "step is in flight: call `join` of the coordinator first. "
                "Received: shards of one table after "
                f"{sorted(values)} updates."
            )
        return tf.constant(values.pop(), tf.int64).numpy()

    def assign(self, value: Any) -> None:
        """Assigns a value to all copies."""
        for one in self.copies:
            one.assign(tf.cast(value, tf.int64))


class Placement:
    """An assignment of shards to the servers with the fewest bytes.

    >>> placement = Placement(2)
    >>> placement.place([30, 10, 10]), placement.place([20])
    ([0, 1, 1], [1])
    >>> placement.num_bytes
    [30, 40]

    Attributes:
      num_bytes: Number of bytes on each server.
    """

    def __init__(self, num_servers: int):
        """Creates an assignment for servers without shards.

        Args:
          num_servers: Number of servers, at least 1.
        """
        self.num_bytes = [0] * num_servers

    def place(self, num_bytes: Iterable[int]) -> list[int]:
        """Assigns the shards of one table to servers, and returns the servers.

        Args:
          num_bytes: Size in bytes of each shard, including its slot variables.
        """
        servers: list[int] = []
        for size in num_bytes:
            server = self.num_bytes.index(min(self.num_bytes))
            self.num_bytes[server] += size
            servers.append(server)
        return servers


def create_vocabulary_variables(
    vocabulary: OpenVocabulary,
    table: str,
    devices: Sequence[str],
) -> dict[str, Any]:
    """Creates the variables of an empty vocabulary.

    Each shard contains complete segments of the vocabulary, with the full state
    of their keys. Therefore a server can process a key without other servers.

    Args:
      vocabulary: Settings of the vocabulary.
      table: Name of the table.
      devices: Device of each shard of the table.

    Returns:
      The variables by name. The variable `state.NUMBERS` is a
      `state.ShardedNumbers`. All other variables, such as `state.KEYS`, are a
      `tf.Variable`, or a `ShardedVariable` if there are several shards.
    """
    num_buckets = vocabulary.num_buckets
    buckets = bucket_layout.segment_partition(num_buckets, len(devices)).sizes
    per_segment = num_buckets // bucket_layout.num_segments(num_buckets)
    segments = [size // per_segment for size in buckets]

    def by_shard(
        name: str,
        sizes: Sequence[int],
        row_shape: Sequence[int],
        value: int,
        dtype: tf.DType,
    ) -> list[tf.Variable]:
        shards = []
        for shard, (size, device) in enumerate(zip(sizes, devices)):
            # The device of the shard also computes the initial value, so the
            # value is not sent over the network.
            with tf.device(device):
                shards.append(
                    tf_private.ResourceVariable(
                        tf.fill([size, *row_shape], tf.constant(value, dtype)),
                        trainable=False,
                        name=f"{table}/{name}"
                        + (f"/part_{shard}" if len(devices) > 1 else ""),
                        distribute_strategy=table_variable.strategy_in_scope(),
                    )
                )
        return shards

    def as_one(name: str, *arguments: Any) -> Any:
        shards = by_shard(name, *arguments)
        return (
            shards[0]
            if len(shards) == 1
            else ShardedVariable(shards, name=f"{table}/{name}")
        )

    lanes = [bucket_layout.KEYS_PER_BUCKET]
    variables = {
        state.KEYS: as_one(
            state.KEYS, buckets, lanes, bucket_layout.EMPTY_KEY, tf.int64
        ),
        state.LAST_STEPS: as_one(state.LAST_STEPS, buckets, lanes, 0, tf.int32),
        state.COUNTS: as_one(state.COUNTS, buckets, lanes, 0, tf.int32),
    }
    if vocabulary.has_sketch:
        shape = bucket_layout.sketch_shape(num_buckets)
        variables[state.SKETCH] = as_one(
            state.SKETCH, segments, shape[1:], 0, tf.uint8
        )
        variables[state.SKETCH_SUMS] = as_one(
            state.SKETCH_SUMS, segments, [], 0, tf.int64
        )
    variables[state.NUMBERS] = state.ShardedNumbers(
        by_shard(
            state.NUMBERS,
            [len(state.NUMBERS_HELD)] * len(devices),
            [],
            0,
            tf.int64,
        )
    )
    return variables


# Minimum size of a shard that the default partitioner creates.
_MIN_SHARD_BYTES = 256 << 10


class ServerTables:
    """A creator of tables that are sharded over the servers.

    Attributes:
      devices: Device of each server, starting with
        `"/job:ps/replica:0/task:0/device:CPU:0"`.
      partitioner: Partitioner of the tables. The value is the argument of the
        constructor or, by default, the `variable_partitioner` of the strategy.
        If both partitioners are None, a table has at most one shard per server,
        and is not split into shards below 256 KiB.
    """

    def __init__(self, strategy: Any, partitioner: tables.Partitioner | None):
        """Reads the list of servers to which this process is connected.

        Raises:
          ValueError: If the cluster does not contain servers.
        """
        # Steps use ops of this package. This call records that all servers of
        # the strategy have these ops.
        strategies.register_our_ops(strategy)
        # Servers are sorted by number, because an order by name would put
        # server 10 before server 2.
        devices = [
            tf.DeviceSpec.from_string(one.name)
            for one in tf.config.list_logical_devices("CPU")
        ]
        tasks = sorted({one.task for one in devices if one.job == "ps"})
        if not tasks:
            raise ValueError(
                'A ParameterServerStrategy must have servers, job "ps". '
                "Received: none."
            )
        self.devices = [
            f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in tasks
        ]
        self.partitioner = (
            partitioner
            or tf_private.variable_partitioner_of(strategy)
            or partition.MinSizePartitioner(
                _MIN_SHARD_BYTES, max_shards=len(tasks)
            )
        )
        if isinstance(self.partitioner, partition.PartitionerByName):
            self.partitioner.check_servers(len(tasks))
        self._placement = Placement(len(tasks))

    def create(
        self,
        spec: config.EmbeddingSpec,
    ) -> tuple[dict[str, dict[str, Any]], list[list[str]]]:
        """Creates the variables of all tables.

        Returns:
          A tuple of two elements: the variables in the structure of
          `tables.create_tables`, and a list with the devices of the shards of
          each table.
        """
        devices = []
        # Maps the name of the table that owns a vocabulary to the servers of
        # all tables that use this vocabulary.
        servers_of: dict[str, Sequence[int]] = {}

        def place(
            table: config.TableSpec, row_partition: partition.RowPartition
        ):
            owner = tables.owner_of(spec, table)
            if owner.name not in servers_of:
                servers_of[owner.name] = self._servers_of(
                    spec, owner, row_partition
                )
            devices.append(
                [self.devices[one] for one in servers_of[owner.name]]
            )
            return devices[-1]

        variables = tables.create_tables(spec, self.partitioner, place=place)
        for table, where in zip(spec.tables, devices):
            if tables.ROUNDING_STEPS in variables[table.name]:
                variables[table.name][tables.ROUNDING_STEPS] = CopiedCount(
                    [_create_count(table, device) for device in where]
                )
            if table.vocabulary is not None and table.vocabulary.owner is None:
                variables[table.name].update(
                    create_vocabulary_variables(
                        table.vocabulary.settings, table.name, where
                    )
                )
        return variables, devices

    def _servers_of(
        self,
        spec: config.EmbeddingSpec,
        owner: config.TableSpec,
        row_partition: partition.RowPartition,
    ) -> Sequence[int]:
        """Returns the server of each shard of a table.

        Tables that share a vocabulary have the same servers, because the server
        that admits a key must also have its rows in all tables.

        Args:
          spec: Tables and features.
          owner: The table, which does not use the vocabulary of another table.
          row_partition: Partition of the rows.
        """
        if isinstance(self.partitioner, partition.PartitionerByName):
            return self.partitioner.servers_of(owner.name)
        num_bytes = sum(
            one.num_bytes + one.num_slot_bytes
            for one in spec.tables
            if tables.owner_of(spec, one) is owner
        )
        row_bytes = num_bytes // max(owner.num_rows, 1)
        return self._placement.place(
            size * row_bytes for size in row_partition.sizes
        )


def _create_count(table: config.TableSpec, device: str):
    with tf.device(device):
        return tf_private.ResourceVariable(
            tf.constant(0, tf.int64),
            trainable=False,
            name=f"{table.name}/{tables.ROUNDING_STEPS}",
        )
