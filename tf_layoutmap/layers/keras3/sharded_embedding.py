"""`ShardedEmbedding` for Keras 3, on the host or on a mesh.

`KeyMask` computes the mask of a layer with an open vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, cast, overload

import keras
import tensorflow as tf

from tf_layoutmap._core import (
    keras_private,
    patches,
    placeholders,
    tf_private,
)
from tf_layoutmap.layers.base import (
    input_ids,
    keras_version_guard,
    key_table,
    tables,
)
from tf_layoutmap.layers.base.key_table import KeyTable
from tf_layoutmap.layers.base.program_steps import ProgramSteps
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore
from tf_layoutmap.layers.keras3 import process_fit
from tf_layoutmap.layers.keras3.host_weights import (
    CopiedWeight,
    ShardWeight,
    TableWeight,
    TableWeightOnTPU,
)
from tf_layoutmap.layers.keras3.key_table_weight import KeyTableWeight
from tf_layoutmap.layers.keras3.row_optimizer import RowOptimizer
from tf_layoutmap.layers.keras3.step_weight import StepWeight
from tf_layoutmap.layout.keras3 import context as mesh_context
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

if TYPE_CHECKING:
    from tf_layoutmap._core.types import InputShape, TensorLike, Weights
    from tf_layoutmap.layers.keras3.mesh_host_tables import MeshKeys


@keras.saving.register_keras_serializable("tf_layoutmap")
class KeyMask(keras.Operation):
    """Mask that is False for padding.

    Unlike Keras' ops, this operation supports strings and sparse ids.
    """

    def call(self, ids: Any) -> tf.Tensor:
        """Returns a bool for each id: False if the id is padding."""
        if isinstance(ids, tf.SparseTensor):
            return input_ids.to_dense_mask(
                ids, key_table.is_not_padding(ids.values)
            )
        return key_table.is_not_padding(tf.convert_to_tensor(ids))

    def compute_output_spec(self, ids: Any) -> keras.KerasTensor:
        """Returns the `KerasTensor` of the result."""
        return keras.KerasTensor(ids.shape, dtype="bool")


@keras.saving.register_keras_serializable("tf_layoutmap")
class ShardedEmbedding(EmbeddingCore, keras.layers.Layer):
    """Looks up ids in a sharded table, like `keras.layers.Embedding`.

    If `optimizer` is set, a training step reads and writes only the rows of the
    batch. The duration of a step therefore does not depend on the size of the
    table. If an id occurs several times in a batch, its row is updated once,
    with the sum of the gradients.

    >>> import keras, numpy as np, tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> model = keras.Sequential([
    ...     keras.Input([2], dtype="int64"),
    ...     tlm.layers.ShardedEmbedding(
    ...         5, 1, num_shards=2, optimizer="model",
    ...         embeddings_initializer="zeros", name="words"),
    ...     keras.layers.Flatten(),
    ... ])
    >>> table = model.get_layer("words")
    >>> model.compile(
    ...     keras.optimizers.SGD(1.0),
    ...     loss=lambda y, x: keras.ops.sum(x, axis=1))
    >>> _ = model.fit(np.array([[3, 3]]), np.zeros([1]), verbose=0)
    >>> table.embeddings.numpy().ravel().tolist()
    [0.0, 0.0, 0.0, -2.0, 0.0]

    The table is initialized shard by shard. The table is saved as one array in
    `.keras` files, `.weights.h5` files and checkpoints, which can be loaded
    into a layer with any number of shards. This layer can also read a
    checkpoint of `keras.layers.Embedding`, and `keras.layers.Embedding` can
    read a checkpoint of this layer. An exported model uses only TensorFlow's
    own ops.

    The table is updated when the model's optimizer is applied, in `fit` and
    `train_on_batch`. In a custom training loop, the table is updated when
    `apply_gradients` is called with the gradients of `trainable_variables`. The
    layer may be called several times in a step. If the model's optimizer scales
    the loss, the scale is removed from the gradients of the table. With
    `optimizer="model"`, the table is trained with the rule of the model's
    optimizer, including its learning rate, clipping and weight decay. With a
    separate optimizer, these settings do not affect the table. The model's
    optimizer does not average the table (`use_ema`).

    Under `MirroredStrategy` and `MultiWorkerMirroredStrategy`, all replicas
    train the table in one step, with the gradients of the global batch. The
    table therefore matches a run with one replica. Under `TPUStrategy`, the
    host looks up the rows before the program of the TPU, and applies their
    gradients after it. A table without a separate optimizer is a weight of
    which each replica has a copy, and `num_shards` has no effect.

    Under `ParameterServerStrategy` the shards and their slot variables are on
    the parameter servers, and `fit` requires `tlm.ps.Datasets`.

    Under `tlm.layout_map_scope` the table is one weight on the mesh. The layout
    of `<layer>.embeddings` shards the rows over the devices. A table with an
    open vocabulary stays on the host, and the mesh receives its rows.

    If `input_dim` is a `tlm.vocabulary.OpenVocabulary`, ids are keys: any int64
    values or strings. A call that a tape records is a training step of the
    vocabulary, in which new keys are assigned rows. Evaluation, prediction and
    exported models look up keys and do not change the vocabulary.

    >>> words = tlm.vocabulary.OpenVocabulary(1000)
    >>> layer = tlm.layers.ShardedEmbedding(words, 2,
    ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
    >>> inputs = keras.Input([1], dtype="string")
    >>> model = keras.Model(inputs, keras.layers.Flatten()(layer(inputs)))
    >>> model.compile("adam", "mse")
    >>> _ = model.fit(tf.constant([["red"]]), np.zeros([1, 2]), verbose=0)
    >>> layer.vocabulary.contains(["red", "owl"]).numpy().tolist()
    [True, False]

    Attributes:
      optimizer: The `RowOptimizer`, or None.
      num_shards: Number of shards of the table. On a mesh, the layout
        determines the shards, and this number is ignored.
    """

    _keras = keras
    _row_optimizer = RowOptimizer
    _is_on_mesh = False
    # The table, if it has an open vocabulary and the layer is on a mesh.
    _host_tables: MeshKeys | None = None

    @overload
    def __call__(
        self, inputs: keras.KerasTensor, *args: object, **kwargs: object
    ) -> keras.KerasTensor: ...

    @overload
    def __call__(
        self, inputs: tf.RaggedTensor, *args: object, **kwargs: object
    ) -> tf.RaggedTensor: ...

    @overload
    def __call__(
        self, inputs: tf.SparseTensor, *args: object, **kwargs: object
    ) -> tf.Tensor: ...

    @overload
    def __call__(
        self,
        inputs: TensorLike | StoredKeys,
        *args: object,
        **kwargs: object,
    ) -> tf.Tensor: ...

    def __call__(
        self, inputs: object, *args: object, **kwargs: object
    ) -> object:
        """Calls the layer; see `call` for the arguments."""
        input_ids.check_inputs(inputs, self.name)
        if inputs is None or isinstance(inputs, Mapping):
            raise TypeError(
                "Ids must be one tensor. Received: "
                f"{type(inputs).__name__} (layer {self.name!r})."
            )
        if isinstance(inputs, StoredKeys):
            # Keras accepts other objects than tensors only by keyword.
            return super().__call__(*args, **kwargs, inputs=inputs)
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: InputShape = None) -> None:
        """Creates the table."""
        if self.built:
            return
        self._check_can_build()
        shape = (self.input_dim, self.output_dim)
        context, owner, _ = mesh_context.context_of_new_variable()
        self._is_on_mesh = context is not None
        if self._key_table is not None:
            self._build_key_table(self._key_table)
        elif self._is_on_mesh:
            self._build_on_mesh(context, owner, shape)
        elif self._is_beside_tpu():
            program_steps = ProgramSteps(
                self.name, self._make_table, self.optimizer
            )
            self.__dict__["_program_steps"] = program_steps
            self._embeddings = TableWeightOnTPU(
                program_steps, self._make_table(), self.optimizer
            )
        elif self.optimizer:
            self._embeddings = TableWeight(
                self._make_table, shape, optimizer=self.optimizer
            )
        elif self._is_copied_by_strategy():
            weight = self._embeddings = CopiedWeight(
                self._full_table_initializer(),
                shape=shape,
                dtype=self.variable_dtype,
                autocast=False,
                name="embeddings",
            )
            weight.regularizer = self.embeddings_regularizer
            weight.constraint = self.embeddings_constraint
            self.__dict__["_copied_weight"] = weight
        else:
            sizes = RowPartition.div(self.input_dim, self.num_shards).sizes
            self._shard_weights = [
                ShardWeight(
                    self._make_table,
                    shard,
                    (size, self.output_dim),
                    dtype=self.variable_dtype,
                    is_only_shard=len(sizes) == 1,
                )
                for shard, size in enumerate(sizes)
            ]
            self._set_regularizer_and_constraint()
        for weight in self._trainable_variables:
            weight.trainable = self.trainable
        self.built = True

    def _build_key_table(self, table: KeyTable) -> None:
        context, owner, _ = mesh_context.context_of_new_variable()
        if context is None:
            table.build()
            self._marks = (
                StepWeight(table)
                if table.open_rows is None
                else KeyTableWeight(table)
            )
            return
        from tf_layoutmap.layers.keras3 import mesh_host_tables

        with mesh_host_tables.creating_tables(context, self.name):
            table.build(None)
        self._host_tables = mesh_host_tables.MeshKeys(table)
        self._marks = mesh_host_tables.MeshStepWeight(
            self._host_tables, context, owner
        )

    def _support_string_batches(self) -> None:
        patches.ensure("keras3_string_batches")

    def _support_processes(self) -> None:
        process_fit.enable_in_processes()

    def _support_evaluation(self) -> None:
        patches.ensure("keras3_evaluation")

    def _set_regularizer_and_constraint(self) -> None:
        """Sets the regularizer and the constraint of the last shard."""
        last = self._shard_weights[-1]
        if self.embeddings_regularizer is not None:
            last.regularizer = tables.FullTableRegularizer(
                self.embeddings_regularizer, self._make_table
            )
        if self.embeddings_constraint is not None:
            last.constraint = tables.FullTableConstraint(
                self.embeddings_constraint, self._make_table
            )

    def _build_on_mesh(
        self, context: Any, owner: Any, shape: tuple[int, int]
    ) -> None:
        if self._has_shard_arguments:
            raise ValueError(
                "Arguments `num_shards` and `partitioner` must be None on a "
                "mesh, where the LayoutMap shards tables. Received: "
                f"num_shards={self.num_shards} (layer {self.name!r})."
            )
        from tf_layoutmap.layers.keras3 import mesh_weights

        if self.optimizer and self.embeddings_regularizer is not None:
            mesh_weights.check_regularizer(
                self.embeddings_regularizer, self.name
            )
        if self.optimizer:
            self._embeddings = mesh_weights.MeshTableWeight(
                context,
                owner,
                self._full_table_initializer(),
                shape,
                optimizer=self.optimizer,
            )
        else:
            self._embeddings = self.add_weight(
                shape,
                self._full_table_initializer(),
                name="embeddings",
                autocast=False,
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            )

    def problems_of_layout(self, axes: tuple[str | None, ...]) -> list[str]:
        """Returns the reasons why the table cannot have the layout `axes`."""
        if self._key_table is not None:
            return []  # The table is on the host.
        from tf_layoutmap.layers.keras3 import mesh_weights

        return mesh_weights.layout_problems(self, axes)

    @property
    def embeddings(self) -> Any:
        """The table, `[input_dim, output_dim]`.

        The type of the table is `ShardedVariable`, or `keras.Variable` on a
        mesh and for a table without an `optimizer` under a strategy with
        several replicas. A table with an open vocabulary is never on a mesh.
        """
        if self._is_on_mesh and self._key_table is None:
            return self._embeddings
        return super().embeddings

    def call(
        self, inputs: TensorLike | tf.RaggedTensor | tf.SparseTensor
    ) -> tf.Tensor | tf.RaggedTensor:
        if (
            mesh_context.is_planning.get()
            and self.optimizer
            and self._key_table is None
        ):
            # The planner derives the layouts of the table from this op.
            rows = tf.gather(self._embeddings.value, self._ids(inputs))
            return tf.cast(rows, self.compute_dtype)
        if self._host_tables is not None:
            from tf_layoutmap.layers.keras3 import mesh_host_tables

            if not mesh_host_tables.runs_on_mesh():
                return super().call(inputs)
            (rows,) = self._host_tables.rows_on_mesh(inputs, None)
            return tf.cast(rows, self.compute_dtype)
        if self._is_on_mesh:
            return self._call_on_mesh(inputs)
        return super().call(inputs)

    call.__doc__ = EmbeddingCore.call.__doc__

    def _host_objects(self) -> AbstractContextManager[Any]:
        return mesh_context.activated(None)

    def _name_scope_of_weights(self) -> str:
        return self.path or self.name

    def _is_abstract(self) -> bool:
        return keras_private.is_symbolic()

    def _is_stateless(self) -> bool:
        return keras_private.is_stateless()

    def _passed_table(self) -> list[Any] | None:
        if not keras_private.is_stateless() or self._program_steps is not None:
            return None
        weights: list[Any] = (
            [self._marks]
            if self._key_table is not None
            else [self._embeddings]
            if self.optimizer or self._is_on_mesh or self._copied_weight
            else self._shard_weights
        )
        passed = [keras_private.stateless_value(weight) for weight in weights]
        if all(value is None for value in passed):
            return None
        return [
            weight.value if value is None else value
            for weight, value in zip(weights, passed)
        ]

    def _marks_variable(self) -> tf.Variable:
        if self._program_steps is not None:
            return self._embeddings.value
        return self._marks.value

    def _exported_shards(self) -> list[tf.Variable]:
        return [weight.value for weight in self._shard_weights]

    def _check_keras_version(self, inputs: Any) -> None:
        keras_version_guard.check_not_tf_keras(self, inputs)

    def _call_on_mesh(self, inputs: Any) -> Any:
        from tf_layoutmap.layers.keras3 import mesh_weights
        from tf_layoutmap.layout.keras3 import embedding_rows

        ids = (
            tf.convert_to_tensor(inputs)
            if not isinstance(inputs, tf.RaggedTensor | tf.SparseTensor)
            else inputs
        )
        if not isinstance(ids, tf.Tensor) or not ids.dtype.is_integer:
            raise TypeError(
                "On a mesh, ids must be a dense tensor of integers; declare "
                'them, as by keras.Input(shape, dtype="int64"). Received: '
                f"{type(inputs).__name__} of {ids.dtype.name} (layer "
                f"{self.name!r})."
            )
        ids = self._ids(ids)
        passed = self._passed_table()
        if passed is not None:
            return tf.cast(self._rows_in(passed, ids), self.compute_dtype)
        placeholder = placeholders.placeholder_of(self)
        if placeholder is not None:
            return tf.cast(placeholder(ids), self.compute_dtype)
        if keras_private.is_abstract():
            # The values can be zeros, because Keras uses only the shape of the
            # result.
            rows = tf.zeros(tf.concat([tf.shape(ids), [self.output_dim]], 0))
        elif tf_private.in_save_context() or (not ids.shape.is_fully_defined()):
            # TensorFlow's ops are used here, because DTensor does not support
            # unknown sizes, which occur in an export.
            rows = self._stock_rows(ids)
            if not tf_private.in_save_context() and (
                self.optimizer and self.embeddings_regularizer is not None
            ):
                distinct, _ = tf.unique(tf.reshape(ids, [-1]))
                self.add_loss(
                    self.embeddings_regularizer(self._stock_rows(distinct))
                )
        elif self.optimizer:
            mesh_weights.check_not_vectorized(self.name)
            self._add_loss_of_rows(ids)
            rows = embedding_rows.lookup(self._embeddings, ids)
        else:
            rows = tables.stock_gather_with_dense_gradient(
                self._embeddings.value, ids
            )
        return tf.cast(rows, self.compute_dtype)

    def _stock_rows(self, ids: tf.Tensor) -> tf.Tensor:
        return tables.stock_gather(
            [self._variable_on_mesh()], ids, self.name, self.input_dim
        )

    def _add_loss_of_rows(self, ids: tf.Tensor) -> None:
        """Adds the regularizer's loss of the rows that a call looks up."""
        if self.embeddings_regularizer is not None:
            from tf_layoutmap.layout.keras3 import embedding_rows

            self.add_loss(
                self.embeddings_regularizer(
                    embedding_rows.distinct_rows(self._embeddings, ids)
                )
            )

    def _variable_on_mesh(self) -> Any:
        return (
            self._embeddings.divided_value
            if self.optimizer
            else self._embeddings.value
        )

    # The next methods return shapes and masks, as in keras.layers.Embedding.

    def compute_mask(
        self,
        inputs: TensorLike
        | tf.RaggedTensor
        | tf.SparseTensor
        | keras.KerasTensor,
        mask: TensorLike | keras.KerasTensor | None = None,
    ) -> tf.Tensor | keras.KerasTensor | None:
        """Returns False for padding; None if `mask_zero` is false."""
        del mask
        if not self.mask_zero:
            return None
        if isinstance(inputs, StoredKeys):
            return key_table.is_not_padding(inputs)
        if self._host_tables is not None and isinstance(inputs, tf.Tensor):
            from tf_layoutmap.layers.keras3 import mesh_host_tables

            return mesh_host_tables.mask_of(inputs, self._marks.mesh)
        is_sparse = isinstance(inputs, tf.SparseTensor) or getattr(
            inputs, "sparse", False
        )
        if self._key_table is not None or is_sparse:
            return KeyMask()(inputs)
        return cast("tf.Tensor", keras.ops.not_equal(inputs, 0))

    def compute_output_shape(
        self, input_shape: Iterable[int | None]
    ) -> tuple[int | None, ...]:
        """Returns `input_shape + (output_dim,)`."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(
        self, inputs: keras.KerasTensor
    ) -> keras.KerasTensor:
        """Returns the output as a `KerasTensor`."""
        return keras.KerasTensor(
            self.compute_output_shape(inputs.shape),
            dtype=self.compute_dtype,
            ragged=getattr(inputs, "ragged", False),
        )

    # Saved state: one table.

    def load_own_variables(self, store: Weights) -> None:
        """Reads the saved array; the number of shards may differ."""
        super().load_own_variables(store)
        if self._key_table is not None:
            self._marks.discard_accumulated()

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        # The shards are the same variables as the table, so only one of the two
        # attributes is listed.
        if self._table is not None and not self.optimizer:
            children.pop("_shard_weights", None)
            if save_type == "checkpoint":
                children["_embeddings"] = self._table
            else:
                children["_shard_weights"] = list(self._shard_weights)
        return children

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        if self._is_on_mesh and self._key_table is None:
            return {**config, "num_shards": None}
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Creates a layer from the result of `get_config`."""
        if mesh_context.active_context() is not None:
            if isinstance(config["input_dim"], Mapping):
                # A table with an open vocabulary is on the host.
                optimizer = config["optimizer"]
                if isinstance(optimizer, Mapping):
                    with mesh_context.activated(None):
                        optimizer = keras.saving.deserialize_keras_object(
                            optimizer
                        )
                return super().from_config({**config, "optimizer": optimizer})
            # On a mesh, the layout determines the shards, and the saved number
            # is ignored.
            config = {**config, "num_shards": None}
        return super().from_config(config)
