"""Open tables, and closed tables that train the same rows for comparison."""

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap._core import ops
from tf_layoutmap.embedding import tables
from tf_layoutmap.partition import FixedShardsPartitioner

tpu = tf.tpu.experimental.embedding


def table(capacity, *, dim=3, name="words", initializer=None, combiner="sum"):
    return tpu.TableConfig(
        capacity,
        dim,
        combiner=combiner,
        name=name,
        initializer=initializer or tf.random_uniform_initializer(-1.0, 1.0),
    )


def embedding(
    settings,
    optimizer,
    *,
    features=("ids",),
    sequence=0,
    num_shards=1,
    **arguments,
):
    """Returns an embedding with one open table, and its TableConfig."""
    config = table(
        settings.capacity,
        **{
            name: arguments.pop(name)
            for name in ("dim", "initializer", "combiner")
            if name in arguments
        },
    )
    found = tlm.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                config, max_sequence_length=sequence if number else 0
            )
            for number, name in enumerate(features)
        },
        optimizer,
        vocabularies={"words": settings},
        partitioner=FixedShardsPartitioner(num_shards),
        **arguments,
    )
    return found, config


def rows_of(variable) -> np.ndarray:
    return tf.convert_to_tensor(variable).numpy()


class ClosedTwin:
    """Closed table of the same size, whose ids are the rows of the keys."""

    def __init__(self, open_embedding, config, optimizer, **arguments):
        self._open = open_embedding
        settings = open_embedding.vocabularies["words"].settings
        self.config = tpu.TableConfig(
            settings.num_rows,
            config.dim,
            combiner=config.combiner,
            name="words",
            initializer=tf.zeros_initializer(),
        )
        features = open_embedding._state.feature_config
        self.embedding = tlm.TPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    self.config, max_sequence_length=one.max_sequence_length
                )
                for name, one in features.items()
            },
            optimizer,
            **arguments,
        )
        self.embedding.build()
        self._row_of: dict[int, int] = {}

    def take_new_keys(self):
        """Initializes the rows of new keys in the same way as the engine."""
        vocabulary = self._open.vocabularies["words"]
        spec = self._open._state.spec.tables[0]
        keys = vocabulary.keys()
        found = dict(
            zip(keys.numpy().tolist(), vocabulary.lookup(keys).numpy().tolist())
        )
        new = [
            key for key, row in found.items() if self._row_of.get(key) != row
        ]
        self._row_of = found
        if not new:
            return
        values = spec.vocabulary.first_values
        rows = ops.first_rows(
            keys=tf.constant(new, tf.int64),
            kind=values.kind,
            limits=values.limits,
            seed=values.seed,
            dim=spec.dim,
        )
        where = tf.constant([found[key] for key in new], tf.int64)
        variables = self.embedding._variables["words"]
        parameters = variables[tables.PARAMETERS]
        parameters.scatter_update(
            tf.IndexedSlices(tf.cast(rows, parameters.dtype), where)
        )
        for slot in spec.optimizer.slots:
            variables[slot.name].scatter_update(
                tf.IndexedSlices(
                    tf.fill([len(new), slot.dim(spec.dim)], slot.initial_value),
                    where,
                )
            )

    def rows(self, ragged):
        """Maps keys to their rows, which are the ids of the closed table.

        Keys that a sequence truncates have no row and are mapped to the last
        row, which is always zero.
        """
        rows = self._open.vocabularies["words"].lookup(ragged.values)
        last = self.config.vocabulary_size - 1
        return ragged.with_values(tf.where(rows < 0, last, rows))


def ragged(keys, splits):
    return tf.RaggedTensor.from_row_splits(tf.constant(keys, tf.int64), splits)
