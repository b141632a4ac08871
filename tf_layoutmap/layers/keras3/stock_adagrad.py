"""`StockAdagrad`: the rule of Keras 3's Adagrad, for the rows of a step."""

import keras
import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.layers.base import tables
from tf_layoutmap.layers.keras3.row_optimizer import RowOptimizer
from tf_layoutmap.sharded import ShardedVariable


@keras.saving.register_keras_serializable("tf_layoutmap")
class StockAdagrad(RowOptimizer):
    """Adagrad as Keras 3 computes it for the gradient of an `Embedding`.

    If an id occurs several times in a step, Keras 3 squares each of its
    gradients and adds up the squares. The rule `"adagrad"` of a
    `ShardedEmbedding` squares the sum of the gradients instead.

        accumulator[row] += sum(gradient ** 2 for each occurrence of row)
        table[row] -= learning_rate * sum(gradients) / sqrt(accumulator[row])

    Keras adds `epsilon` to the accumulator before the square root. In this
    class, the initial value of the accumulator contains `epsilon`.
    """

    # Whether the gradients of equal ids are summed before they are squared.
    _sums_equal_ids = False

    def _apply_rule(
        self, ids: tf.Tensor, values: tf.Tensor, learning_rate: tf.Tensor
    ) -> None:
        if type(self._table) is not tables.HostTable:
            raise NotImplementedError(
                "A replaced Embedding with Adagrad must be on one host. "
                f"Received: table {self._table.name!r} on a mesh or on "
                "parameter servers. Create a tlm.layers.ShardedEmbedding "
                "instead."
            )
        if self._sums_equal_ids:
            super()._apply_rule(ids, values, learning_rate)
            return
        (accumulators,) = self.slots.values()
        batch = _UniqueRows(ids, self._table._variable)
        batch.subtract(accumulators, tf.square(values), tf.constant(1.0), -1.0)
        scales = tf.math.rsqrt(accumulators.sparse_read(ids))
        batch.subtract(self._table._variable, values * scales, learning_rate)

    def accumulate(
        self,
        gradient: tf.IndexedSlices | tf.Tensor,
        steps: int,
        is_last: tf.Tensor,
    ) -> None:
        """Accumulates a gradient, and applies the mean if it is the last one.

        Keras accumulates dense gradients, which contain the sum of each row.

        Args:
          gradient: As for `update`.
          steps: Number of gradients in the mean.
          is_last: `[]` bool: whether to apply the step now.
        """
        self._sums_equal_ids = True
        try:
            super().accumulate(gradient, steps, is_last)
        finally:
            self._sums_equal_ids = False


class _UniqueRows:
    """The unique rows of a step, for updates of variables of equal shards."""

    def __init__(self, ids: tf.Tensor, variable: ShardedVariable):
        """Finds the unique rows.

        Args:
          ids: `[num_ids]` int32 or int64.
          variable: The table, whose shards the other variables also have.
        """
        self._partition = variable.partition
        self._name = variable.name
        self._row_splits = tf.range(tf.size(ids, tf.int64) + 1)
        self._found = ops.find_unique_rows(
            ids=ids,
            row_splits=self._row_splits,
            weights=tf.zeros([0]),
            combiner="sum",
            num_rows=self._partition.num_rows,
            feature=self._name,
            table=self._name,
        )

    def subtract(
        self,
        variable: ShardedVariable,
        values: tf.Tensor,
        scale: tf.Tensor,
        sign: float = 1.0,
    ) -> None:
        """Subtracts `sign * scale * values`, `[num_ids, dim]`, summed by row.

        `scale` is at least 0, because it is the learning rate of a rule.
        """
        gains, unique_rows, unique_splits, positions = self._found
        if sign != 1.0:
            gains = tf.fill([tf.shape(values)[0]], sign)
        ops.apply_row_gradients(
            shards=[shard.handle for shard in variable.variables],
            slots=[],
            offsets=tf.constant(self._partition.offsets, tf.int64),
            unique_rows=unique_rows,
            unique_splits=unique_splits,
            positions=positions,
            row_splits=self._row_splits,
            gains=gains,
            gradients=values,
            hyperparameters=tf.reshape(scale, [1]),
            placement=self._partition.placement,
            optimizer="sgd",
            table=self._name,
        )
