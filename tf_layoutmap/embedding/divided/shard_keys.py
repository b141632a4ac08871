"""The shards of open vocabularies in one process.

`ShardKeys` runs the ops that look up, admit, evict and write keys of the
segments that this process owns. `local_spec_of_keys` returns the spec of these
shards.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.embedding.host import open_tables
from tf_layoutmap.vocabulary import bucket_layout, key_rows

Array = np.ndarray[Any, Any]


def local_spec_of_keys(
    spec: config.EmbeddingSpec, has_shard: Sequence[bool]
) -> config.EmbeddingSpec:
    """Returns a spec in which only tables with a shard have a vocabulary.

    Args:
      spec: Spec of the engine of this process.
      has_shard: For each table, whether this process has a shard of it.
    """
    return dataclasses.replace(
        spec,
        tables=tuple(
            table if has else dataclasses.replace(table, vocabulary=None)
            for table, has in zip(spec.tables, has_shard)
        ),
    )


class ShardKeys(open_tables.OpenTables):
    """The shards of open tables in this process."""

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        unsharded: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        first_rows: Sequence[int],
    ):
        """Prepares the arguments of ops.

        Args:
          spec: Result of `local_spec_of_keys`.
          unsharded: Spec of the unsharded tables.
          variables: Variables of this process, by table and name.
          first_rows: For each table, the index of the first row of the shard.
        """
        super().__init__(spec, variables)
        self._global = unsharded
        self._first_rows = list(first_rows)

    @property
    def numbers(self) -> list[int]:
        """Indices of the open tables of which this process has a shard."""
        return self._numbers

    def vocabulary_buckets(self) -> list[int]:
        """Returns the number of buckets of each full vocabulary, or 0."""
        return [
            0
            if table.vocabulary is None
            else table.vocabulary.settings.num_buckets
            for table in self._spec.tables
        ]

    def admit_requests(
        self,
        engine: tf.Tensor,
        training: Any,
        requests: Sequence[tf.Tensor],
        kinds: tf.Tensor,
        *,
        request_tables: Sequence[int],
        keeps_change: bool,
        num_earlier: int,
    ) -> Any:
        """Finds rows of requested keys, and assigns rows to new keys.

        Args:
          engine: Handle of the engine.
          training: Whether the keys are counted and new keys get rows.
          requests: For each replica, a request of the op `RequestKeys`.
          kinds: Kind of the keys of each table in `numbers`.
          request_tables: See the op `AdmitRequests`.
          keeps_change: Whether `undo_admissions` can undo the call even if no
            table has `on_evict`.
          num_earlier: Number of preceding calls for the same step.

        Returns:
          The outputs of the op. `evicted` contains tensors of each table with
          `on_evict`, in the order of the tables.
        """
        with tf.device(engine.device):
            return ops.admit_requests(
                engine=engine,
                training=tf.convert_to_tensor(training, tf.bool),
                requests=list(requests),
                state=_handles(self._state),
                shards=_handles(self._shards),
                slots=_handles(self._slots),
                key_kinds=tf.cast(kinds, tf.int32),
                request_tables=list(request_tables),
                keeps_change=keeps_change,
                num_earlier=num_earlier,
                **self._attrs,
            )

    def evicted_of(
        self, table: int, values: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the tensors of one table in an output `evicted`.

        Args:
          table: Index of a table with `on_evict`.
          values: Output `evicted` of `admit_requests`, or an empty list.

        Returns:
          The keys, their rows and the values of their slot variables. The
          tensors are empty if this process has no shard of the table.
        """
        spec = self._spec.tables[table]
        slots = spec.slots
        none = [
            tf.zeros([0], tf.int64),
            tf.zeros([0, spec.dim], spec.dtype),
            *(tf.zeros([0, slot.dim(spec.dim)]) for slot in slots),
        ]
        first = 0
        for number in self._reporters:
            size = 1 + len(self._dtypes[number])
            if number == table and values:
                return [
                    tf.ensure_shape(value, [None, *like.shape[1:]])
                    for value, like in zip(values[first : first + size], none)
                ]
            first += size
        return none

    def report(self, table: int, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Calls `on_evict` of a table, and returns the error message.

        Args:
          table: Index of a table with `on_evict` and a shard in this process.
          values: Keys, rows and values of slot variables.
        """

        def call(*tensors: tf.Tensor) -> str:
            try:
                self._reporters[table](*(tensor.numpy() for tensor in tensors))
            except BaseException as error:
                return (
                    f"`on_evict` raised {type(error).__name__}: {error}. The "
                    "step was not enqueued.\n"
                    + "".join(traceback.format_exception(error))
                )
            return ""

        return tf.ensure_shape(
            tf.py_function(
                tf_private.kept_by_graphs(call), list(values), tf.string
            ),
            [],
        )

    def undo_admissions(
        self, engine: tf.Tensor, why: tf.Tensor
    ) -> tf.Operation | None:
        """Undoes the last calls of `admit_requests`, if they can be undone.

        Args:
          engine: Handle of the engine.
          why: Error message of the step.

        Returns:
          The operation, or None outside of a graph.
        """
        with tf.device(engine.device):
            return ops.take_back_keys(
                engine=engine,
                why=why,
                raises=False,
                may_be_missing=True,
                state=_handles(self._state),
                shards=_handles(self._shards),
                slots=_handles(self._slots),
            )

    def evict_own(
        self, engine: tf.Tensor, table: int, keys: tf.Tensor, *, expired: bool
    ) -> list[Array]:
        """Evicts the keys that this process owns; see `OpenTables`.

        Returns:
          The evicted keys. If the table has `on_evict`, the keys are followed
          by rows and values of slot variables, in the order of the op.
        """
        if table in self._numbers:
            with tf.device(engine.device):
                eviction = self._run_eviction(
                    engine, table, keys, expired=expired
                )
            values = [eviction.evicted, *eviction.values]
        else:
            sharing = open_specs.sharing(self._global, table)
            values = [tf.zeros([0], tf.int64)]
            for number in sharing:
                values += self.evicted_of(number, [])[1:]
        has_reporter = (
            self._global.tables[table].vocabulary.settings.on_evict is not None
        )
        return [
            value.numpy() for value in (values if has_reporter else values[:1])
        ]

    def report_eviction(self, table: int, arrays: Sequence[Array]) -> None:
        """Calls `on_evict` for the result of `evict_own`, of all processes."""
        self._report_eviction(table, *arrays)

    def undo_own_eviction(
        self, engine: tf.Tensor, table: int, why: str
    ) -> None:
        """Undoes the last call of `evict_own`."""
        if table in self._numbers:
            self.undo_eviction(engine, table, why)

    def write_own(
        self, engine: tf.Tensor, table: int, written: key_rows.RowsToWrite
    ) -> tuple[Array, int]:
        """Writes the rows of the keys that this process owns.

        Returns:
          The row of each key, or -1, and the number of keys of this process
          that had no row before.
        """
        rows = np.full(written.keys.shape, -1, np.int64)
        if table not in self._numbers:
            return rows, 0
        spec = self._spec.tables[table]
        variables = self._of_table[table]
        first = self._first_bucket(table)
        buckets = bucket_layout.buckets_of(
            written.keys, spec.vocabulary.settings.num_buckets
        )
        places = np.flatnonzero(
            (buckets >= first)
            & (buckets < first + int(variables["state"][0].shape[0]))
        )
        # The op also runs without keys, because it sets the step.
        with tf.device(engine.device):
            rows[places], num_new = open_tables.write_keys(
                spec,
                table,
                written.part(places),
                variables,
                first_bucket=first,
                engines=[engine],
                sharing=open_tables.sharing_tables(
                    self._spec, self._of_table, table
                ),
            )
        return rows, num_new

    def _first_bucket(self, table: int) -> int:
        return self._first_rows[table] // bucket_layout.KEYS_PER_BUCKET


def _handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]
