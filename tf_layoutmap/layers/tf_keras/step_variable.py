"""The weight of a layer whose tables an engine trains: it takes the marks."""

from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.variables.table_variable import (
    strategy_in_scope,
)
from tf_layoutmap.layers.steps import key_table, missing_gradients
from tf_layoutmap.layers.steps.tpu_embedding_steps import EmbeddingSteps
from tf_layoutmap.layers.tf_keras.patches import SelfTrained


class StepVariable(SelfTrained, _tf_private.ResourceVariable):
    """Tells a layer when the model's optimizer takes a step.

    Its gradient is a sum of marks, which a loss scale is taken out of.
    """

    # Of the layer; set by `create`, and no part of the variable.
    steps: key_table.KeyTable | EmbeddingSteps

    @classmethod
    def create(
        cls,
        steps: key_table.KeyTable | EmbeddingSteps,
    ) -> "StepVariable":
        """Makes the weight, in the strategy of the caller."""
        with tf.device(steps.variable_device):
            found = cls(
                tf.zeros(steps.mark_shape),
                name="marks",
                trainable=True,
                distribute_strategy=strategy_in_scope(),
            )
        found.steps = steps
        return found

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses `set_weights` where it has no tables.

        Raises:
          RuntimeError: It has none.
        """
        if self.missing_tables() is not None:
            raise RuntimeError(
                missing_gradients.tables_are_no_weights(self.steps.layer_name)
            )
        return super().assign(value, *args, **kwargs)

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return missing_gradients.message(
            self.steps.layer_name, self.steps.table_names
        )

    def missing_tables(self) -> str | None:
        """Which tables of the layer are no weights that tf_keras knows."""
        if isinstance(self.steps, key_table.KeyTable):
            return "with an open vocabulary"
        return (
            "divided among processes" if self.steps.access.is_divided else None
        )

    def train(self, gradient: tf.Tensor) -> None:
        """Lets the tables take their step; the optimizer calls this."""
        self.steps.apply(gradient)

    def train_summed(self, gradient: tf.Tensor, optimizer: Any) -> None:
        """The same of a gradient that was added up over the replicas.

        Raises:
          NotImplementedError: If that was done by somebody else than a loss
            scale: it may have been a mean.
        """
        num_replicas = self.steps.num_replicas
        if num_replicas > 1 and not getattr(
            optimizer, "_is_wrapped_by_loss_scale_optimizer", False
        ):
            raise NotImplementedError(
                "A model with a TPUEmbedding layer leaves it to its optimizer "
                "to sum the gradients of replicas: call `apply_gradients` "
                "without `skip_gradients_aggregation=True` or "
                "`experimental_aggregate_gradients=False`. Received: optimizer "
                f"{type(optimizer).__name__} (weight {self.name!r})."
            )
        self.steps.apply(gradient / num_replicas)
