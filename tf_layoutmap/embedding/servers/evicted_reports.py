"""Passes the keys that servers have evicted to `on_evict`.

A server evicts keys in the steps of workers, and cannot call a function of the
coordinator. The server therefore stores the evicted keys with their rows, and
the coordinator reads them later. The server deletes stored keys only after
`on_evict` has received them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import open_tables
from tf_layoutmap.embedding.servers import step_ops

# Approximate size of the keys and rows that one call of a server returns.
_BLOCK_BYTES = 32 << 20


@dataclasses.dataclass
class _Shard:
    """A shard of a table whose vocabulary has `on_evict`.

    Attributes:
      server: Server of the shard.
      piece: Index of the shard on the server.
      table: Index of the table.
      reported: Number of the next evictions; see the op `ReadEvictedRows`.
    """

    server: step_ops.Server
    piece: int
    table: int
    reported: int = 0


class EvictedReports:
    """The evicted keys of all tables of an embedding on servers."""

    def __init__(
        self, spec: config.EmbeddingSpec, servers: Iterable[step_ops.Server]
    ):
        """Lets the servers store the evicted keys of tables with `on_evict`.

        Args:
          spec: Tables and features.
          servers: Servers with handles.
        """
        self._reporters = open_tables.reporters_of(spec, {})
        self._dtypes = {
            number: open_tables.row_dtypes(spec.tables[number])
            for number in self._reporters
        }
        self._shards: list[_Shard] = []
        # Several threads can save and evict at the same time.
        self._lock = threading.RLock()
        for server in servers:
            for piece, table in enumerate(server.tables):
                if table not in self._reporters:
                    continue
                with tf.device(server.device):
                    ops.keep_evicted_rows(server=server.handle, piece=piece)
                self._shards.append(_Shard(server, piece, table))

    def report(self) -> int:
        """Calls `on_evict` with all evicted keys that were not reported yet.

        If `on_evict` raises an error, the next call passes the same keys to
        `on_evict` again.

        Returns:
          The number of keys.
        """
        num_keys = 0
        with self._lock:
            for shard in self._shards:
                while True:
                    following, keys, values = self._read(shard)
                    size = len(keys.numpy())
                    if size:
                        self._reporters[shard.table](
                            keys.numpy(), *(value.numpy() for value in values)
                        )
                    num_keys += size
                    is_last = shard.reported == following
                    shard.reported = following
                    if is_last:
                        break
        return num_keys

    def report_dropped(self, table: int, values: Sequence[Any]) -> None:
        """Calls `on_evict` with the keys that a resize has dropped.

        Args:
          table: Index of the table.
          values: The keys, their rows, and the values of each slot variable.
        """
        if table in self._reporters:
            self._reporters[table](*values)

    def _read(self, shard: _Shard) -> tuple[int, tf.Tensor, list[tf.Tensor]]:
        with tf.device(shard.server.device):
            following, keys, values = ops.read_evicted_rows(
                server=shard.server.handle,
                reported=tf.constant(shard.reported, tf.int64),
                piece=shard.piece,
                max_bytes=_BLOCK_BYTES,
                Tvalues=self._dtypes[shard.table],
            )
        return int(following.numpy()), keys, values
