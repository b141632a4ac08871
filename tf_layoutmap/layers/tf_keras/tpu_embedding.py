"""`TPUEmbedding` for tf_keras models.

`StepVariable` is the class of mark weights. A layer has a mark weight if an
engine trains its tables; see `layers.base.mark_weights`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf
import tf_keras

from tf_layoutmap._core import patches, tf_keras_private, tf_private
from tf_layoutmap.embedding.table_variable import strategy_in_scope
from tf_layoutmap.layers.base import (
    keras_version_guard,
    mark_weights,
    weight_files,
)
from tf_layoutmap.layers.base.mark_weights import MarkedTables
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore
from tf_layoutmap.layers.tf_keras.patches import SelfTrained

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Features, InputShape


class LayerTables(MarkedTables, Protocol):
    """The tables of a layer, an `EmbeddingSteps` or a `KeyTable`."""

    @property
    def unlisted(self) -> str | None:
        """Why the tables are not weights. None: they are weights.

        The text follows "tables" in messages.
        """
        ...

    @property
    def has_ordered_steps(self) -> bool:
        """Whether TPU programs contain the steps, which have one call each."""
        ...


class StepMethods(SelfTrained):
    """Methods of a mark weight, in addition to the methods of its variable.

    The gradient of this weight is a sum of marks. The optimizer has already
    removed the loss scale from the gradient.
    """

    # The layer's `EmbeddingSteps` or `KeyTable`. The method `create` sets this
    # attribute, which is not a part of the variable's value.
    steps: LayerTables

    if TYPE_CHECKING:
        name: str

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Restores the tables from the copy that `value` holds.

        If the layer's weights include the tables, the method does nothing. The
        value of a mark weight is always zero, and its shape depends on the
        number of replicas of the program that saved it.

        Raises:
          RuntimeError: If the tables are not among the weights, and `value`
            holds no copy of them.
        """
        del args, kwargs
        if self.unlisted_tables() is None:
            return self
        copied = mark_weights.tables_in(value)
        if copied is None:
            raise RuntimeError(
                weight_files.set_weights_error(self.steps.layer_name)
            )
        self.steps.load(copied)
        return self

    def numpy(self) -> np.ndarray:
        """Returns the value, for `get_weights`.

        If the tables are not among the weights, the value holds a copy of them.
        """
        if self.unlisted_tables() is None:
            variable: Any = super()
            return variable.numpy()
        return mark_weights.marks_with_tables(self.steps)

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return mark_weights.missing_gradient_message(
            self.steps.layer_name, self.steps.table_names
        )

    def unlisted_tables(self) -> str | None:
        """Returns why the tables are not weights; None if they are weights."""
        return self.steps.unlisted

    def apply_gradient(self, gradient: tf.Tensor) -> None:
        """Applies a step to the tables. The optimizer calls this method."""
        self.steps.apply(gradient)

    def apply_summed_gradient(
        self, gradient: tf.Tensor, optimizer: Any
    ) -> None:
        """Applies a step with a gradient that was summed over the replicas.

        Raises:
          NotImplementedError: If the caller is not a loss scale optimizer.
            Other callers may pass a mean over the replicas instead of a sum.
        """
        num_replicas = self.steps.num_replicas
        if num_replicas > 1 and not getattr(
            optimizer, "_is_wrapped_by_loss_scale_optimizer", False
        ):
            raise NotImplementedError(
                "With a TPUEmbedding layer the model's optimizer must sum the "
                "gradients of replicas: call `apply_gradients` "
                "without `skip_gradients_aggregation=True` or "
                "`experimental_aggregate_gradients=False`. Received: optimizer "
                f"{type(optimizer).__name__} (weight {self.name!r})."
            )
        self.steps.apply(gradient / num_replicas)


class StepVariable(StepMethods, tf_private.ResourceVariable):
    """Mark weight: notifies a layer when the model's optimizer is applied."""

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        # The saved value is always zero. Its shape depends on the number of
        # replicas of the program that saved it.
        del restored_tensors
        return self.handle

    @classmethod
    def create(
        cls,
        steps: LayerTables,
    ) -> StepVariable:
        """Creates the weight for the strategy of the current scope."""
        with tf.device(steps.variable_device):
            variable = cls(
                tf.zeros(steps.mark_shape),
                name="marks",
                trainable=True,
                distribute_strategy=strategy_in_scope(),
            )
        variable.steps = steps
        return variable


def create_marks(steps: LayerTables) -> Any:
    """Creates a mark weight for the strategy of the current scope.

    A TPU program cannot read a variable of the host. The strategy therefore
    creates the variable, and the methods of a mark weight are added to it.
    """
    if not steps.has_ordered_steps:
        with tf.init_scope():
            return StepVariable.create(steps)
    patches.ensure("tf_keras_self_training")
    marks: Any = tf.Variable(
        tf.zeros(steps.mark_shape), trainable=True, name="marks"
    )
    marks.__class__ = type("StepVariableOnTPU", (StepMethods, type(marks)), {})
    marks.steps = steps
    return marks


@tf_keras.saving.register_keras_serializable("tf_layoutmap")
class TPUEmbedding(TPUEmbeddingCore, tf_keras.layers.Layer):
    """Looks up all features of a model in tables that have separate optimizers.

    This layer is the tf_keras version of `tlm.layers.TPUEmbedding`, and has the
    same arguments and results. The layer also supports `OneDeviceStrategy`,
    `MirroredStrategy` and an emulated TPU.

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

    def _support_evaluation(self) -> None:
        patches.ensure("tf_keras_evaluation")

    def build(self, input_shape: InputShape = None) -> None:
        """Creates the tables."""
        if self.built:
            return
        if tf_keras_private.layout_map_in_use() is not None:
            raise NotImplementedError(
                "tlm.layers.tf_keras.TPUEmbedding is not supported on a mesh, "
                "because DTensor cannot run the steps of its tables, which are "
                "on the host; use tlm.layers.TPUEmbedding of Keras 3, or build "
                "the layer outside of `layout_map_scope`. Received: layer "
                f"{self.name!r}."
            )
        with tf.init_scope():
            self._steps.build()
        self._marks = create_marks(self._steps)
        super().build(input_shape)

    def call(
        self,
        inputs: Features,
        weights: Features | None = None,
        training: bool | None = None,
    ) -> Any:
        # If tables are sharded over processes, all processes must take part in
        # a lookup, and a TPU looks rows up only in a step. The layer therefore
        # returns zeros outside of a step. When a subclassed model is loaded,
        # tf_keras builds the model with floats for all inputs.
        if tf_keras_private.is_building_a_model() or (
            (self._steps.access.is_sharded or self._steps.has_ordered_steps)
            and tf_keras_private.is_only_for_shapes()
        ):
            return self._cast(self._steps.zeros(inputs))
        return super().call(inputs, weights, training)

    def _marks_variable(self) -> tf.Variable:
        return self._marks

    def _check_keras_version(self, inputs: Any) -> None:
        keras_version_guard.check_not_keras3(self, inputs)
