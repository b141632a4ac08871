"""Eviction and writes of keys outside of steps, on all runtimes.

`KeyEditor` calls an op for each part of a table, on the device and in the
process that hold the part. `host/key_editor.py` and `servers/key_editor.py`
contain the ops of engines and of servers.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import processes, tables
from tf_layoutmap.embedding.configs import open_tables
from tf_layoutmap.embedding.table_store import TableStore
from tf_layoutmap.vocabulary import bucket_layout, key_rows
from tf_layoutmap.vocabulary.parts import Part

Array = np.ndarray[Any, Any]


class KeyEditor(abc.ABC):
    """Evicts and writes keys of tables with open vocabularies.

    If several tables share a vocabulary, all of them lose the rows of evicted
    keys, and new keys get rows in all of them. Methods of subclasses therefore
    take the parts of all these tables that have the same index. The first part
    belongs to the owner of the vocabulary, or to the table that is written.
    """

    def __init__(self, store: TableStore, flush: Callable[[], None]):
        """Stores the access to the tables.

        Args:
          store: The current tables.
          flush: Function that applies the pending pipelined update.
        """
        self._store = store
        self._spec = store.spec
        self._flush = flush

    def evict_keys(
        self, table: int, keys: tf.Tensor, *, expired: bool
    ) -> tf.Tensor:
        """Evicts keys of one table; see `EngineBackend.evict_keys`.

        If an error occurs in one process, all processes undo the eviction.
        """
        group = self._store.group
        call = f"`evict` of table {self._spec.tables[table].name!r}"
        if group is not None:
            group.require_eager(call)
            values = keys.numpy()
            group.check_equal(
                f"The keys in {call}",
                f"{values.size} keys with checksum "
                f"{zlib.crc32(values.tobytes())}"
                f"{' and all expired keys' * expired}",
            )
        keys = tf.reshape(keys, [-1])
        shared_parts = self._shared_parts(
            open_tables.sharing(self._spec, table)
        )

        def run(function: Callable[[Sequence[Part]], Any]) -> list[Any]:
            return [
                self._store.run(
                    shared[0], lambda _, shared=shared: function(shared)
                )
                for shared in shared_parts
            ]

        def undo(why: str) -> None:
            run(lambda shared: self._undo_eviction(shared, why))

        results: list[Any] = []
        with processes.failing_together(group, call, undo):
            if not expired:
                # All parts are checked before any part is changed.
                run(lambda shared: self._check_eviction(shared, keys))
            results = run(
                lambda shared: self._evict(shared, keys, expired=expired)
            )
        evicted, *values = (
            tf.convert_to_tensor(column[0])
            if len(column) == 1
            else tf.concat(column, 0)
            for column in zip(*self._store.collect(results), strict=True)
        )
        if values:
            with processes.failing_together(group, call, undo):
                if group is None or group.is_first:
                    self._run(
                        shared_parts[:1],
                        lambda shared: self._report(shared, [evicted, *values]),
                    )
        if expired or len(shared_parts) == 1:
            return evicted
        return _in_order_of(keys, evicted)

    def write_rows(
        self, table: int, written: key_rows.RowsToWrite
    ) -> tuple[Array, int]:
        """Writes the rows of keys; see `EngineBackend.write_rows`.

        Each part gets only the rows of its own keys. If other tables use the
        same vocabulary, new keys get initial values in these tables.
        """
        store = self._store
        # Each process writes all rows to its copies of the tables.
        group = store.group if store.is_sharded else None
        table_spec = self._spec.tables[table]
        call = f"`write` of table {table_spec.name!r}"
        if group is not None:
            group.require_eager(call)
            group.check_equal(
                f"The arguments of {call}",
                f"{written.keys.size} keys with checksum {written.checksum()}",
            )
        num_buckets = table_spec.vocabulary.settings.num_buckets
        others = [
            other
            for other in open_tables.sharing(self._spec, table)
            if other != table
        ]
        shared_parts = self._shared_parts([table, *others])
        places = _places_in_parts(
            written.keys,
            [shared[0].buckets for shared in shared_parts],
            num_buckets,
        )
        results: list[Any] = []
        with processes.failing_together(group, call):
            # The pending update would change rows after they were written.
            self._flush()
            # The op also runs without keys, because it sets the step.
            results = [
                store.run(
                    shared[0],
                    lambda _, shared=shared, place=place: self._write(
                        shared, written.part(place)
                    ),
                )
                for shared, place in zip(shared_parts, places, strict=True)
            ]
        rows = np.full(written.keys.shape, -1, np.int64)
        num_new = 0
        for place, (part_rows, part_new) in zip(
            places, store.collect(results), strict=True
        ):
            rows[place] = part_rows
            num_new += int(part_new)
        return rows, num_new

    def _shared_parts(self, numbers: Sequence[int]) -> list[Sequence[Part]]:
        """Returns the parts of tables with the same index, for each index."""
        return list(zip(*map(self._store.parts, numbers), strict=True))

    def _run(
        self,
        shared_parts: Sequence[Sequence[Part]],
        function: Callable[[Sequence[Part]], Any],
    ) -> list[Any]:
        """Calls a function for parts with the same index; see `TableStore`."""
        return [
            self._store.run(
                shared[0], lambda _, shared=shared: function(shared)
            )
            for shared in shared_parts
        ]

    def _write(
        self, shared: Sequence[Part], written: key_rows.RowsToWrite
    ) -> list[Any]:
        """Writes rows of keys of a part.

        Returns:
          The row of each key, or -1, and the number of keys that had no row
          before.
        """
        specs = [self._spec.tables[part.table] for part in shared]
        values = [spec.vocabulary.first_values for spec in specs]
        slots = [[slot.initial_value for slot in spec.slots] for spec in specs]
        settings = specs[0].vocabulary.settings
        variables, *others = (self._rows_and_slots(part) for part in shared)
        written_keys = ops.write_keys(
            **self._write_arguments(shared),
            state=tables.handles(shared[0].state),
            shards=variables[0],
            slots=variables[1],
            keys=written.keys,
            last_steps=written.last_steps,
            counts=written.counts,
            step=tf.constant(written.step, tf.int64),
            values=written.rows,
            slot_values=written.slots,
            table=specs[0].name,
            table_index=shared[0].table,
            first_bucket=shared[0].buckets.start,
            vocabulary_buckets=settings.num_buckets,
            has_sketch=settings.has_sketch,
            key_kind=written.kind,
            first_values=values[0].kind,
            first_limits=values[0].limits,
            first_seed=values[0].seed,
            initial_slots=slots[0],
            sharing_shards=[
                handle for rows, slots in others for handle in [*rows, *slots]
            ],
            sharing_first_values=[value.kind for value in values[1:]],
            sharing_first_limits=[
                limit for value in values[1:] for limit in value.limits
            ],
            sharing_first_seeds=[value.seed for value in values[1:]],
            sharing_initial_slots=[
                value for table_slots in slots[1:] for value in table_slots
            ],
        )
        rows = written_keys.rows.numpy()
        self._record_written(shared, rows)
        return [rows, written_keys.num_new.numpy()]

    def _rows_and_slots(
        self, part: Part
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns handles of the rows, and of all slot variables."""
        rows, *slots = part.row_variables(
            slot.name for slot in self._spec.tables[part.table].slots
        )
        return tables.handles(rows), [
            handle for slot in slots for handle in tables.handles(slot)
        ]

    # Ops of a part.

    def _check_eviction(self, shared: Sequence[Part], keys: tf.Tensor) -> None:
        """Checks that `_evict` succeeds, if there can be several parts here."""
        del shared, keys

    @abc.abstractmethod
    def _evict(
        self, shared: Sequence[Part], keys: tf.Tensor, *, expired: bool
    ) -> list[tf.Tensor]:
        """Evicts the keys of a part.

        Returns:
          The evicted keys. If `_report` must be called, also their rows and the
          values of their slot variables in all tables.
        """

    def _undo_eviction(self, shared: Sequence[Part], why: str) -> None:
        """Undoes the last call of `_evict`.

        Args:
          shared: The parts.
          why: Reason, for the message if the call cannot be undone.
        """
        del shared, why

    def _report(
        self, shared: Sequence[Part], values: Sequence[tf.Tensor]
    ) -> None:
        """Calls `on_evict`, and undoes the eviction if `on_evict` raises.

        Args:
          shared: A part of this process.
          values: Results of `_evict`, concatenated over all parts.
        """
        del shared, values

    @abc.abstractmethod
    def _write_arguments(self, shared: Sequence[Part]) -> dict[str, Any]:
        """Returns the arguments of `WriteKeys` that depend on the runtime."""

    def _record_written(self, shared: Sequence[Part], rows: Array) -> None:
        """Records written rows that the op does not record."""
        del shared, rows


def _places_in_parts(
    keys: Array, buckets: Sequence[range], num_buckets: int
) -> list[Any]:
    """Returns the places in `keys` of the keys of each part.

    Args:
      keys: The keys.
      buckets: The buckets of each part.
      num_buckets: Number of buckets of the vocabulary.
    """
    if len(buckets) == 1:
        return [slice(None)]
    of_keys = bucket_layout.buckets_of(keys, num_buckets)
    return [
        np.flatnonzero((of_keys >= part.start) & (of_keys < part.stop))
        for part in buckets
    ]


def _in_order_of(keys: tf.Tensor, evicted: tf.Tensor) -> tf.Tensor:
    """Returns each evicted key once, in the order of `keys`."""
    unique, _ = tf.unique(keys)
    evicted = tf.sort(tf.concat([evicted, [bucket_layout.EMPTY_KEY]], axis=0))
    nearest = tf.gather(
        evicted, tf.searchsorted(evicted, unique, side="right") - 1
    )
    is_key = unique != bucket_layout.EMPTY_KEY
    return tf.boolean_mask(unique, (nearest == unique) & is_key)
