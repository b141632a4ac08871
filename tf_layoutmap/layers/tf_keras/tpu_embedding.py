"""`TPUEmbedding` for models of tf_keras."""

# DOC-MERGE: The weight of a layer whose tables an engine trains: it takes the marks.
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private, tf_private
from tf_layoutmap.embedding.table_variable import strategy_in_scope
from tf_layoutmap.layers.base import keras_version_guard, key_table
from tf_layoutmap.layers.base import steps as base_steps
from tf_layoutmap.layers.base.steps import EmbeddingSteps
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore
from tf_layoutmap.layers.tf_keras.patches import SelfTrained


class StepVariable(SelfTrained, tf_private.ResourceVariable):
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
                base_steps.tables_are_not_weights(self.steps.layer_name)
            )
        return super().assign(value, *args, **kwargs)

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return base_steps.missing_gradient_message(
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


@tf_keras.saving.register_keras_serializable("tf_layoutmap")
class TPUEmbedding(TPUEmbeddingCore, tf_keras.layers.Layer):
    """Looks up all features of a model, in tables with their own optimizers.

    `tlm.layers.TPUEmbedding` for tf_keras: the same arguments, and the same
    numbers, under `OneDeviceStrategy` and `MirroredStrategy` too.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_keras
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(4, 1, tf.ones, combiner="sum", name="words")
    >>> inputs = {"title": tf_keras.Input([2], dtype="int64")}
    >>> layer = tlm.layers.tf_keras.TPUEmbedding(
    ...     {"title": tpu.FeatureConfig(words)}, tpu.SGD(1.0))
    >>> model = tf_keras.Model(inputs, layer(inputs)["title"])
    >>> model.compile("adam", loss=lambda y, x: tf.reduce_sum(x, axis=1))
    >>> _ = model.fit({"title": np.array([[3, 0]])}, np.zeros([1]), verbose=0)
    >>> layer.embedding_tables[words].numpy().ravel().tolist()
    [0.0, 1.0, 1.0, 0.0]

    Attributes:
      embedding: The `tlm.TPUEmbedding`.
    """

    def build(self, input_shape: Any = None) -> None:
        """Makes the tables."""
        if self.built:
            return
        # It runs layers where a TPU has no step, as to make a functional model.
        if self._steps.is_on_tpu:
            raise NotImplementedError(
                f"Layer {self.name!r} does not train on a TPU in tf_keras; "
                "tlm.layers.TPUEmbedding of Keras 3 does."
            )
        with tf.init_scope():
            self._steps.build()
            marks = StepVariable.create(self._steps)
        self._marks = marks
        super().build(input_shape)

    def call(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        # Divided tables are looked up by all processes, in a step. A subclassed
        # model that is loaded is built with floats for all inputs.
        if tf_keras_private.is_building_a_model() or (
            self._steps.access.is_divided
            and tf_keras_private.is_only_for_shapes()
        ):
            return self._cast(self._steps.zeros(inputs))
        return super().call(inputs, weights, training)

    def _marks_variable(self) -> tf.Variable:
        return self._marks

    def _refuse_other_keras(self, inputs: Any) -> None:
        keras_version_guard.refuse_keras(self, inputs)
