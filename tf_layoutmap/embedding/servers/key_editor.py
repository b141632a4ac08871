"""Eviction and writes of keys by the ops of servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import key_editor, tables
from tf_layoutmap.embedding.servers.key_step_ops import KeyStepOps
from tf_layoutmap.embedding.servers.step_ops import Server
from tf_layoutmap.embedding.table_store import TableStore
from tf_layoutmap.vocabulary.parts import Part

Array = np.ndarray[Any, Any]


class ServerKeyEditor(key_editor.KeyEditor):
    """Evicts and writes keys on the servers.

    The servers store evicted keys until `on_evict` has received them, so an
    error of `on_evict` does not undo an eviction.
    """

    def __init__(
        self,
        store: TableStore,
        flush: Callable[[], None],
        step_ops: KeyStepOps,
    ):
        """Stores the access to the tables.

        Args:
          store: The current tables.
          flush: Function that applies the pending pipelined update.
          step_ops: The ops of steps, which have the handles of the servers.
        """
        super().__init__(store, flush)
        self._step_ops = step_ops

    def _check_eviction(self, shared: Sequence[Part], keys: tf.Tensor) -> None:
        # The check succeeds for the eviction, too, unless steps run in
        # parallel.
        self._evict_or_check(shared[0], keys, expired=False, only_check=True)

    def _evict(
        self, shared: Sequence[Part], keys: tf.Tensor, *, expired: bool
    ) -> list[tf.Tensor]:
        return [
            self._evict_or_check(
                shared[0], keys, expired=expired, only_check=False
            )
        ]

    def _evict_or_check(
        self, part: Part, keys: tf.Tensor, *, expired: bool, only_check: bool
    ) -> tf.Tensor:
        server = self._server_of(part)
        return ops.evict_server_keys(
            server=server.handle,
            keys=keys,
            piece=_piece_of(server, part),
            expired=expired,
            only_check=only_check,
        )

    def _write_arguments(self, shared: Sequence[Part]) -> dict[str, Any]:
        server = self._server_of(shared[0])
        return {
            "engine": [],
            "server": [server.handle],
            "fetched_steps": tables.handles(
                self._step_ops.fetched_steps(server)
            ),
            "sharing": [_piece_of(server, part) for part in shared[1:]],
        }

    def _record_written(self, shared: Sequence[Part], rows: Array) -> None:
        server = self._server_of(shared[0])
        local_rows = rows[rows >= 0] - shared[0].rows.start
        for part in shared:
            ops.record_server_rows(
                server=server.handle,
                rows=local_rows,
                piece=_piece_of(server, part),
            )

    def _server_of(self, part: Part) -> Server:
        (server,) = (
            server
            for server in self._step_ops.servers
            if (part.table, part.index) in zip(server.tables, server.numbers)
        )
        return server


def _piece_of(server: Server, part: Part) -> int:
    """Returns the index of a part on its server."""
    return list(zip(server.tables, server.numbers)).index(
        (part.table, part.index)
    )
