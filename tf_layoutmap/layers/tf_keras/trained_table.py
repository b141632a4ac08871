"""A table that is one weight of a tf_keras layer and trains itself."""

from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.variables.table_variable import (
    strategy_in_scope,
)
from tf_layoutmap.layers.shared import servers_table
from tf_layoutmap.layers.steps import missing_gradients
from tf_layoutmap.layers.tf_keras.patches import SelfTrained
from tf_layoutmap.layers.tf_keras.row_optimizer import RowOptimizer
from tf_layoutmap.sharded import ShardedVariable


class TrainedTable(SelfTrained, ShardedVariable):
    """A whole table, trained by a `RowOptimizer`.

    tf_keras sees a weight of the table's shape, of which a tape gives one
    gradient. The model's optimizer hands that over inside `apply_gradients`
    and makes no slot variables: nothing trains while one only predicts.
    """

    # tf_keras reads it of every weight.
    constraint = None

    def be_trained_by(self, optimizer: RowOptimizer) -> None:
        """Makes the slot variables of `optimizer`, which takes the steps."""
        self._optimizer = optimizer
        # tf_keras' `compile` asks each weight for it.
        self._distribute_strategy = strategy_in_scope()
        optimizer.create_slots(servers_table.table_of(self, optimizer._spec))

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return missing_gradients.message(self.name, ())

    def train(self, gradient: tf.Tensor | tf.IndexedSlices) -> None:
        """Takes a step; the model's optimizer calls this."""
        self._optimizer.update(gradient)

    def train_summed(self, gradient: Any, optimizer: Any) -> None:
        """The same: a table takes its gradients as they come."""
        del optimizer
        self.train(gradient)
