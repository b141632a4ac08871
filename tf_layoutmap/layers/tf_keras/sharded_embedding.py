"""`ShardedEmbedding` for tf_keras models.

`TrainedTable` is the only weight of a layer that has an optimizer.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tensorflow as tf
import tf_keras

from tf_layoutmap._core import patches, tf_keras_private, tf_private
from tf_layoutmap.embedding.table_variable import strategy_in_scope
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.base import (
    input_ids,
    keras_version_guard,
    key_table,
    mark_weights,
    row_gradients,
    tables,
    weight_files,
)
from tf_layoutmap.layers.base.model_optimizer import FollowsModel, ModelStep
from tf_layoutmap.layers.base.program_steps import ProgramSteps
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore
from tf_layoutmap.layers.base.tables import HOST
from tf_layoutmap.layers.tf_keras.patches import SelfTrained
from tf_layoutmap.layers.tf_keras.row_optimizer import RowOptimizer
from tf_layoutmap.layers.tf_keras.tpu_embedding import create_marks
from tf_layoutmap.sharded import ShardedVariable

if TYPE_CHECKING:
    from tf_layoutmap._core.types import InputShape, ShapeLike, TensorLike


class TrainedTable(SelfTrained, ShardedVariable):
    """A full table, trained by a `RowOptimizer`.

    For tf_keras, the table is one weight, and a tape computes one gradient for
    the weight. The model's optimizer passes this gradient to the table inside
    `apply_gradients` and creates no slot variables. Predictions do not train
    the table.
    """

    def set_optimizer(self, optimizer: RowOptimizer) -> None:
        """Creates the slot variables of `optimizer`, which trains the table."""
        self._optimizer = optimizer
        # The method `compile` of tf_keras reads this attribute of every weight.
        self._distribute_strategy = strategy_in_scope()
        optimizer._set_table(tables.table_for_strategy(self, optimizer._spec))

    @property
    def follows_model(self) -> bool:
        """Whether the optimizer of the model determines the rule."""
        return self._optimizer._follows_model

    def follow(self, optimizer: Any) -> None:
        """Prepares the table for the model's optimizer, if it follows one."""
        if isinstance(self._optimizer, FollowsModel):
            self._optimizer.follow(optimizer)

    def applying(
        self, step: ModelStep | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context in which gradients are applied as a step of the model."""
        if step is None or not isinstance(self._optimizer, FollowsModel):
            return contextlib.nullcontext()
        return self._optimizer.applying(step)

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return mark_weights.missing_gradient_message(self.name, ())

    def apply_gradient(self, gradient: tf.Tensor | tf.IndexedSlices) -> None:
        """Applies a step to the table.

        The model's optimizer calls this method.
        """
        self._optimizer.update(gradient)

    def apply_summed_gradient(self, gradient: Any, optimizer: Any) -> None:
        """Applies a step with a gradient that was summed over the replicas."""
        del optimizer
        self._optimizer._update(gradient, is_summed=True)


class TableOnTPU(SelfTrained):
    """Methods of the weight of a table on the host beside a TPU.

    The strategy creates the variable, a scalar on the TPU, whose gradient is
    the mark of a step; see `ProgramSteps`.
    """

    steps: ProgramSteps
    table: TrainedTable

    @classmethod
    def create(cls, steps: ProgramSteps, table: TrainedTable) -> Any:
        """Creates the weight of a table in the scope of the strategy."""
        patches.ensure("tf_keras_self_training")
        weight: Any = tf.Variable(tf.zeros([]), trainable=True, name="marks")
        weight.__class__ = type(cls.__name__, (cls, type(weight)), {})
        weight.steps, weight.table = steps, table
        return weight

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the table."""
        return tf.TensorShape(self.table.shape)

    def numpy(self) -> np.ndarray:
        """Returns the rows."""
        return self.table.numpy()

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns the rows."""
        del args, kwargs
        self.table.assign(value)
        return self

    @property
    def follows_model(self) -> bool:
        """Whether the optimizer of the model determines the rule."""
        return self.table.follows_model

    def follow(self, optimizer: Any) -> None:
        """Prepares the table for the model's optimizer, if it follows one."""
        self.table.follow(optimizer)

    def applying(
        self, step: ModelStep | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context in which gradients are applied as a step of the model."""
        return self.table.applying(step)

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return self.table.missing_gradient_error()

    def apply_gradient(self, gradient: tf.Tensor) -> None:
        """Applies a step to the table.

        The model's optimizer calls this method.
        """
        self.steps.apply(gradient)

    def apply_summed_gradient(
        self, gradient: tf.Tensor, optimizer: Any
    ) -> None:
        """Applies a step with a mark that was summed over the replicas."""
        del optimizer
        context = tf.distribute.get_replica_context()
        self.steps.apply(gradient / context.num_replicas_in_sync)


class OpenTable(SelfTrained, row_gradients.OpenRows):
    """A table with an open vocabulary, whose gradient contains its rows."""

    _table: key_table.KeyTable

    @classmethod
    def of_table(cls, table: Any) -> OpenTable:
        """Creates the weight of a built table."""
        patches.ensure("tf_keras_self_training")
        open_table = super().of_table(table)
        # The method `compile` of tf_keras reads this attribute of every weight.
        open_table._distribute_strategy = strategy_in_scope()
        return open_table

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return mark_weights.missing_gradient_message(
            self._table.layer_name, self._table.table_names
        )

    def unlisted_tables(self) -> str:
        """Returns why the keys of the table are not weights."""
        return "with an open vocabulary"

    def apply_gradient(self, gradient: tf.Tensor | tf.IndexedSlices) -> None:
        """Applies a step to the table.

        The model's optimizer calls this method.
        """
        self._table.apply(gradient)

    def apply_summed_gradient(self, gradient: Any, optimizer: Any) -> None:
        """Applies a step to the table, in the same way as `apply_gradient`."""
        del optimizer
        self.apply_gradient(gradient)

    def numpy(self, **kwargs: Any) -> np.ndarray:
        """Returns the rows, with a copy of the keys, for `get_weights`."""
        return mark_weights.marks_with_tables(
            self._table, super().numpy(**kwargs)
        )

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Restores the table from the copy that an array holds.

        Raises:
          RuntimeError: If the array is not a result of `numpy`.
        """
        del args, kwargs
        copied = mark_weights.tables_in(value)
        if copied is None:
            raise RuntimeError(
                weight_files.set_weights_error(self._table.layer_name)
            )
        self._table.load(copied)
        return self


@tf_keras.saving.register_keras_serializable("tf_layoutmap")
class ShardedEmbedding(EmbeddingCore, tf_keras.layers.Layer):
    """Looks up ids in a sharded table, like `tf_keras.layers.Embedding`.

    This layer is the tf_keras version of `tlm.layers.ShardedEmbedding`, and has
    the same arguments and results.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_keras
    >>> import tf_layoutmap as tlm
    >>> model = tf_keras.Sequential([
    ...     tf_keras.Input([2], dtype="int64"),
    ...     tlm.layers.tf_keras.ShardedEmbedding(
    ...         5, 1, num_shards=2, optimizer="model",
    ...         embeddings_initializer="zeros", name="words"),
    ...     tf_keras.layers.Flatten(),
    ... ])
    >>> table = model.get_layer("words")
    >>> model.compile(
    ...     tf_keras.optimizers.SGD(1.0),
    ...     loss=lambda y, x: tf.reduce_sum(x, axis=1))
    >>> _ = model.fit(np.array([[3, 3]]), np.zeros([1]), verbose=0)
    >>> table.embeddings.numpy().ravel().tolist()
    [0.0, 0.0, 0.0, -2.0, 0.0]

    If `optimizer` is set, the table is one weight. The method `apply_gradients`
    of the model's optimizer updates the table. Optimizers of
    `tf_keras.optimizers.legacy` are also supported. If `optimizer` is None,
    each shard is a weight. If `input_dim` is a `tlm.vocabulary.OpenVocabulary`,
    ids are keys.

    Attributes:
      optimizer: The `RowOptimizer`, or None.
      num_shards: Number of shards of the table.
    """

    _keras = tf_keras
    _row_optimizer = RowOptimizer

    @property
    def _table_class(self) -> type[ShardedVariable]:
        return TrainedTable if self.optimizer else ShardedVariable

    def _track_embedding(self, embedding: TPUEmbedding) -> None:
        # Automatic tracking is disabled here, because tf_keras would list the
        # shards of this attribute as weights.
        self.__dict__["embedding"] = embedding
        self._track_trackable(embedding, "embedding")

    def _name_scope_of_weights(self) -> str:
        return tf.get_current_name_scope() or self.name

    def _support_evaluation(self) -> None:
        patches.ensure("tf_keras_evaluation")

    def build(self, input_shape: InputShape = None) -> None:
        """Creates the table."""
        if self.built:
            return
        self._check_can_build()
        if tf_keras_private.layout_map_in_use() is not None:
            raise RuntimeError(
                "tlm.layers.tf_keras.ShardedEmbedding is not supported on a "
                "mesh; use tlm.layers.ShardedEmbedding of Keras 3, or build "
                "this layer outside of `layout_map_scope`. Received: layer "
                f"{self.name!r}."
            )
        if self._key_table is not None:
            with tf.init_scope():
                # If a strategy sums gradients over replicas, its destination
                # must be a tf.Variable, also with one replica.
                sums_replicas = tf.distribute.has_strategy() and not isinstance(
                    tf.distribute.get_strategy(),
                    tf.distribute.OneDeviceStrategy,
                )
                self._key_table.build(None if sums_replicas else OpenTable)
            marks = create_marks(self._key_table)
            if self._key_table.open_rows is None:
                self._marks = marks
            else:
                # Checkpoints of earlier versions contain a mark weight.
                self.__dict__["_marks"] = marks
                self._track_trackable(marks, "_marks")
                self._trainable_weights.append(self._key_table.open_rows)
            super().build(input_shape)
            return
        if self._is_copied_by_strategy():
            self._add_copied_weight()
            super().build(input_shape)
            return
        table = self._make_table()
        # Checkpoints of tf_keras.layers.Embedding contain the rows under this
        # key.
        self._track_trackable(table, "embeddings")
        if self.optimizer:
            with tf.init_scope(), tf.device(HOST):
                table.set_optimizer(self.optimizer)
        # `__dict__` bypasses Keras' tracking, because the table is already
        # tracked.
        self.__dict__["_shards"] = tf.Module()
        self._shards.variables_in_order = table.variables
        weights = [table] if self.optimizer else table.variables
        if self._is_beside_tpu():
            program_steps = ProgramSteps(
                self.name, self._make_table, self.optimizer
            )
            self.__dict__["_program_steps"] = program_steps
            weights = [TableOnTPU.create(program_steps, table)]
        self._trainable_weights.extend(weights)
        if not self.optimizer:
            # The patches check that the model's optimizer supports shards.
            patches.ensure("tf_keras_self_training")
            self._set_regularizer_and_constraint()
        super().build(input_shape)

    def _add_copied_weight(self) -> None:
        """Adds the table as a weight that the strategy copies to replicas."""
        # `__dict__` bypasses Keras' tracking, because the weight is already
        # tracked.
        self.__dict__["_copied_weight"] = self.add_weight(
            name="embeddings",
            shape=(self.input_dim, self.output_dim),
            initializer=self._full_table_initializer(),
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            experimental_autocast=False,
        )

    def _set_regularizer_and_constraint(self) -> None:
        """Sets regularizer and constraint for the full table."""
        if self.embeddings_regularizer is not None:
            regularizer = tables.FullTableRegularizer(
                self.embeddings_regularizer, self._make_table
            )
            self.add_loss(lambda: regularizer(None))
        if self.embeddings_constraint is not None:
            tf_private.set_constraint(
                self._make_table().variables[-1],
                tables.FullTableConstraint(
                    self.embeddings_constraint, self._make_table
                ),
            )

    def _is_traced_for_shapes(self) -> bool:
        # A functional model calls the layer with ids that have the dtype of the
        # input.
        return (
            super()._is_traced_for_shapes()
            or tf_keras_private.is_building_a_model()
        )

    def _marks_variable(self) -> tf.Variable:
        if self._program_steps is not None:
            return self._trainable_weights[0]
        return self._marks

    def _exported_shards(self) -> list[tf.Variable]:
        return list(self._shards.variables_in_order)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "checkpoint" and self.built and not self.optimizer:
            # The shards are the same variables as the table, so only one of the
            # two attributes is listed.
            children.pop("embeddings", None)
            children["_shards"] = self._shards
        return children

    def _check_keras_version(self, inputs: Any) -> None:
        keras_version_guard.check_not_keras3(self, inputs)

    def compute_mask(
        self,
        inputs: TensorLike | tf.RaggedTensor | tf.SparseTensor,
        mask: TensorLike | None = None,
    ) -> tf.Tensor | None:
        """Returns False for padding; None if `mask_zero` is false."""
        del mask
        if not self.mask_zero:
            return None
        if isinstance(inputs, tf.SparseTensor):
            return input_ids.to_dense_mask(
                inputs, key_table.is_not_padding(inputs.values)
            )
        if self._key_table is not None:
            return key_table.is_not_padding(inputs)
        return tf.not_equal(cast("tf.Tensor", inputs), 0)

    def compute_output_shape(self, input_shape: ShapeLike) -> tf.TensorShape:
        """Returns `input_shape + (output_dim,)`."""
        shape = tf.TensorShape(cast("Any", input_shape))
        return shape.concatenate([self.output_dim])
