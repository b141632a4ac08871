"""The two-tower model of `nightly_deltas.py`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from nightly_deltas_data import NUM_CITIES, Day

import tf_layoutmap as tlm

DIM = 16
_CAPACITY = 4_000
_BATCH_SIZE = 256


class TwoTower(keras.Model):
    """Scores items by the dot product of a user vector and an item vector.

    The vector of a user is a projection of the sum of the rows of the user and
    of the city. New users therefore have a vector after the first view of their
    city. The vector of an item is its row. The rows are trained by the
    optimizers of the tables, and the projection by the optimizer of the model.
    """

    def __init__(self, num_negatives: int, seed: int):
        """Creates the tables."""
        super().__init__()
        self._num_negatives = num_negatives
        self._seed = seed

        def table(name: str, capacity: int) -> Any:
            layer = tlm.layers.ShardedEmbedding(
                # The negatives are lookups too, so the counts of keys say more
                # about their importance than their last steps.
                tlm.vocabulary.OpenVocabulary(
                    capacity, evict="lfu", half_life_steps=500
                ),
                DIM,
                optimizer=tf.tpu.experimental.embedding.Adagrad(0.2),
                name=name,
            )
            layer.build([None])
            return layer

        self.users = table("users", _CAPACITY)
        self.cities = table("cities", 4 * NUM_CITIES)
        self.items = table("items", _CAPACITY)
        self.projection = keras.layers.Dense(
            DIM, kernel_initializer="identity", name="projection"
        )
        self.projection.build([None, DIM])

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the vectors of users, `[batch_size, DIM]`."""
        return self.projection(
            self.users(inputs["user"]) + self.cities(inputs["city"])
        )

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> tf.Tensor:
        """Returns the sampled softmax loss of the viewed items `y`."""
        del x, sample_weight, training
        losses = tlm.ops.sampled_softmax_loss(
            self.items, y, y_pred, self._num_negatives, seed=self._seed
        )
        return tf.reduce_mean(losses)


def train(model: TwoTower, day: Day, epochs: int) -> None:
    """Trains on the views of a day."""
    views = day.training
    dataset = tf.data.Dataset.from_tensor_slices(
        (
            {
                "user": tf.constant(views.users),
                "city": tf.constant(views.cities),
            },
            tf.constant(views.items),
        )
    )
    dataset = dataset.shuffle(len(views.users), seed=0).batch(
        _BATCH_SIZE, drop_remainder=True
    )
    # In TensorFlow 2.21, deleting an iterator that autotunes can take a minute.
    options = tf.data.Options()
    options.autotune.enabled = False
    if not model.compiled:
        model.compile(keras.optimizers.Adam(1e-3))
    model.fit(
        dataset.with_options(options), epochs=epochs, verbose=0, shuffle=False
    )


def export(model: TwoTower, path: str) -> None:
    """Writes a SavedModel with the functions of the serving process."""
    strings = tf.TensorSpec([None], tf.string)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(
        "user_vectors",
        lambda users, cities: model({"user": users, "city": cities}),
        input_signature=[strings, strings],
    )
    archive.add_endpoint("item_vectors", model.items, input_signature=[strings])
    archive.write_out(path, verbose=False)
