"""Trains the rows of a table that a step has looked up, and no others."""

from typing import Any

import keras

from tf_layoutmap.embedding.spec.optimizer_specs import OptimizerSpec
from tf_layoutmap.layers.shared.row_optimizer_base import RowUpdates


@keras.saving.register_keras_serializable("tf_layoutmap")
class RowOptimizer(RowUpdates, keras.optimizers.Optimizer):
    """The optimizer inside a `ShardedEmbedding`.

    The gradients of equal ids are summed first, in the order of the ids; then
    each row that was looked up takes one step of the rule, in one native op.
    Neither depends on how many rows the table has.

    It is a Keras optimizer so that its learning rate, step count and slot
    variables are set, scheduled and saved as usual:

    >>> import tf_layoutmap as tlm
    >>> layer = tlm.layers.ShardedEmbedding(10, 2, optimizer="adagrad")
    >>> layer.optimizer.learning_rate = 0.5
    >>> float(layer.optimizer.learning_rate)
    0.5

    It trains its own table only, and cannot be given to `compile`.
    """

    _keras = keras

    def __init__(self, spec: OptimizerSpec, *, name: str | None = None):
        """Takes a rule; `ShardedEmbedding` makes it from its argument.

        Args:
          spec: The rule. Its learning rate may be a
            `keras.optimizers.schedules.LearningRateSchedule` as well.
          name: Name of the optimizer.
        """
        super().__init__(
            learning_rate=spec.learning_rate, name=name or f"row_{spec.name}"
        )
        self._spec = spec

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Refused, as `build`."""
        self.build(trainable_variables)

    def _scalars(self) -> list[keras.Variable]:
        # Keras lists slot variables of a mesh with them, others not.
        slots = self.slots.values()
        return [
            variable
            for variable in self.variables
            if not any(variable is slot for slot in slots)
        ]

    def _rate_config(self) -> Any:
        return keras.optimizers.Optimizer.get_config(self)["learning_rate"]
