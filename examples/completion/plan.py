"""Features, table configurations and sizes of the model."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

import tf_layoutmap as tlm
from completion.data.features import SEQUENCES
from completion.settings import Settings

# Input features of the tower. Rows of the other features are scored against the
# tower's query.
TOWER_FEATURES = ("history", "bag", "echo", "marks", "place", "scope", "pieces")
SERVING_FEATURES = (*TOWER_FEATURES, "recent")

_LABEL_DIM = 16
_PIECE_DIM = 32


class Plan:
    """Configuration of the tables, their features and their optimizer.

    Previous items have rows in the table `identifiers`, and possible next items
    have rows in the table `candidates`. Echoes and recent items also use
    `candidates`, so that the tower can predict repeated items.

    Attributes:
      features: `FeatureConfig` of each feature.
      tables: `TableConfig` of each table.
    """

    def __init__(self, num_rows: Mapping[str, int], settings: Settings):
        """Creates the configurations.

        Args:
          num_rows: Number of rows of each feature. All ids are smaller than
            this number.
          settings: Sizes, learning rates and the number of shards.
        """
        self.settings = settings
        items = num_rows["history"]
        self.tables = {
            table.name: table
            for table in (
                _table("identifiers", items, settings.dim, 0.125, settings),
                _table("candidates", items, settings.dim, 0.05, settings),
                _table("marks", num_rows["marks"], _LABEL_DIM, 0.25, settings),
                _table("places", num_rows["place"], _LABEL_DIM, 0.25, settings),
                _table("scopes", num_rows["scope"], _LABEL_DIM, 0.25, settings),
                _table(
                    "pieces", num_rows["pieces"], _PIECE_DIM, 0.125, settings
                ),
            )
        }
        table_of = {
            "history": "identifiers",
            "bag": "identifiers",
            "echo": "candidates",
            "recent": "candidates",
            "target": "candidates",
            "negatives": "candidates",
            "marks": "marks",
            "place": "places",
            "scope": "scopes",
            "pieces": "pieces",
        }
        self.features = {
            feature: tf.tpu.experimental.embedding.FeatureConfig(
                self.tables[table],
                max_sequence_length=SEQUENCES.get(feature, 0),
                name=feature,
            )
            for feature, table in table_of.items()
        }

    def tower_widths(self) -> dict[str, int]:
        """Returns the width of each feature in the tower's input."""
        configs = {name: self.features[name] for name in TOWER_FEATURES}
        return {
            name: max(1, config.max_sequence_length) * config.table.dim
            for name, config in configs.items()
        }

    def serving_features(self) -> dict[str, object]:
        """Returns the configurations of the features of a prediction."""
        return {name: self.features[name] for name in SERVING_FEATURES}

    def trained_embedding(self, step: tf.Variable) -> tlm.TPUEmbedding:
        """Returns sharded tables for Adagrad with a decaying learning rate."""
        settings = self.settings
        rate = tf.keras.optimizers.schedules.CosineDecay(
            settings.table_rate, settings.num_steps, alpha=0.05
        )
        return tlm.TPUEmbedding(
            self.features,
            tf.tpu.experimental.embedding.Adagrad(lambda: rate(step)),
            partitioner=tlm.partitioners.FixedShardsPartitioner(
                settings.num_shards
            ),
        )

    def served_embedding(self) -> tlm.TPUEmbedding:
        """Returns unsharded tables without an optimizer."""
        return tlm.TPUEmbedding(self.serving_features(), None)

    def costs(self) -> list[dict[str, object]]:
        """Returns the configuration and the size of each table."""
        return [
            {
                "table": table.name,
                "features": ", ".join(
                    name
                    for name, feature in self.features.items()
                    if feature.table is table
                ),
                "rows": table.vocabulary_size,
                "dim": table.dim,
                "shards": min(self.settings.num_shards, table.vocabulary_size),
                # Adagrad's accumulators take as many bytes as the rows.
                "bytes": 2 * 4 * table.vocabulary_size * table.dim,
                "optimizer": f"Adagrad {self.settings.table_rate:g}",
            }
            for table in self.tables.values()
        ]

    def shape_facts(self) -> dict[str, list[int]]:
        """Returns the table shapes that checkpoints must have, by name."""
        return {
            name: [table.vocabulary_size, table.dim]
            for name, table in self.tables.items()
        }


def _table(
    name: str, num_rows: int, dim: int, deviation: float, settings: Settings
):
    # With the same seed, tables of equal width would have equal initial values.
    seed = settings.seed + sum(name.encode())
    return tf.tpu.experimental.embedding.TableConfig(
        vocabulary_size=num_rows,
        dim=dim,
        combiner="mean",
        name=name,
        initializer=tf.keras.initializers.TruncatedNormal(
            stddev=deviation, seed=seed
        ),
    )
