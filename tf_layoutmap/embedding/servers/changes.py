"""Copies the rows on servers that changed since the last copy.

Each server records which of its rows change. The coordinator receives the
numbers of these rows. The values stay on the server, which writes them to a
part of a delta; see `tf_layoutmap/deltas/server_parts.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host.changes import LANES, WHOLE, TableChanges
from tf_layoutmap.embedding.servers import step_ops
from tf_layoutmap.vocabulary import state

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class ValuesOnServer:
    """The values of changed rows on one server.

    Attributes:
      device: Device of the server.
      first: Index of the first row among the changed rows of the table.
      values: Tensor on the server.
    """

    device: str
    first: int
    values: Any


@dataclasses.dataclass(frozen=True, eq=False)
class ServerValues:
    """The values of the changed rows of a variable, which are on servers.

    Attributes:
      parts: Values by server, in the order of the rows.
      shape: Shape of all values.
      dtype: Dtype of the values.
    """

    parts: Sequence[ValuesOnServer]
    shape: tuple[int, ...]
    dtype: tf.DType

    def numpy(self) -> Array:
        """Copies all values to this process."""
        return np.concatenate([one.values.numpy() for one in self.parts])


class ServerChanges:
    """A recorder of the rows that are written to tables on servers.

    Attributes:
      num_replaced: Number of times that all values may have been replaced.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        servers: Sequence[step_ops.Server],
        in_flight: Any,
    ):
        """Starts to record; `take` of earlier recorders then raises an error.

        Args:
          spec: The tables.
          variables: Variables of the tables.
          servers: Servers with handles.
          in_flight: Function that returns counters of all servers. The counters
            change whenever a step begins or ends.
        """
        self.num_replaced = 0
        self._spec = spec
        self._variables = variables
        self._servers = servers
        self._in_flight = in_flight
        # Rows that a failed call of `take` has removed from the records, by
        # server and shard.
        self._failed: dict[tuple[int, int], Array] = {}
        self._watches = []
        for server in servers:
            with tf.device(server.device):
                self._watches.append(
                    ops.watch_server_rows(server=server.handle)
                )

    def take(self, also: Mapping[str, Array]) -> dict[str, TableChanges]:
        """Copies the rows written since the last call; see `EngineChanges`.

        Each server locks its variables while it copies rows.

        Raises:
          RuntimeError: If a later recorder exists, if a server has restarted,
            or if steps run during the call. The next call returns the rows.
        """
        before = self._in_flight()
        # For each table, the rows and the values of its shards by the index of
        # the shard.
        found: list[dict[int, tuple[Array, list[tf.Tensor], str]]] = [
            {} for _ in self._spec.tables
        ]
        for index, server in enumerate(self._servers):
            for place, (rows, values) in enumerate(
                self._take_server(index, server, also)
            ):
                self._failed[index, place] = rows
                found[server.tables[place]][server.numbers[place]] = (
                    rows + server.first_rows[place],
                    values,
                    server.device,
                )
        whole = [self._whole(table.name) for table in self._spec.tables]
        if self._in_flight() != before:
            raise RuntimeError(
                "The changes of tables on servers can be copied only while no "
                "step is in flight: call `join` of the coordinator first. "
                "Received: steps that ran during the call."
            )
        self._failed = {}
        return {
            table.name: _changes_of(
                [found[number][shard] for shard in sorted(found[number])],
                self._names(table),
                whole[number],
            )
            for number, table in enumerate(self._spec.tables)
        }

    def _take_server(
        self, index: int, server: step_ops.Server, also: Mapping[str, Array]
    ) -> list[tuple[Array, list[tf.Tensor]]]:
        """Returns the rows and their values for each shard of a server."""
        lanes, dtypes = [], []
        for number, shard in zip(server.tables, server.numbers):
            table = self._spec.tables[number]
            by_name = self._variables[table.name]
            slots = table.slots
            dtypes += [tf.int64, tf.as_dtype(table.dtype)]
            dtypes += [tf.float32 for _ in slots]
            if state.KEYS in by_name:
                dtypes += LANES.values()
                lanes += [
                    tables.shards_of(by_name[one])[shard] for one in LANES
                ]
        try:
            with tf.device(server.device):
                values = ops.take_server_rows(
                    server=server.handle,
                    watch=self._watches[index],
                    also=[
                        self._also(index, server, place, also)
                        for place in range(len(server.tables))
                    ],
                    shards=step_ops.handles(server.shards),
                    slots=step_ops.handles(server.slots),
                    lanes=step_ops.handles(lanes),
                    Tvalues=dtypes,
                )
                # The call returns before the server has copied the rows.
                rest = iter(values)
                by_shard = [
                    (
                        next(rest).numpy(),
                        [
                            next(rest)
                            for _ in self._names(self._spec.tables[number])
                        ],
                    )
                    for number in server.tables
                ]
        except tf.errors.FailedPreconditionError as error:
            raise RuntimeError(error.message) from None
        return by_shard

    def _also(
        self,
        index: int,
        server: step_ops.Server,
        place: int,
        also: Mapping[str, Array],
    ) -> Array:
        """Returns the rows that a server must copy besides recorded rows."""
        name = self._spec.tables[server.tables[place]].name
        first = server.first_rows[place]
        size = int(server.shards[place].shape[0])
        rows = np.asarray(also.get(name, ()), np.int64) - first
        return np.concatenate(
            [
                rows[(rows >= 0) & (rows < size)],
                self._failed.get((index, place), np.zeros([0], np.int64)),
            ]
        )

    def _names(self, table: config.TableSpec) -> list[str]:
        """Returns the names of the variables that have a value per row."""
        slots = table.slots
        names = [tables.PARAMETERS, *(slot.name for slot in slots)]
        if state.KEYS in self._variables[table.name]:
            names += LANES
        return names

    def _whole(self, table: str) -> dict[str, Array]:
        """Returns the full values of small variables."""
        by_name = self._variables[table]
        return {
            name: np.concatenate(
                [one.numpy() for one in tables.shards_of(by_name[name])]
            )
            if name in (state.SKETCH, state.SKETCH_SUMS)
            else np.asarray(by_name[name].numpy())
            for name in WHOLE
            if name in by_name
        }


def _changes_of(
    shards: Sequence[tuple[Array, list[tf.Tensor], str]],
    names: Sequence[str],
    whole: dict[str, Array],
) -> TableChanges:
    """Returns the changes of a table from the changes of its shards."""
    rows = np.concatenate([one for one, _, _ in shards])
    values: dict[str, Any] = {}
    for place, name in enumerate(names):
        parts, first = [], 0
        for own_rows, own_values, device in shards:
            parts.append(ValuesOnServer(device, first, own_values[place]))
            first += len(own_rows)
        one: Any = shards[0][1][place]
        values[name] = ServerValues(parts, (first, *one.shape[1:]), one.dtype)
    return TableChanges(rows, values, whole)
