"""Eviction and writes of keys by the ops of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import key_editor, tables
from tf_layoutmap.embedding.host import open_tables
from tf_layoutmap.embedding.host.step_engine import StepEngine
from tf_layoutmap.embedding.table_store import TableStore
from tf_layoutmap.vocabulary.parts import Part


class EngineKeyEditor(key_editor.KeyEditor):
    """Evicts and writes keys in the part of this process."""

    def __init__(
        self, store: TableStore, flush: Callable[[], None], engine: StepEngine
    ):
        """Stores the access to the tables.

        Args:
          store: The current tables.
          flush: Function that applies the pending pipelined update.
          engine: The engine of this process.
        """
        super().__init__(store, flush)
        self._engine = engine

    def _evict(
        self, shared: Sequence[Part], keys: tf.Tensor, *, expired: bool
    ) -> list[tf.Tensor]:
        specs = [self._spec.tables[part.table] for part in shared]
        settings = specs[0].vocabulary.settings
        evictions = ops.evict_keys(
            engine=self._engine.handle,
            keys=keys,
            expired=expired,
            table=shared[0].table,
            sharing=[part.table for part in shared[1:]],
            Tvalues=[
                dtype
                for spec in specs
                for dtype in open_tables.row_dtypes(spec)
            ],
            **self._variables(shared),
            **settings.policy(),
        )
        if settings.on_evict is None:
            return [evictions.evicted]
        return [evictions.evicted, *evictions.values]

    def _undo_eviction(self, shared: Sequence[Part], why: str) -> None:
        ops.take_back_keys(
            engine=self._engine.handle,
            why=why,
            raises=False,
            in_processes=False,
            **self._variables(shared),
        )

    def _report(
        self, shared: Sequence[Part], values: Sequence[tf.Tensor]
    ) -> None:
        def report(keys: Any, *arrays: Any) -> None:
            first = 0
            for part in shared:
                stop = first + 1 + len(self._spec.tables[part.table].slots)
                self._engine.report_evicted(
                    part.table, [keys, *arrays[first:stop]]
                )
                first = stop

        open_tables.report_or_undo(
            report,
            values,
            self._engine.handle,
            "No key was evicted",
            in_processes=False,
            **self._variables(shared),
        )

    def _variables(self, shared: Sequence[Part]) -> dict[str, list[tf.Tensor]]:
        """Returns the variables of tables that share a vocabulary."""
        rows_and_slots = [self._rows_and_slots(part) for part in shared]
        return {
            "state": tables.handles(shared[0].state),
            "shards": [row for rows, _ in rows_and_slots for row in rows],
            "slots": [slot for _, slots in rows_and_slots for slot in slots],
        }

    def _write_arguments(self, shared: Sequence[Part]) -> dict[str, Any]:
        return {
            "engine": [self._engine.handle],
            "server": [],
            "fetched_steps": [],
            "sharing": [part.table for part in shared[1:]],
        }
