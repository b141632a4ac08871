"""Base class of `ShardedEmbedding` for both Keras versions.

The class `EmbeddingCore` implements the arguments, the table, the lookup and
the saved state of the layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, Unpack

import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import (
    keras_private,
    literals,
    patches,
    placeholders,
    strategies,
    tf_private,
)
from tf_layoutmap.embedding import backend
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.base import (
    input_ids,
    key_table,
    model_rules,
    replica_steps,
    tables,
    weight_files,
)
from tf_layoutmap.layers.base.keras_version_guard import LayerBase
from tf_layoutmap.layers.base.program_steps import ProgramSteps
from tf_layoutmap.layers.base.row_optimizer import RowUpdates
from tf_layoutmap.layers.base.tables import HOST
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import ShardedVariable, initial_value
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Vocabulary
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

if TYPE_CHECKING:
    from tf_layoutmap._core.types import (
        EmbeddingOptimizer,
        Initializer,
        LayerOptions,
        ShardCounts,
        TensorLike,
        WeightFunction,
        Weights,
    )


class EmbeddingCore(LayerBase):
    """A mixin that precedes the `Layer` class of one Keras version.

    The class of the layer must define `_keras`, the module of its Keras
    version, and `_row_optimizer`, the class of the table's optimizer. The
    method `build` of the layer creates the table with `_make_table` and
    registers the weights with Keras.
    """

    _keras: Any
    _row_optimizer: Any
    _table: ShardedVariable | None
    _table_class: type[ShardedVariable] = ShardedVariable
    # A layer with an open vocabulary uses this attribute instead of `_table`.
    _key_table: key_table.KeyTable | None
    # The table as one weight of which each replica has a copy; see
    # `_is_copied_by_strategy`.
    _copied_weight: Any = None
    # The steps of the table if it is on the host beside a TPU.
    _program_steps: ProgramSteps | None = None

    def __init__(
        self,
        input_dim: int | OpenVocabulary,
        output_dim: int,
        *,
        num_shards: int | None = None,
        partitioner: ShardCounts | None = None,
        embeddings_initializer: Initializer | None = "uniform",
        embeddings_regularizer: WeightFunction = None,
        embeddings_constraint: WeightFunction = None,
        optimizer: literals.RowRule
        | EmbeddingOptimizer
        | RowUpdates
        | None = None,
        mask_zero: bool = False,
        **kwargs: Unpack[LayerOptions],
    ):
        """Creates the layer.

        Args:
          input_dim: Number of rows of the table; ids are in `[0, input_dim)`.
            If `input_dim` is a `tlm.vocabulary.OpenVocabulary`, ids may be any
            int64 values or strings. Training steps assign rows to new ids that
            the vocabulary admits.
          output_dim: Number of columns of the table.
          num_shards: Number of shards; 1 by default. If the table has fewer
            rows, the layer warns, and each row is a shard. On a mesh, neither
            `num_shards` nor `partitioner` may be set.
          partitioner: A partitioner of `tlm.partitioners`, an alternative to
            `num_shards`.
          embeddings_initializer: Name or object of a Keras initializer, or a
            callable as for `ShardedVariable.create`. With Keras' initializers,
            the initial values are the same as in `keras.layers.Embedding` with
            the same seed, for any number of shards. A custom callable without a
            `shard_info` argument is called once for the full table.
          embeddings_regularizer: None, or the name or object of a Keras
            regularizer, or a callable. If `optimizer` is set, the regularizer
            is applied only to the rows that a call looks up. Each of these rows
            counts once. Otherwise the function is applied to the full table.
          embeddings_constraint: None, or the name or object of a Keras
            constraint, or a callable. If `optimizer` is set, the constraint is
            applied only to the rows that a step has changed, and must treat
            each row independently (`axis=1`). Otherwise the function is applied
            to the full table.
          optimizer: Optimizer of the table. With `"model"`, the table follows
            the optimizer of the model: the rows of a batch are updated with its
            rule, learning rate and other settings. For a separate optimizer,
            pass an object of `tf.tpu.experimental.embedding`, such as
            `Adagrad(0.05)`, whose learning rate may also be a Keras schedule,
            or `"sgd"` or `"adagrad"`, whose learning rates are 0.01 and 0.001.
            If None, the model's optimizer trains the shards, and each of its
            steps updates every row.
          mask_zero: Whether id 0 is padding and is masked. If the layer also
            has an open vocabulary, 0 and the empty string are not keys, and
            their lookup returns zeros.
          **kwargs: Arguments of every Keras layer, such as `name`.

        Raises:
          TypeError, ValueError: If an argument is invalid, or if `optimizer` is
            set and the layer's variables are not float32. A layer with an open
            vocabulary also raises this error if it has a regularizer or a
            constraint, has no optimizer, or has an initializer that cannot draw
            the values of a single key.
        """
        # These attributes are set before Keras' `__init__`, so that Keras does
        # not track them.
        vars(self).update(_table=None, _key_table=None)
        # Autocast would convert ids to float16.
        super().__init__(**{"autocast": False, **kwargs})
        # This attribute disables XLA, because XLA has no kernels for the
        # package's ops and would remove the check of ids. Only Keras 3 reads
        # the attribute. tf_keras compiles with XLA only if a program passes
        # `jit_compile=True`.
        self.supports_jit = False
        where = f"layer {self.name!r}"
        settings = input_dim if isinstance(input_dim, OpenVocabulary) else None
        self.input_dim = (
            settings.num_rows
            if settings
            else _core_checks.check_int(
                "input_dim", input_dim, lowest=1, where=where
            )
        )
        self.output_dim = _core_checks.check_int(
            "output_dim", output_dim, lowest=1, where=where
        )
        # The number of buckets limits the number of shards, because a bucket of
        # keys is never split between shards.
        self.num_shards = input_ids.count_shards(
            num_shards,
            partitioner,
            settings.num_buckets if settings else self.input_dim,
            (self.input_dim, self.output_dim),
            self.variable_dtype,
            where,
        )
        self._has_shard_arguments = not num_shards is partitioner is None
        self.embeddings_initializer = self._keras.initializers.get(
            embeddings_initializer
        )
        with self._host_objects() if settings else contextlib.nullcontext():
            self.optimizer = self._row_optimizer.read(optimizer, self.name)
        self.embeddings_regularizer = tables.check_callable(
            "embeddings_regularizer",
            self._keras.regularizers.get(embeddings_regularizer),
            where,
        )
        self.embeddings_constraint = tables.check_callable(
            "embeddings_constraint",
            self._keras.constraints.get(embeddings_constraint),
            where,
        )
        if self.optimizer:
            tables.check_by_row(self.embeddings_constraint, where)
            vars(self.optimizer)["row_constraint"] = self.embeddings_constraint
        if self.optimizer and self.variable_dtype != "float32":
            raise ValueError(
                "Argument `optimizer` must be None if variables are not "
                f"float32. Received: {self.variable_dtype} ({where})."
            )
        self.mask_zero = _core_checks.check_type(
            "mask_zero", mask_zero, bool, "a bool", where=where
        )
        self.supports_masking = self.mask_zero
        self._uses_fused_lookups = settings is not None
        if settings is not None:
            self._create_key_table(settings)
            self._support_evaluation()
        self._support_processes()

    def _create_key_table(self, settings: OpenVocabulary) -> None:
        """Creates the `KeyTable` of a layer with an open vocabulary."""
        where = f"layer {self.name!r} with an open vocabulary"
        if self.optimizer is None:
            raise ValueError(
                _core_checks.message(
                    "optimizer",
                    "given: if a row is reassigned to another key, its slot "
                    "variables must be reset, and a model's optimizer would "
                    "keep them",
                    None,
                    where,
                )
            )
        if self.optimizer._follows_model:
            raise ValueError(
                _core_checks.message(
                    "optimizer",
                    "a separate optimizer, such as tf.tpu.experimental."
                    "embedding.Adagrad(0.1), if ids are keys: the engine "
                    "resets the slot variables of a row that is reassigned to "
                    "another key",
                    model_rules.MODEL,
                    where,
                )
            )
        for name in ("embeddings_regularizer", "embeddings_constraint"):
            if getattr(self, name) is not None:
                raise ValueError(
                    _core_checks.message(
                        name,
                        "None; use `activity_regularizer` for the rows that a "
                        "call looks up",
                        getattr(self, name),
                        where,
                    )
                )
        table = key_table.KeyTable(
            self.name,
            settings,
            self.output_dim,
            initializer=self.embeddings_initializer,
            optimizer=self.optimizer,
            num_shards=self.num_shards,
            mask_zero=self.mask_zero,
        )
        vars(self)["_key_table"] = table
        vars(self.optimizer)["_engine_slots"] = lambda: table.slots
        self._track_embedding(table.embedding)
        if table.num_replicas > 1:
            self._support_string_batches()

    def _host_objects(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which new Keras variables are on the host."""
        return contextlib.nullcontext()

    def _support_string_batches(self) -> None:
        """Enables batches of strings for models on several replicas."""

    def _support_processes(self) -> None:
        """Enables `fit` of models in several processes."""

    def _support_evaluation(self) -> None:
        """Lets `evaluate` and `predict` use the ops of this package."""

    def _track_embedding(self, embedding: TPUEmbedding) -> None:
        """Tracks the `KeyTable`, so that checkpoints contain its variables."""
        self.embedding = embedding

    # Creation of the table.

    def _check_can_build(self) -> None:
        """Checks that the current strategy can train the table.

        Raises:
          ValueError: If the strategy does not support a setting of the layer.
        """
        patches.ensure("function_traces")
        patches.ensure("function_calls")
        strategies.warn_of_wrong_sums()
        if self._is_beside_tpu() and self.embeddings_regularizer is not None:
            raise ValueError(
                "Argument `embeddings_regularizer` must be None under "
                "TPUStrategy if the table has an `optimizer`, because the "
                "number of distinct rows of a batch is unknown during tracing, "
                "and a TPU requires static sizes. Use optimizer=None, or "
                f"`activity_regularizer`. Received: layer {self.name!r}."
            )
        if self.variable_dtype == "bfloat16" and strategies.has_processes(
            tf.distribute.get_strategy()
        ):
            raise ValueError(
                "Variables must not be bfloat16 under "
                "MultiWorkerMirroredStrategy, because TensorFlow has no "
                "collective for bfloat16, with which the strategy sets their "
                "initial values. Use float16, or the policy "
                f'"mixed_bfloat16", whose variables are float32. Received: '
                f"layer {self.name!r}."
            )

    def _is_beside_tpu(self) -> bool:
        """Whether the table is on the host beside a TPU; see `ProgramSteps`."""
        return (
            self._key_table is None
            and self.optimizer is not None
            and backend.is_tpu_strategy(tf.distribute.get_strategy())
        )

    def _is_copied_by_strategy(self) -> bool:
        """Whether the strategy in scope copies the table to its replicas.

        If the table has no separate optimizer, the model's optimizer trains it
        like all other weights, and each replica has a copy of a weight.
        """
        strategy = tf.distribute.get_strategy()
        return not self.optimizer and (
            replica_steps.has_replicas() or backend.is_tpu_strategy(strategy)
        )

    def _make_table(self) -> ShardedVariable:
        """Returns the table. The first call creates the table."""
        table = self._table
        if table is None:
            name = f"{self._name_scope_of_weights()}/embeddings"
            # `build` may be called in a name scope of the layer. The empty name
            # scope keeps this scope from being added a second time.
            with (
                tf.init_scope(),
                tf.device(HOST),
                tf.name_scope(""),
                replica_steps.shared_variables(),
            ):
                table = vars(self)["_table"] = self._table_class.create(
                    self._table_initializer(),
                    shape=(self.input_dim, self.output_dim),
                    dtype=tf.as_dtype(self.variable_dtype),
                    num_shards=self.num_shards,
                    name=name,
                )
                replica_steps.use_rows_of_first_process(table)
        return table

    def _name_scope_of_weights(self) -> str:
        """Returns the prefix of the names of weights, as in stock Keras."""
        raise NotImplementedError

    def _table_initializer(self) -> Any:
        """Returns the initializer of the rows of the table."""
        return self.embeddings_initializer

    def _full_table_initializer(self) -> Callable[..., Any]:
        initializer = self.embeddings_initializer
        if isinstance(initializer, self._keras.initializers.Initializer):
            return initializer

        # The initial values are bitwise identical for any number of shards,
        # because the same function computes the values of one shard and of
        # several shards.
        def full_table(shape: Any, dtype: Any = None) -> tf.Tensor:
            return initial_value.of_shard(
                initializer,
                tuple(shape),
                tf.as_dtype(dtype),
                RowPartition.div(shape[0], 1),
                0,
                self.name,
            )

        return full_table

    @property
    def embeddings(self) -> Any:
        """The table, `[input_dim, output_dim]`."""
        if self._key_table is not None and self.built:
            return self._key_table.rows
        if self._copied_weight is not None:
            return self._copied_weight
        if self._table is None:
            raise AttributeError(
                f"Layer {self.name!r} has no table before it is built; call "
                "the layer, or `build`, first."
            )
        return self._table

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The open vocabulary of the table, or None if ids are row indices.

        The methods `stats`, `contains`, `lookup`, `keys` and `evict` work as
        for the values of `tlm.TPUEmbedding.vocabularies`.
        """
        if self._key_table is None:
            return None
        if not self.built:
            raise AttributeError(
                f"Layer {self.name!r} has no vocabulary before it is built; "
                "call the layer, or `build`, first."
            )
        return self._key_table.vocabulary

    def _tables_to_export(self) -> list[TableToExport]:
        """Returns the table that `tlm.export` stores in a SavedModel."""
        if self._key_table is not None:
            (table,) = self.embedding._tables_to_export()
            return [dataclasses.replace(table, name=self.name, alias=self)]
        return [
            TableToExport(
                owner=self,
                name_in_owner=self.name,
                name=self.name,
                weight=self.embeddings,
                num_rows=self.input_dim,
                dim=self.output_dim,
                dtype=tf.as_dtype(self.variable_dtype).name,
                alias=self,
            )
        ]

    def _named_vocabularies(self) -> dict[str, Vocabulary]:
        """Returns the built vocabulary, if any, keyed by the layer's name."""
        vocabulary = self.vocabulary if self.built else None
        return {} if vocabulary is None else {self.name: vocabulary}

    # Lookup.

    def call(
        self, inputs: TensorLike | tf.RaggedTensor | tf.SparseTensor
    ) -> tf.Tensor | tf.RaggedTensor:
        """Returns the rows of `inputs`.

        Args:
          inputs: Tensor, `tf.RaggedTensor` or `tf.SparseTensor` of integers, of
            any shape. If the layer has an open vocabulary, strings, and keys
            that `tlm.ops.sample_keys` has sampled, are also supported.

        Returns:
          `inputs.shape + [output_dim]` in the layer's compute dtype. The result
          is ragged if `inputs` is ragged. If `inputs` is sparse, the result is
          dense, and positions without an id are zeros.

        Raises:
          TypeError: If the type of `inputs` is not supported.
          RuntimeError: If a layer of the other Keras version calls this layer.
          tf.errors.InvalidArgumentError: If an id is outside the table, or if
            the indices of a sparse input are invalid or not in row-major order.
        """
        self._check_keras_version(inputs)
        if isinstance(inputs, tf.RaggedTensor):
            return tf.ragged.map_flat_values(self.call, inputs)
        if isinstance(inputs, tf.SparseTensor):
            return input_ids.look_up_sparse(
                inputs, self.call, self.output_dim, self.name
            )
        if isinstance(inputs, tf.Tensor) and self._is_traced_for_shapes():
            # The dtype is not checked here, because Keras uses floats for all
            # inputs when it builds a subclassed model that it loads.
            return tf.zeros(
                tf.concat([tf.shape(inputs), [self.output_dim]], 0),
                self.compute_dtype,
            )
        ids = self._ids(inputs)
        passed = self._passed_table()
        if passed is not None:
            return tf.cast(self._rows_in(passed, ids), self.compute_dtype)
        if self._key_table is not None:
            return self._rows_of_keys(ids)
        placeholder = placeholders.placeholder_of(self)
        if placeholder is not None:
            return tf.cast(placeholder(ids), self.compute_dtype)
        return tf.cast(self._rows(ids), self.compute_dtype)

    def _rows_of_keys(self, keys: tf.Tensor | StoredKeys) -> tf.Tensor:
        assert self._key_table is not None
        return tf.cast(
            self._key_table.look_up(
                keys,
                self._marks_variable(),
                is_trained=self.trainable and not self._is_stateless(),
            ),
            self.compute_dtype,
        )

    def _passed_table(self) -> list[Any] | None:
        """Returns the shards of the table that a stateless call passes.

        None if the call uses the table of the layer.
        """
        return None

    def _is_stateless(self) -> bool:
        """Whether the current call must not change the layer."""
        return False

    def _rows_in(self, shards: list[Any], ids: Any) -> tf.Tensor:
        """Returns the rows of `ids` in a table that a call passes."""
        if self._key_table is not None:
            (table,) = shards
            return self._key_table.rows_in(table, ids)
        if self.optimizer and self.embeddings_regularizer is not None:
            distinct, _ = tf.unique(tf.reshape(ids, [-1]))
            self.add_loss(
                self.embeddings_regularizer(
                    tables.stock_gather(shards, distinct, self.name)
                )
            )
        return tables.stock_gather(shards, ids, self.name)

    def _is_traced_for_shapes(self) -> bool:
        """Whether only the shape of the call's result is used."""
        # A `tf.function` that calls the layer is traced again afterwards.
        is_abstract = self._is_abstract()
        if self._key_table is not None:
            return is_abstract
        if self._copied_weight is not None:
            return is_abstract
        # Keras creates the weights after this call.
        return self._table is None and placeholders.placeholder_of(self) is None

    def _is_abstract(self) -> bool:
        """Whether Keras uses only the shape of the current call's result."""
        return False

    def _marks_variable(self) -> tf.Variable:
        """Returns the mark weight's variable (open vocabularies only)."""
        raise NotImplementedError

    def _ids(self, inputs: Any) -> Any:
        """Returns `inputs` as int32 or int64 ids, or as keys."""
        if self._key_table is not None:
            return key_table.read_keys(inputs, self.name)
        if isinstance(inputs, StoredKeys):
            raise TypeError(
                "Keys of a vocabulary must be looked up in a layer whose "
                "`input_dim` is a tlm.vocabulary.OpenVocabulary. Received: "
                "StoredKeys "
                f"(layer {self.name!r}, with input_dim={self.input_dim})."
            )
        return input_ids.read_ids(
            inputs,
            self.input_dim,
            self.name,
            [
                layer.compute_dtype
                for layer in (self, *keras_private.name_scope_callers())
                if hasattr(layer, "compute_dtype")
            ],
        )

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        if self._program_steps is not None:
            return self._program_steps.look_up(
                ids, self._marks_variable(), is_trained=self.trainable
            )
        weight = self._copied_weight
        if weight is not None:
            return (
                tables.stock_gather([weight], ids, self.name)
                if tf_private.in_save_context()
                else tables.stock_gather_with_dense_gradient(weight, ids)
            )
        if (
            self.optimizer
            and self.embeddings_regularizer is not None
            and not tf_private.in_save_context()
        ):
            self.add_loss(
                tables.loss_of_rows(
                    self.embeddings_regularizer,
                    self.embeddings,
                    ids,
                    self.optimizer.look_up,
                )
            )
        if self.optimizer and not tf_private.in_save_context():
            return self.optimizer.look_up(self.embeddings, ids)
        if self.optimizer or not tf_private.in_save_context():
            return self.embeddings.sparse_read(ids)
        # All shards are read here, because an exported model contains only the
        # weights that Keras lists, and Keras lists the shards.
        return tables.stock_gather(self._exported_shards(), ids, self.name)

    def _exported_shards(self) -> list[tf.Variable]:
        raise NotImplementedError

    def _check_keras_version(self, inputs: Any) -> None:
        raise NotImplementedError

    # Saved state: one array per table.

    def save_own_variables(self, store: Weights) -> None:
        """Writes the table as one array. The optimizer saves its own state."""
        if self._key_table is not None and self.built:
            self._key_table.save(store)
        elif self.built and weight_files.is_table(self.embeddings):
            weight_files.save_table(store, "0", self.embeddings)
        elif self.built:
            store["0"] = self.embeddings.numpy()

    def load_own_variables(self, store: Weights) -> None:
        """Reads the saved array; the number of shards may differ."""
        if not self.built:
            raise ValueError(
                f"Layer {self.name!r} must be built before weights are "
                "loaded; call the model, or `build`, first."
            )
        if self._key_table is not None:
            self._key_table.load(store)
            return
        if sorted(store.keys()) != ["0"]:
            raise ValueError(
                f"The saved weights of layer {self.name!r} must be one "
                f"table. Received: {sorted(store.keys())}."
            )
        if weight_files.is_table(self.embeddings):
            weight_files.load_table(store, "0", self.embeddings)
        else:
            weight_files.check_table(store, "0", self.embeddings)
            self.embeddings.assign(store["0"])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "input_dim": (
                self.input_dim
                if self._key_table is None
                else dataclasses.asdict(self._key_table.settings)
            ),
            "output_dim": self.output_dim,
            "num_shards": self.num_shards,
            "embeddings_initializer": self._keras.initializers.serialize(
                self.embeddings_initializer
            ),
            "embeddings_regularizer": self._keras.regularizers.serialize(
                self.embeddings_regularizer
            ),
            "embeddings_constraint": self._keras.constraints.serialize(
                self.embeddings_constraint
            ),
            "optimizer": self._optimizer_config(),
            "mask_zero": self.mask_zero,
        }

    def _optimizer_config(self) -> Any:
        if self.optimizer and self.optimizer._follows_model:
            return model_rules.MODEL
        return self.optimizer and self._keras.saving.serialize_keras_object(
            self.optimizer
        )

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Creates a layer from the result of `get_config`."""
        saved: dict[str, Any] = dict(config)
        optimizer, input_dim = saved["optimizer"], saved["input_dim"]
        if isinstance(optimizer, dict):
            optimizer = cls._keras.saving.deserialize_keras_object(optimizer)
        if isinstance(input_dim, dict):
            input_dim = OpenVocabulary(**input_dim)
        saved.update(input_dim=input_dim, optimizer=optimizer)
        return cls(**saved)


# Python's error for a missing argument contains this name.
EmbeddingCore.__init__.__qualname__ = "ShardedEmbedding.__init__"
