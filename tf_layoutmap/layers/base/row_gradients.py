"""Gradients of the rows of a table with an open vocabulary.

`OpenRows` is the source of these gradients: `tape.gradient(loss, rows)` returns
a `tf.IndexedSlices` of the rows that the program has looked up, as for a table
without a vocabulary. The program may apply any operation to the gradient. The
engine keeps the rows assigned to their keys until the gradient is applied or
discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import tensorflow as tf

from tf_layoutmap._core import function_traces, ops, tf_private
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.gradient import ShardedVariableGradient
from tf_layoutmap.sharded.routing.checks import Shards
from tf_layoutmap.sharded.sharded_variable import to_shards

tf_private.register_read_only_op("LayoutMap>ReadOpenRows")


class _RecordedGradient(ShardedVariableGradient):
    """Gradient whose rows the engine keeps assigned to their keys."""

    def replace_gradient_components(
        self, value: Any, component_grads: Sequence
    ) -> tf.Tensor | tf.IndexedSlices | None:
        gradient = super().replace_gradient_components(value, component_grads)
        return None if gradient is None else value.record(gradient)


class TableOfRows(Protocol):
    """A table with an open vocabulary."""

    @property
    def rows(self) -> Any:
        """The rows, a `tf.Variable` or a `ShardedVariable`."""
        ...

    @property
    def access(self) -> LayerAccess:
        """Access to the embedding of the table."""
        ...


class OpenRows(ShardedVariable):
    """The rows of a table with an open vocabulary, as a source of gradients."""

    __composite_gradient__ = _RecordedGradient()

    _table: TableOfRows
    # Trainable variables with the handles of the shards. The shards are not
    # trainable, because a `tlm.TPUEmbedding` trains its tables itself.
    _watched: Sequence[Any]

    @classmethod
    def of_table(cls, table: TableOfRows) -> Any:
        """Creates the object for a built table."""
        open_rows = cls._from_shards(to_shards(table.rows))
        open_rows._table = table
        open_rows._watch_shards()
        return open_rows

    def update_rows(self) -> None:
        """Uses the current rows of the table, which `resize` replaces."""
        shards = to_shards(self._table.rows)
        if shards.variables[0] is not self._own_shards.variables[0]:
            self._own_shards = shards
            self._watch_shards()

    def _watch_shards(self) -> None:
        self._watched = [
            tf_private.BaseResourceVariable(
                trainable=True,
                shape=shard.shape,
                dtype=shard.dtype,
                handle=shard.handle,
                name=shard.name.split(":")[0],
                unique_id=shard._unique_id,
                handle_name=shard._handle_name.split(":")[0],
                in_graph_mode=False,
            )
            for shard in self._own_shards.variables
        ]

    @property
    def trainable(self) -> bool:
        """True, because gradient tapes watch the rows."""
        return True

    def _shards(self) -> Shards:
        return self._own_shards

    def is_recorded(self) -> bool:
        """Returns whether a tape records reads of the rows.

        Traces of functions depend on the result.
        """
        return function_traces.is_recorded(*self._watched, resumes=True)

    def look_up(self, samples: Any) -> tf.Tensor:
        """Returns the rows of keys in a training step of the vocabulary.

        Args:
          samples: Keys, at most one per sample.

        Returns:
          `[num_samples, dim]` float32; zeros for samples without a key and for
          keys without a row. The gradient contains only keys with a row.
        """
        lookup = self._table.access.open_rows(samples)
        shards = self._own_shards
        with tf.device(tables.HOST):
            return ops.read_open_rows(
                engine=lookup.engine,
                token=lookup.token,
                rows=lookup.rows,
                shards=[shard.handle for shard in shards.variables],
                offsets=tf.constant(shards.partition.offsets, tf.int64),
                placement=shards.partition.placement,
                dim=self.shape[1],
                table=self.name,
            )

    def record(
        self, gradient: tf.Tensor | tf.IndexedSlices
    ) -> tf.Tensor | tf.IndexedSlices:
        """Returns the gradient; its rows stay assigned to their keys."""
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values,
                self._table.access.record_gradient(
                    tf.cast(gradient.indices, tf.int64)
                ),
                gradient.dense_shape,
            )
        # In a loop, TensorFlow computes a dense gradient.
        recorded = self._table.access.record_gradient(tf.zeros([0], tf.int64))
        with tf.control_dependencies([recorded]):
            return tf.identity(gradient)

    def apply_to_rows(self, gradient: tf.Tensor | tf.IndexedSlices) -> None:
        """Applies one step of the row optimizer.

        Args:
          gradient: A gradient that `record` returned, or a tensor or
            `tf.IndexedSlices` that was computed from such gradients.

        Raises:
          ValueError: If the gradient has another shape than the table.
          tf.errors.FailedPreconditionError: If the gradient was already
            applied, or if its rows may belong to other keys by now. No row is
            changed.
        """
        self._check_shape(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            rows = tf.cast(gradient.indices, tf.int64)
            values: Any = gradient.values
        else:
            rows = tf.range(cast("int", self.shape[0]), dtype=tf.int64)
            values = gradient
        self._table.access.apply_recorded(
            rows,
            tf.cast(values, tf.float32),
            is_dense=not isinstance(gradient, tf.IndexedSlices),
        )

    def _check_shape(self, gradient: Any) -> None:
        shape: Any = gradient.shape
        if isinstance(gradient, tf.IndexedSlices):
            known: Any = tf.get_static_value(gradient.dense_shape)
            dims: Any = None if known is None else list(known)
            shape = tf.TensorShape(dims)
        if not shape.is_compatible_with(self.shape):
            raise ValueError(
                f"The gradient of table {self.name!r} must have shape "
                f"{self.shape}. Received: shape {shape}. After a change of the "
                "capacity, compute the gradient again."
            )
