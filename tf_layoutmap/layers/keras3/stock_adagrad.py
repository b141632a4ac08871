"""`StockAdagrad`: the rule of Keras 3's Adagrad, for the rows of a step."""

import keras
import tensorflow as tf

from tf_layoutmap.layers.keras3.row_optimizer import RowOptimizer


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
        if not self._table.is_local:
            raise NotImplementedError(
                "A replaced Embedding with Adagrad must be on one host. "
                f"Received: table {self._table.name!r} on a mesh or on "
                "parameter servers. Create a tlm.layers.ShardedEmbedding "
                "instead."
            )
        self._table.update(
            list(self.slots.values()),
            ids,
            values,
            optimizer="adagrad" if self._sums_equal_ids else "adagrad_per_id",
            hyperparameters=tf.reshape(learning_rate, [1]),
        )

    def accumulate(
        self,
        gradient: tf.IndexedSlices | tf.Tensor,
        steps: int,
        is_last: tf.Tensor,
        position: tf.Tensor | None = None,
    ) -> None:
        """Accumulates a gradient, and applies the mean if it is the last one.

        Keras accumulates dense gradients, which contain the sum of each row.

        Args:
          gradient: As for `update`.
          steps: Number of gradients in the mean.
          is_last: `[]` bool: whether to apply the step now.
          position: As for `RowOptimizer.accumulate`.
        """
        self._sums_equal_ids = True
        try:
            super().accumulate(gradient, steps, is_last, position)
        finally:
            self._sums_equal_ids = False
