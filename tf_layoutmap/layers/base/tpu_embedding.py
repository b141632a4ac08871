"""Base class of `TPUEmbedding` for both Keras versions.

The class `TPUEmbeddingCore` implements the arguments, the call and the saved
state of the layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, Unpack

import tensorflow as tf

from tf_layoutmap._core import literals
from tf_layoutmap.embedding.configs import open_tables
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.layers.base import (
    feature_config_serialization,
    steps,
    weight_files,
)
from tf_layoutmap.layers.base.keras_version_guard import LayerBase
from tf_layoutmap.layers.base.steps import EmbeddingSteps
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Vocabulary

if TYPE_CHECKING:
    from tf_layoutmap._core.types import (
        DTypeLike,
        FeatureConfigs,
        Features,
        LayerOptimizer,
        LayerOptions,
        ShardCounts,
        TableKey,
        Weights,
    )


def read_feature_config(
    feature_config: Any, feature_configs: Any, layer: str
) -> Any:
    """Returns the feature config from one of two alternative arguments.

    Raises:
      TypeError: If both arguments or neither of them are set.
    """
    if (feature_config is None) == (feature_configs is None):
        raise TypeError(
            "Exactly one of the arguments `feature_config` and its alias "
            "`feature_configs` must be given. Received: "
            f"feature_config={feature_config!r}, "
            f"feature_configs={feature_configs!r} (layer {layer!r})."
        )
    return feature_configs if feature_config is None else feature_config


class TPUEmbeddingCore(LayerBase):
    """A mixin that precedes the `Layer` class of one Keras version.

    Keras requires that the layer class itself has the methods of this mixin.
    The layer's `build` creates the tables and `_marks`, the mark weight (see
    `steps`).
    """

    # `layers/evaluation.py` reads this attribute.
    _uses_fused_lookups = True

    _steps: EmbeddingSteps

    def __init__(
        self,
        feature_config: FeatureConfigs | None = None,
        optimizer: LayerOptimizer = None,
        *,
        feature_configs: FeatureConfigs | None = None,
        partitioner: ShardCounts | None = None,
        out_of_range: literals.OutOfRange = "error",
        table_dtypes: DTypeLike | Mapping[TableKey, DTypeLike] | None = None,
        rounding_seed: int = 0,
        vocabularies: Mapping[TableKey, OpenVocabulary | TableKey]
        | None = None,
        wire_dtype: literals.WireDtype = "float32",
        over_processes: literals.OverProcesses = "replicated",
        gradient_aggregation: literals.GradientAggregation = "exact",
        engine: literals.Engine = "auto",
        sparse_core_embedding_config: (
            tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig | None
        ) = None,
        **kwargs: Unpack[LayerOptions],
    ):
        """Creates the layer.

        Args:
          feature_config: Nested structure of
            `tf.tpu.experimental.embedding.FeatureConfig`, or of
            `keras_rs.layers.FeatureConfig`.
          optimizer: Optimizer of the tables that do not specify one: an
            optimizer of `tf.tpu.experimental.embedding`, a Keras optimizer or
            its name. None is allowed for tables that are not trained, with
            `trainable=False`. Here and in a `TableConfig`, the learning rate
            can be a Keras schedule.
          feature_configs: Alias of `feature_config`, as in
            `keras_rs.layers.DistributedEmbedding`.
          partitioner: As for `tlm.TPUEmbedding`. This argument is not saved
            with the layer.
          out_of_range: As for `tlm.TPUEmbedding`.
          table_dtypes: As for `tlm.TPUEmbedding`: `"bfloat16"` or `"float16"`
            halves the memory of the rows. Activations always have the layer's
            compute dtype.
          rounding_seed: As for `tlm.TPUEmbedding`.
          vocabularies: As for `tlm.TPUEmbedding`: settings of tables with open
            vocabularies. Each call that a tape records is a separate step of
            the vocabularies, in each replica.
          wire_dtype: As for `tlm.TPUEmbedding`. This argument and the following
            arguments are not saved with the layer.
          over_processes: As for `tlm.TPUEmbedding`.
          gradient_aggregation: As for `tlm.TPUEmbedding`.
          engine: As for `tlm.TPUEmbedding`. Under `TPUStrategy` with
            SparseCores, `"auto"` and `"tpu"` select `tlm.TPUEmbeddingV2`.
          sparse_core_embedding_config: As for `tlm.TPUEmbeddingV2`. By default,
            the limits of keras-rs' configs are used, or the defaults of
            TensorFlow.
          **kwargs: Arguments of every Keras layer, such as `name`.

        Raises:
          TypeError, ValueError: As for `tlm.TPUEmbedding`, or if a setting of a
            keras-rs config is not supported.
        """
        # Autocast would convert ids to float16.
        super().__init__(**{"autocast": False, **kwargs})
        # XLA has no kernels for the package's ops. Keras 3 reads this
        # attribute; tf_keras compiles with XLA only if `jit_compile=True` is
        # passed.
        self.supports_jit = False
        self._steps = EmbeddingSteps(
            self.name,
            read_feature_config(feature_config, feature_configs, self.name),
            optimizer,
            partitioner=partitioner,
            out_of_range=out_of_range,
            table_dtypes=table_dtypes,
            rounding_seed=rounding_seed,
            vocabularies=vocabularies,
            wire_dtype=wire_dtype,
            over_processes=over_processes,
            gradient_aggregation=gradient_aggregation,
            engine=engine,
            sparse_core_embedding_config=sparse_core_embedding_config,
        )
        # Checkpoints contain the embedding, because it is an attribute of the
        # layer.
        self.embedding = self._steps.embedding
        if self._steps.spec.has_open_tables and self._steps.num_replicas > 1:
            self._support_string_batches()
        self._support_processes()
        # The functions of a model are made before its layers are built.
        self._support_evaluation()

    def _support_string_batches(self) -> None:
        """Enables batches of strings for models on several replicas."""

    def _support_processes(self) -> None:
        """Enables `fit` of models in several processes."""

    def _support_evaluation(self) -> None:
        """Lets `evaluate` and `predict` use the ops of this package."""

    def __call__(
        self, inputs: Features, *args: object, **kwargs: object
    ) -> Any:
        """Calls the layer. Models of the other Keras version raise an error."""
        self._check_keras_version(inputs)
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self,
        inputs: Features,
        weights: Features | None = None,
        training: bool | None = None,
    ) -> Any:
        """Returns the activations of all features.

        Args:
          inputs: Inputs in the structure of the feature config, as for
            `enqueue` of `tlm.TPUEmbedding`. A batch from `tlm.pack` is also
            supported.
          weights: None, or weights in the same structure as `inputs`. For a
            packed batch, the weights that were packed with `inputs`.
          training: None or a bool. The tables train if a gradient tape records
            the call, regardless of this argument. If a concrete function is
            traced outside of the tape, the value True declares that a tape will
            record the call.

        Returns:
          Structure of the feature config with tensors of the compute dtype.
        """
        marks_variable = self._marks_variable()
        if self.trainable and steps.may_be_recorded(
            marks_variable,
            training,
            adds_keys=self._steps.spec.has_open_tables,
        ):
            activations = self._steps.start(
                tf.convert_to_tensor(marks_variable), inputs, weights
            )
        else:
            activations = self._steps.look_up(inputs, weights)
        return self._cast(activations)

    def _marks_variable(self) -> tf.Variable:
        """Returns the variable of the mark weight."""
        raise NotImplementedError

    def _check_keras_version(self, inputs: Any) -> None:
        """Raises `RuntimeError` if a model of the other Keras version calls."""
        raise NotImplementedError

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """Returns the rows by table name, as in keras-rs' layer.

        Each value is a copy of the full table as one tensor `[num_rows, dim]`.
        For large tables, use the property `embedding_tables` instead.
        """
        return {
            config.name: tf.convert_to_tensor(rows)
            for config, rows in self.embedding_tables.items()
        }

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """Tables by `TableConfig`, each `[num_rows, dim]` float32."""
        if self._steps.on_sparse_cores:
            return self._steps.access.unsharded_tables()
        return self.embedding.embedding_tables

    def _tables_to_export(self) -> list[TableToExport]:
        """Returns the tables that `tlm.export` stores in a SavedModel."""
        return self.embedding._tables_to_export()

    def _named_vocabularies(self) -> dict[str, Vocabulary]:
        """Returns the open vocabularies by table; empty before `build`.

        If tables share a vocabulary, the dict contains the table that owns it.
        """
        if not self.built:
            return {}
        shared = open_tables.owners_by_name(self._steps.spec)
        return {
            table: vocabulary
            for table, vocabulary in self.embedding.vocabularies.items()
            if table not in shared
        }

    def _cast(self, activations: Any) -> Any:
        return tf.nest.map_structure(
            lambda activation: tf.cast(activation, self.compute_dtype),
            activations,
        )

    def save_own_variables(self, store: Weights) -> None:
        """Writes tables and slot variables, each as one array."""
        weight_files.save_tables(self.embedding, store)

    def load_own_variables(self, store: Weights) -> None:
        """Reads the saved arrays; the number of shards may differ.

        Raises:
          ValueError: If the saved tables differ in number, dtype, optimizer or
            shape. In this case, no variable is changed.
        """
        if not self.built:
            raise ValueError(
                f"Layer {self.name!r} must be built before weights are "
                "loaded; call the model, or `build`, first."
            )
        weight_files.load_tables(self.embedding, store, layer=self.name)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, as plain values.

        Raises:
          ValueError: If a learning rate is a callable.
        """
        tables = self._steps.spec.tables
        shared = open_tables.owners_by_name(self._steps.spec)
        return {
            **super().get_config(),
            "feature_config": feature_config_serialization.to_config(
                self._steps.feature_config,
                self._steps.optimizer,
                # The current capacities are saved, because a program can resize
                # a vocabulary.
                {
                    table.name: table.vocabulary.settings.capacity
                    for table in tables
                    if table.vocabulary is not None
                },
            ),
            "out_of_range": self._steps.out_of_range,
            "table_dtypes": {table.name: table.dtype for table in tables},
            "rounding_seed": self._steps.rounding_seed,
            "vocabularies": {
                table.name: shared.get(table.name)
                or dataclasses.asdict(table.vocabulary.settings)
                for table in tables
                if table.vocabulary is not None
            }
            or None,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Creates a layer from the result of `get_config`."""
        saved: dict[str, Any] = dict(config)
        features = feature_config_serialization.from_config(
            saved.pop("feature_config")
        )
        vocabularies: Any = {
            name: settings
            if isinstance(settings, str)
            else OpenVocabulary(**settings)
            for name, settings in (
                saved.pop("vocabularies", None) or {}
            ).items()
        }
        return cls(features, vocabularies=vocabularies or None, **saved)


# Python's error for a missing argument contains this name.
TPUEmbeddingCore.__init__.__qualname__ = "TPUEmbedding.__init__"
