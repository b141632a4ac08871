"""The shards of open vocabularies in one process.

`ShardKeys` runs the ops that look up, admit, evict and write keys of the
segments that this process owns. `local_spec_of_keys` returns the spec of these
shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import open_tables

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
                **self._handles(),
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

        return tf.ensure_shape(
            open_tables.error_of_report(
                self._reporters[table], values, "The step was not enqueued"
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
                **self._handles(),
            )
