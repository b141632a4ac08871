"""What `TPUEmbedding` is to both Keras: its tables, its file, its settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_layoutmap.layers.base import (
    feature_config_serialization,
    steps,
    weight_files,
)
from tf_layoutmap.layers.base.keras_version_guard import LayerBase
from tf_layoutmap.layers.base.steps import EmbeddingSteps
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Vocabulary


def read_feature_config(
    feature_config: Any,
    feature_configs: Any,
    table_stacking: Any,
    layer: str,
) -> Any:
    """Returns the one of two names that was used, after keras-rs' checks.

    Raises:
      TypeError: If both were used, or none.
      ValueError: If `table_stacking` is nothing that keras-rs takes.
    """
    if (feature_config is None) == (feature_configs is None):
        raise TypeError(
            "Argument `feature_config` must be given, once; "
            "`feature_configs` is another name of it. Received: "
            f"feature_config={feature_config!r}, "
            f"feature_configs={feature_configs!r} (layer {layer!r})."
        )
    names = (
        [table_stacking]
        if isinstance(table_stacking, str)
        else (tf.nest.flatten(table_stacking))
    )
    if not all(isinstance(one, str) for one in names):
        raise ValueError(
            'Argument `table_stacking` must be "auto", or names of tables. '
            f"Received: {table_stacking!r} (layer {layer!r})."
        )
    return feature_configs if feature_config is None else feature_config


class TPUEmbeddingCore(LayerBase):
    """A mixin before the `Layer` of one Keras version.

    A mixin, because both versions find these methods on the layer by name. The
    layer's `build` makes the tables, and `_marks`, the weight that takes the
    marks of gradients.
    """

    _steps: EmbeddingSteps

    def __init__(
        self,
        feature_config: Any = None,
        optimizer: Any = None,
        *,
        feature_configs: Any = None,
        table_stacking: Any = "auto",
        partitioner: Any = None,
        out_of_range: str = "error",
        table_dtypes: Any = None,
        rounding_seed: int = 0,
        vocabularies: Any = None,
        wire_dtype: str = "float32",
        over_processes: str = "copied",
        order: str = "exact",
        **kwargs: Any,
    ):
        """Makes the layer.

        Args:
          feature_config: Nested structure of
            `tf.tpu.experimental.embedding.FeatureConfig`, or of
            `keras_rs.layers.FeatureConfig`.
          optimizer: Of tables that bring none: one of
            `tf.tpu.experimental.embedding`, a Keras optimizer or its name;
            None for tables that only serve, with `trainable=False`.
          feature_configs: Another name of `feature_config`, that of
            `keras_rs.layers.DistributedEmbedding`.
          table_stacking: Of keras-rs: which tables a SparseCore keeps as one.
            It changes no result, and nothing here.
          partitioner: As of `tlm.TPUEmbedding`; not saved with the layer.
          out_of_range: As of `tlm.TPUEmbedding`.
          table_dtypes: As of `tlm.TPUEmbedding`: `"bfloat16"` or `"float16"`
            halves the memory of the rows. Activations are of the layer's
            compute dtype in any case.
          rounding_seed: As of `tlm.TPUEmbedding`.
          vocabularies: As of `tlm.TPUEmbedding`: of tables that take ids as
            they come. A call that a tape records is a step of theirs, that of
            each replica one of its own.
          wire_dtype: As of `tlm.TPUEmbedding`; not saved with the layer, like
            the two that follow.
          over_processes: As of `tlm.TPUEmbedding`.
          order: As of `tlm.TPUEmbedding`.
          **kwargs: Those of every Keras layer, such as `name`.

        Raises:
          TypeError, ValueError: As of `tlm.TPUEmbedding`; or if a fact of
            keras-rs' configs has no counterpart.
        """
        # Ids must not become float16.
        super().__init__(**{"autocast": False, **kwargs})
        self._steps = EmbeddingSteps(
            self.name,
            read_feature_config(
                feature_config, feature_configs, table_stacking, self.name
            ),
            optimizer,
            partitioner=partitioner,
            out_of_range=out_of_range,
            table_dtypes=table_dtypes,
            rounding_seed=rounding_seed,
            vocabularies=vocabularies,
            wire_dtype=wire_dtype,
            over_processes=over_processes,
            order=order,
        )
        # An attribute of the layer: so that a checkpoint finds the tables.
        self.embedding = self._steps.embedding

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer, of a model of its own Keras version only."""
        self._refuse_other_keras(inputs)
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        """Returns the activations of all features.

        Args:
          inputs: Structure of the feature config, as `enqueue` of
            `tlm.TPUEmbedding` takes it; or what `tlm.pack` made of it.
          weights: None, or the same structure of weights; or what was packed
            with `inputs`.
          training: None or a bool. The tables train where a gradient tape
            records the call, whatever this is; True says that one will, where
            a `tf.function` is traced outside of the tape.

        Returns:
          Structure of the feature config with tensors of the compute dtype.
        """
        marks_variable = self._marks_variable()
        if self.trainable and steps.may_be_recorded(marks_variable, training):
            activations = self._steps.start(
                tf.convert_to_tensor(marks_variable), inputs, weights
            )
        else:
            activations = self._steps.look_up(inputs, weights)
        return self._cast(activations)

    def _marks_variable(self) -> tf.Variable:
        """The variable of the weight that takes the marks."""
        raise NotImplementedError

    def _refuse_other_keras(self, inputs: Any) -> None:
        """Raises a RuntimeError if a model of the other version calls."""
        raise NotImplementedError

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """Returns the rows by table name, as keras-rs' layer has them.

        Each is a tensor `[num_rows, dim]`, a copy: for big tables
        `embedding_tables` is better.
        """
        return {
            config.name: tf.convert_to_tensor(rows)
            for config, rows in self.embedding_tables.items()
        }

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """From each `TableConfig` to its rows, `[num_rows, dim]` float32."""
        return self.embedding.embedding_tables

    def _named_vocabularies(self) -> dict[str, Vocabulary]:
        """Its open vocabularies, by table; none before it is built."""
        return self.embedding.vocabularies if self.built else {}

    def _cast(self, activations: Any) -> Any:
        return tf.nest.map_structure(
            lambda one: tf.cast(one, self.compute_dtype), activations
        )

    def save_own_variables(self, store: Any) -> None:
        """Writes tables and slot variables, each as one array."""
        weight_files.save_tables(self.embedding, store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` of any number of shards wrote.

        Raises:
          ValueError: If tables, dtypes, optimizers or shapes are others;
            nothing is changed then.
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
        return {
            **super().get_config(),
            "feature_config": feature_config_serialization.to_config(
                self._steps.feature_config,
                self._steps.optimizer,
                # A vocabulary may have been resized since.
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
                table.name: dataclasses.asdict(table.vocabulary.settings)
                for table in tables
                if table.vocabulary is not None
            }
            or None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Makes a layer from what `get_config` returned."""
        config = dict(config)
        features = feature_config_serialization.from_config(
            config.pop("feature_config")
        )
        vocabularies = {
            name: OpenVocabulary(**settings)
            for name, settings in (
                config.pop("vocabularies", None) or {}
            ).items()
        }
        return cls(features, vocabularies=vocabularies or None, **config)
