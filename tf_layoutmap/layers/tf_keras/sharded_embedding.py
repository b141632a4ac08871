"""`ShardedEmbedding` for models of tf_keras."""

# DOC-MERGE: A table that is one weight of a tf_keras layer and trains itself.
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private, tf_private
from tf_layoutmap.embedding.table_variable import strategy_in_scope
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.base import (
    keras_version_guard,
    key_table,
    steps,
    tables,
)
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore
from tf_layoutmap.layers.base.tables import HOST
from tf_layoutmap.layers.tf_keras.patches import SelfTrained
from tf_layoutmap.layers.tf_keras.row_optimizer import RowOptimizer
from tf_layoutmap.layers.tf_keras.tpu_embedding import StepVariable
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
        optimizer.create_slots(tables.servers_table_of(self, optimizer._spec))

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return steps.missing_gradient_message(self.name, ())

    def train(self, gradient: tf.Tensor | tf.IndexedSlices) -> None:
        """Takes a step; the model's optimizer calls this."""
        self._optimizer.update(gradient)

    def train_summed(self, gradient: Any, optimizer: Any) -> None:
        """The same: a table takes its gradients as they come."""
        del optimizer
        self.train(gradient)


@tf_keras.saving.register_keras_serializable("tf_layoutmap")
class ShardedEmbedding(EmbeddingCore, tf_keras.layers.Layer):
    """Turns ids into rows of a table that is held in shards.

    `tlm.layers.ShardedEmbedding` for tf_keras: the same arguments, and the
    same numbers.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_keras
    >>> import tf_layoutmap as tlm
    >>> model = tf_keras.Sequential([
    ...     tf_keras.Input([2], dtype="int64"),
    ...     tlm.layers.tf_keras.ShardedEmbedding(
    ...         5, 1, num_shards=2, optimizer="sgd",
    ...         embeddings_initializer="zeros", name="words"),
    ...     tf_keras.layers.Flatten(),
    ... ])
    >>> table = model.get_layer("words")
    >>> table.optimizer.learning_rate = 1.0
    >>> model.compile("adam", loss=lambda y, x: tf.reduce_sum(x, axis=1))
    >>> _ = model.fit(np.array([[3, 3]]), np.zeros([1]), verbose=0)
    >>> table.embeddings.numpy().ravel().tolist()
    [0.0, 0.0, 0.0, -2.0, 0.0]

    With an `optimizer` of its own the table is one weight, which takes its
    step inside the `apply_gradients` of the model's optimizer, a
    `tf_keras.optimizers.legacy` one too. Without, each shard is a weight.
    With a `tlm.OpenVocabulary` for `input_dim`, ids are keys.

    Attributes:
      optimizer: The `RowOptimizer`, or None.
      num_shards: Into how many shards the table is cut.
    """

    _keras = tf_keras
    _row_optimizer = RowOptimizer

    @property
    def _table_class(self) -> type[ShardedVariable]:
        return TrainedTable if self.optimizer else ShardedVariable

    def _track_embedding(self, embedding: TPUEmbedding) -> None:
        # Not by an attribute, whose shards tf_keras would list as weights.
        self.__dict__["embedding"] = embedding
        self._track_trackable(embedding, "embedding")

    def build(self, input_shape: Any = None) -> None:
        """Makes the table."""
        if self.built:
            return
        self._check_can_build()
        if tf_keras_private.layout_map_in_use() is not None:
            raise RuntimeError(
                "On a mesh, tables belong to models of Keras 3; use "
                "tlm.layers.ShardedEmbedding, or build this layer outside of "
                f"`layout_map_scope`. Received: layer {self.name!r} of "
                "tf_keras."
            )
        if self._key_table is not None:
            with tf.init_scope():
                self._key_table.build()
                self._marks = StepVariable.create(self._key_table)
            super().build(input_shape)
            return
        table = self._make_table()
        # Where a checkpoint holds the rows of tf_keras.layers.Embedding.
        self._track_trackable(table, "embeddings")
        if self.optimizer:
            with tf.init_scope(), tf.device(HOST):
                table.be_trained_by(self.optimizer)
        # Not an attribute that Keras tracks: these are the rows of the table.
        self.__dict__["_shards"] = tf.Module()
        self._shards.variables_in_order = table.variables
        self._trainable_weights.extend(
            [table] if self.optimizer else table.variables
        )
        if not self.optimizer:
            self._rule_shards()
        super().build(input_shape)

    def _rule_shards(self) -> None:
        """Hands the constraint to one shard, which does it for all."""
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

    def _stateless_seed(self, initializer: Any) -> tf.Tensor | None:
        return tf_keras_private.stateless_seed_of(initializer)

    def _is_traced_for_shapes(self) -> bool:
        # A layer in a functional model is looked up by ids of its dtype.
        return (
            super()._is_traced_for_shapes()
            or tf_keras_private.is_building_a_model()
        )

    def _marks_variable(self) -> tf.Variable:
        return self._marks

    def _exported_shards(self) -> list[tf.Variable]:
        return list(self._shards.variables_in_order)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "checkpoint" and self.built and not self.optimizer:
            # The weights or the table, and not both: they are the same rows.
            children.pop("embeddings", None)
            children["_shards"] = self._shards
        return children

    def _refuse_other_keras(self, inputs: Any) -> None:
        keras_version_guard.refuse_keras(self, inputs)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns which ids are not padding; None without `mask_zero`."""
        del mask
        if not self.mask_zero:
            return None
        if self._key_table is not None:
            return key_table.is_no_padding(inputs)
        return tf.not_equal(inputs, 0)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """Returns `input_shape + (output_dim,)`."""
        return tf.TensorShape(input_shape).concatenate([self.output_dim])
