"""The rows of a `ShardedEmbedding` in an exported model."""

from __future__ import annotations

import tensorflow as tf

from tf_layoutmap.serving.tables import stored_tables
from tf_layoutmap.serving.tables.stored_tables import StoredTable, Wanted


class RowLookup:
    """Looks rows up in a table of an export."""

    def __init__(self, table: StoredTable, layer: str):
        """Takes the table and the name of the layer, for messages."""
        self._table = table
        self._message = (
            f"Ids must be in [0, {table.num_rows}) (layer {layer!r})."
        )

    @tf.autograph.experimental.do_not_convert
    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns `ids.shape + [dim]` float32; an id outside is an error."""
        flat = tf.cast(tf.reshape(ids, [-1]), tf.int64)
        (found,) = stored_tables.gather(
            [Wanted(self._table, flat, self._message)], "error"
        )
        dim = self._table.variable.form.dim
        rows = tf.reshape(found.rows, tf.concat([tf.shape(ids), [dim]], 0))
        return tf.ensure_shape(rows, ids.shape.concatenate([dim]))
