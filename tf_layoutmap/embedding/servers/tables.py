"""Creation of tables, slot variables and vocabularies on parameter servers.

`ServerStore` creates tables that are sharded over the servers. `Placement`
assigns shards to servers by their sizes, unless a plan assigns the shards.
`CopiedCount` is a counter with one copy per shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import strategies, tf_private
from tf_layoutmap.embedding import table_store, tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary.sharded_numbers import SavedAsOne, ShardedNumbers


class CopiedCount(SavedAsOne):
    """An int64 counter with one copy per shard.

    All copies are equal while no step is in flight. A checkpoint contains the
    counter as a single value. For tables on a host, the counter has the same
    form in a checkpoint.

    Attributes:
      variables: Variable of each shard.
      shape: `[]`.
      dtype: int64.
    """

    def numpy(self) -> Any:
        """Returns the value.

        Raises:
          RuntimeError: If the copies differ because a step is in flight.
        """
        values = {int(variable.numpy()) for variable in self.variables}
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
        for variable in self.variables:
            variable.assign(tf.cast(value, tf.int64))


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


# Minimum size of a shard that the default partitioner creates.
_MIN_SHARD_BYTES = 256 << 10


class ServerStore(table_store.TableStore):
    """The store of tables that are sharded over the servers.

    Each shard is a part. Shards of a vocabulary contain complete segments, with
    the full state of their keys. Therefore a server can process a key without
    other servers.

    Attributes:
      devices: Device of each server, starting with
        `"/job:ps/replica:0/task:0/device:CPU:0"`.
      partitioner: Partitioner of the tables. The value is the argument of the
        constructor or, by default, the `variable_partitioner` of the strategy.
        If both partitioners are None, a table has at most one shard per server,
        and is not split into shards below 256 KiB.
    """

    _has_segments = True

    def __init__(
        self, strategy: Any, partitioner: table_store.Partitioner | None
    ):
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
            tf.DeviceSpec.from_string(device.name)
            for device in tf.config.list_logical_devices("CPU")
        ]
        tasks = sorted(
            {device.task for device in devices if device.job == "ps"}
        )
        if not tasks:
            raise ValueError(
                'A ParameterServerStrategy must have servers, job "ps". '
                "Received: none."
            )
        self.devices = [
            f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in tasks
        ]
        super().__init__(
            partitioner
            or tf_private.variable_partitioner_of(strategy)
            or partition.MinSizePartitioner(
                _MIN_SHARD_BYTES, max_shards=len(tasks)
            )
        )
        if isinstance(self.partitioner, partition.PartitionerByName):
            self.partitioner.check_servers(len(tasks))
        self._placement = Placement(len(tasks))
        # The servers of all tables that use the same vocabulary, by the name of
        # the table that owns the vocabulary.
        self._servers_of_table: dict[str, Sequence[int]] = {}

    def create(self, spec: config.EmbeddingSpec) -> table_store.Variables:
        """Creates the variables of all tables; see `TableStore.create`."""
        self._servers_of_table.clear()
        return super().create(spec)

    def _places(self, rows: Any) -> list[tuple[range, str, int]]:
        places, first = [], 0
        for shard in tables.shards_of(rows):
            stop = first + known_size(shard)
            places.append((range(first, stop), shard.device, 0))
            first = stop
        return places

    def _shards_of_part(self, variable: Any, index: int) -> list[Any]:
        return [tables.shards_of(variable)[index]]

    def _devices_of(
        self,
        spec: config.EmbeddingSpec,
        table: config.TableSpec,
        cut: partition.RowPartition,
    ) -> list[str]:
        owner = tables.owner_of(spec, table)
        if owner.name not in self._servers_of_table:
            self._servers_of_table[owner.name] = self._servers_of(
                spec, owner, cut
            )
        return [
            self.devices[server]
            for server in self._servers_of_table[owner.name]
        ]

    def _joined_numbers(self, name: str, copies: list[Any]) -> Any:
        del name
        return ShardedNumbers(copies)

    def _create_rounding_steps(
        self, name: str, devices: Sequence[str] | None
    ) -> CopiedCount:
        counts = []
        for device in devices or ():
            with tf.device(device):
                counts.append(
                    tables.create_variable(tf.constant(0, tf.int64), name)
                )
        return CopiedCount(counts)

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
            table.num_bytes + table.num_slot_bytes
            for table in spec.tables
            if tables.owner_of(spec, table) is owner
        )
        row_bytes = num_bytes // max(owner.num_rows, 1)
        return self._placement.place(
            size * row_bytes for size in row_partition.sizes
        )
