"""What `TPUEmbedding` is to both Keras: its tables, its file, its settings."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.layers.configs import feature_config_serialization
from tf_layoutmap.layers.shared import tpu_embedding_weights_file
from tf_layoutmap.layers.shared.tpu_embedding_steps import EmbeddingSteps


def read_feature_config(
    feature_config: Any, feature_configs: Any, table_stacking: Any, layer: str,
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
            f"feature_configs={feature_configs!r} (layer {layer!r}).")
    names = [table_stacking] if isinstance(table_stacking, str) else (
        tf.nest.flatten(table_stacking))
    if not all(isinstance(one, str) for one in names):
        raise ValueError(
            'Argument `table_stacking` must be "auto", or names of tables. '
            f"Received: {table_stacking!r} (layer {layer!r}).")
    return feature_configs if feature_config is None else feature_config


class TPUEmbeddingCore:
    """A mixin for a layer class, which calls `_make_steps` in its `__init__`.

    A mixin, because both Keras find these methods on the layer by name.
    """

    _steps: EmbeddingSteps

    def _make_steps(self, feature_config: Any, optimizer: Any,
                    **options: Any) -> None:
        self._steps = EmbeddingSteps(
            self.name, feature_config, optimizer, **options)
        # An attribute of the layer: so that a checkpoint finds the tables.
        self.embedding = self._steps.embedding

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """Returns the rows by table name, as keras-rs' layer has them.

        Each is a tensor `[num_rows, dim]`, a copy: for big tables
        `embedding_tables` is better.
        """
        return {config.name: tf.convert_to_tensor(rows)
                for config, rows in self.embedding_tables.items()}

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """From each `TableConfig` to its rows, `[num_rows, dim]` float32."""
        return self.embedding.embedding_tables

    def _cast(self, activations: Any) -> Any:
        return tf.nest.map_structure(
            lambda one: tf.cast(one, self.compute_dtype), activations)

    def save_own_variables(self, store: Any) -> None:
        """Writes tables and slot variables, each as one array."""
        tpu_embedding_weights_file.save(self.embedding, store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` of any number of shards wrote.

        Raises:
          ValueError: If tables, dtypes, optimizers or shapes are others;
            nothing is changed then.
        """
        if not self.built:
            raise ValueError(
                f"Layer {self.name!r} must be built before weights are "
                "loaded; call the model, or `build`, first.")
        tpu_embedding_weights_file.load(self.embedding, store, layer=self.name)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, as plain values.

        Raises:
          ValueError: If a learning rate is a callable.
        """
        return {
            **super().get_config(),
            "feature_config": feature_config_serialization.to_config(
                self._steps.feature_config, self._steps.optimizer),
            "out_of_range": self._steps.out_of_range,
            "table_dtypes": {table.name: table.dtype
                             for table in self._steps.spec.tables},
            "rounding_seed": self._steps.rounding_seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Makes a layer from what `get_config` returned."""
        config = dict(config)
        features = feature_config_serialization.from_config(
            config.pop("feature_config"))
        return cls(features, **config)
