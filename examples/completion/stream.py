"""A model that learns the next item in a single pass over the documents.

The model is smaller than `completion.model`: a tower maps the last items to a
query, whose dot products with the rows of possible next items are their scores.
Negatives are drawn from earlier items, so a score estimates how much more
likely an item is than its frequency suggests. For predictions, the log of the
item's count is added to the score.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from completion.data.corpus import Corpus
from completion.data.features import window
from completion.names import TABLES, ClosedNames, HashedNames, OpenNames

_HISTORY = 8
DIM = 32
_HIDDEN = 128
_POOL = 1 << 16  # Number of earlier items from which negatives are drawn.


class StreamLearner:
    """A model of the next item that is trained in document order."""

    def __init__(
        self,
        names: ClosedNames | HashedNames | OpenNames,
        corpus: Corpus,
        *,
        num_negatives: int,
        seed: int,
    ):
        """Creates the tables and the tower.

        Args:
          names: Object that maps item names to rows.
          corpus: Data set.
          num_negatives: Number of negatives in each step.
          seed: Seed of all random numbers.
        """
        keras.utils.set_random_seed(seed)
        self._names = names
        self._corpus = corpus
        self._starts = corpus.document_splits[corpus.document_of()]
        self._draw = np.random.default_rng(seed)
        self._num_negatives = num_negatives
        self._pool = np.zeros(0, np.int64)
        tpu = tf.tpu.experimental.embedding
        before, after = self._tables = [
            tpu.TableConfig(
                names.num_rows,
                DIM,
                combiner="sum",
                name=name,
                initializer=tf.keras.initializers.TruncatedNormal(
                    stddev=0.1, seed=seed + number
                ),
            )
            for number, name in enumerate(TABLES)
        ]
        self.embedding = tlm.TPUEmbedding(
            {
                "history": tpu.FeatureConfig(
                    before, max_sequence_length=_HISTORY
                ),
                "target": tpu.FeatureConfig(after),
                "negatives": tpu.FeatureConfig(after),
            },
            tpu.Adagrad(0.1, 1e-6),
            vocabularies=names.vocabularies,
        )
        self.tower = keras.Sequential(
            [
                keras.Input([_HISTORY * DIM]),
                keras.layers.Dense(_HIDDEN, "gelu"),
                keras.layers.Dense(DIM),
            ]
        )
        self._optimizer = keras.optimizers.Adam(2e-3)
        self._optimizer.build(self.tower.trainable_variables)

    @property
    def rows_used(self) -> int:
        """Number of rows of both tables that are used by items."""
        vocabularies = self.embedding.vocabularies
        if not vocabularies:
            return len(TABLES) * self._names.num_rows
        return sum(one.stats()["num_keys"] for one in vocabularies.values())

    def train(self, positions: np.ndarray) -> float:
        """Trains on positions and returns the loss."""
        targets = self._corpus.items[positions]
        # Negatives are drawn from items of earlier batches. Negatives from the
        # current batch would lower the scores of names in the current file.
        pool = self._pool if len(self._pool) else targets
        negatives = self._draw.choice(pool, self._num_negatives)
        history, splits = self._history(positions)
        loss = self._train(
            history,
            splits,
            tf.constant(targets),
            tf.constant(negatives.astype(np.int32)),
        )
        self._names.count(targets)
        self._remember(targets)
        return float(loss)

    def ranks(self, positions: np.ndarray, among: np.ndarray) -> np.ndarray:
        """Returns the rank of each target among the items of `among`.

        Args:
          positions: Positions of the targets.
          among: Distinct items that may be predicted.

        Returns:
          `[num_positions]`: 1 for the highest score, 0 for an item that is not
          in `among` or has no row. Items with equal scores share their mean
          rank.
        """
        targets = self._corpus.items[positions]
        rows, known = self._names.rows(self.embedding, among)
        among, rows = among[known], rows[known]
        if not len(among):
            return np.zeros(len(positions))
        table = tf.convert_to_tensor(
            self.embedding.embedding_tables[self._tables[1]]
        )
        log_counts = self._names.log_counts(self.embedding)[rows]
        place = np.full(len(self._corpus.item_names), -1)
        place[among] = np.arange(len(among))
        places = place[targets]
        history, splits = self._history(positions)
        scores = tf.matmul(
            self._queries(history, splits),
            tf.gather(table, rows),
            transpose_b=True,
        )
        scores += tf.constant(log_counts, tf.float32)
        own = tf.gather(scores, np.maximum(places, 0), batch_dims=1)
        above = tf.math.count_nonzero(scores > own[:, tf.newaxis], axis=1)
        equal = tf.math.count_nonzero(scores == own[:, tf.newaxis], axis=1)
        ranks = above.numpy() + (equal.numpy() + 1) / 2
        return np.where(places >= 0, ranks, 0.0)

    def _history(self, positions):
        before, inside = window(positions, self._starts[positions], _HISTORY)
        items = self._corpus.items[before][inside]
        splits = np.concatenate([[0], np.cumsum(inside.sum(axis=1))])
        return tf.constant(items), tf.constant(splits.astype(np.int64))

    def _remember(self, targets):
        if len(self._pool) < _POOL:
            self._pool = np.concatenate([self._pool, targets])[:_POOL]
            return
        # Each earlier item is in the pool with about the same probability.
        self._pool[self._draw.integers(0, _POOL, len(targets) // 8)] = (
            self._draw.choice(targets, len(targets) // 8)
        )

    def _features(self, history, splits, target, negatives):
        ids = self._names.ids
        return {
            "history": tf.RaggedTensor.from_row_splits(
                tf.gather(ids, history), splits, validate=False
            ),
            "target": tf.gather(ids, target),
            "negatives": tf.gather(ids, negatives),
        }

    @tf.function(reduce_retracing=True)
    def _train(self, history, splits, target, negatives):
        self.embedding.enqueue(
            self._features(history, splits, target, negatives)
        )
        found = self.embedding.dequeue()
        weights = self.tower.trainable_variables
        with tf.GradientTape() as tape:
            tape.watch(found)
            query = self.tower(
                tf.reshape(found["history"], [-1, _HISTORY * DIM]),
                training=True,
            )
            own = tf.reduce_sum(query * found["target"], axis=1)
            others = tf.matmul(query, found["negatives"], transpose_b=True)
            others -= 1e9 * tf.cast(
                target[:, tf.newaxis] == negatives[tf.newaxis], tf.float32
            )
            scores = tf.concat([own[:, tf.newaxis], others], axis=1)
            loss = tf.reduce_mean(tf.reduce_logsumexp(scores, axis=1) - own)
        to_tables, to_tower = tape.gradient(loss, (found, weights))
        self.embedding.apply_gradients(to_tables)
        self._optimizer.apply(to_tower, weights)
        return loss

    @tf.function(reduce_retracing=True)
    def _queries(self, history, splits):
        nothing = tf.zeros([0], tf.int32)
        self.embedding.enqueue(
            self._features(history, splits, nothing, nothing), training=False
        )
        found = self.embedding.dequeue()
        return self.tower(
            tf.reshape(found["history"], [-1, _HISTORY * DIM]), training=False
        )


def batches_in_order(
    positions: np.ndarray, batch_size: int
) -> Iterator[np.ndarray]:
    """Yields batches of `batch_size` positions, in ascending order."""
    for start in range(0, len(positions), batch_size):
        yield positions[start : start + batch_size]
