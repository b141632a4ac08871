"""Creates tables and their slot variables on parameter servers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _strategies, _tf_private, partition
from tf_layoutmap.embedding.servers import (
    copied_count,
    placement,
    vocabulary_variables,
)
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.variables import tables

# A smaller shard is not worth a server of its own.
_MIN_SHARD_BYTES = 256 << 10


class ServerTables:
    """Where the shards of all tables are.

    Attributes:
      devices: Of the servers, `"/job:ps/replica:0/task:0/device:CPU:0"` first.
      partitioner: How tables are cut: the one given, else that of the
        strategy, else one shard for each server of 256 KiB or more.
    """

    def __init__(self, strategy: Any, partitioner: tables.Partitioner | None):
        """Reads the servers that this process is connected to.

        Raises:
          ValueError: If it has none.
        """
        # Its steps do not work without.
        _strategies.note_our_ops(strategy)
        # By number: names would put the tenth server before the second.
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
            or _tf_private.variable_partitioner_of(strategy)
            or partition.MinSizePartitioner(
                _MIN_SHARD_BYTES, max_shards=len(tasks)
            )
        )
        self._placement = placement.Placement(len(tasks))

    def create(
        self,
        spec: config.EmbeddingSpec,
    ) -> tuple[dict[str, dict[str, Any]], list[list[str]]]:
        """Creates the variables of all tables.

        Returns:
          What `tables.create_tables` returns, and by table the device of each
          shard.
        """
        devices = []

        def place(table: config.TableSpec, cut: partition.RowPartition):
            row_bytes = (table.num_bytes + table.num_slot_bytes) // max(
                table.num_rows, 1
            )
            devices.append(
                [
                    self.devices[one]
                    for one in self._placement.place(
                        size * row_bytes for size in cut.sizes
                    )
                ]
            )
            return devices[-1]

        variables = tables.create_tables(spec, self.partitioner, place=place)
        for table, where in zip(spec.tables, devices):
            if tables.ROUNDING_STEPS in variables[table.name]:
                variables[table.name][tables.ROUNDING_STEPS] = (
                    copied_count.CopiedCount(
                        [_create_count(table, device) for device in where]
                    )
                )
            if table.vocabulary is not None:
                variables[table.name].update(
                    vocabulary_variables.create_variables(
                        table.vocabulary.settings, table.name, where
                    )
                )
        return variables, devices


def _create_count(table: config.TableSpec, device: str):
    with tf.device(device):
        return _tf_private.ResourceVariable(
            tf.constant(0, tf.int64),
            trainable=False,
            name=f"{table.name}/{tables.ROUNDING_STEPS}",
        )
