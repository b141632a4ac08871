"""Programs on tabular data: preprocessing layers, wide and deep, DLRM."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RNG = np.random.default_rng(0)
ROWS = 64
AGE = RNG.integers(18, 80, ROWS).astype(np.float32)
HOURS = RNG.uniform(0, 60, ROWS).astype(np.float32)
WORK = RNG.choice(["private", "state", "self", "none"], ROWS)
CITY = RNG.integers(0, 12, ROWS)
LABEL = (AGE + HOURS > 70).astype(np.float32)


def preprocessing():
    """Preprocesses numbers and words before the model."""
    normalization = layers.Normalization(axis=None)
    normalization.adapt(AGE)
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(WORK)
    cities = layers.CategoryEncoding(12, output_mode="one_hot")
    dataset = tf.data.Dataset.from_tensor_slices(
        (
            {"age": AGE[:, None], "work": WORK[:, None], "city": CITY[:, None]},
            LABEL,
        )
    ).batch(16)

    def prepare(x, y):
        return {
            "age": normalization(x["age"]),
            "work": lookup(x["work"]),
            "city": cities(x["city"]),
        }, y

    inputs = {
        "age": keras.Input((1,)),
        "work": keras.Input((5,)),
        "city": keras.Input((12,)),
    }
    x = layers.concatenate(list(inputs.values()))
    x = layers.Dropout(0.5, seed=3)(layers.Dense(32, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(
        "adam",
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(dataset.map(prepare), epochs=3, verbose=0).history
    return history["loss"], [model]


def normalization_in_the_model():
    """Uses a Normalization layer that was adapted before training."""
    normalization = layers.Normalization()
    data = np.stack([AGE, HOURS], 1)
    normalization.adapt(data)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            normalization,
            layers.Dense(16, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        "mean_absolute_error",
        metrics=["mse", keras.metrics.AUC(from_logits=True)],
    )
    history = model.fit(
        data,
        LABEL,
        batch_size=16,
        epochs=3,
        shuffle=False,
        validation_split=0.25,
        verbose=0,
    ).history
    return history["loss"] + history["val_loss"], [model]


def wide_and_deep():
    """Trains a wide and deep model on crossed features."""
    age, city = keras.Input((1,)), keras.Input((1,), dtype="int64")
    hours = keras.Input((1,))
    wide = layers.concatenate(
        [
            layers.CategoryEncoding(12, output_mode="one_hot")(city),
            layers.Rescaling(1 / 60)(hours),
        ]
    )
    wide = layers.BatchNormalization()(wide)
    deep = layers.concatenate(
        [
            layers.Reshape((8,))(layers.Embedding(12, 8)(city)),
            layers.Rescaling(1 / 80)(age),
        ]
    )
    for units in (32, 16):
        deep = layers.Dense(units)(deep)
        deep = layers.ReLU()(layers.BatchNormalization()(deep))
    merged = layers.concatenate([wide, deep])
    model = keras.Model(
        [age, city, hours], layers.Dense(2, activation="softmax")(merged)
    )
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model.fit(
        [AGE[:, None], CITY[:, None], HOURS[:, None]],
        LABEL,
        batch_size=16,
        epochs=3,
        shuffle=False,
        verbose=0,
    ).history["loss"], [model]


class DotInteraction(layers.Layer):
    """Layer that returns the dot products of all pairs of features."""

    def call(self, features):
        x = ops.stack(features, axis=1)
        products = ops.matmul(x, ops.transpose(x, (0, 2, 1)))
        pairs = np.tril_indices(len(features), -1)
        flat = ops.reshape(products, (-1, len(features) ** 2))
        return ops.take(flat, pairs[0] * len(features) + pairs[1], axis=1)


class DLRM(keras.Model):
    """DLRM: embeddings, an MLP for numbers, and pairwise dot products."""

    def __init__(self):
        super().__init__()
        self.tables = [layers.Embedding(rows, 8) for rows in (12, 32)]
        self.bottom = keras.Sequential(
            [
                layers.Dense(16, activation="relu"),
                layers.Dense(8, activation="relu"),
            ]
        )
        self.top = keras.Sequential(
            [
                layers.Dense(16, activation="relu"),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        self.interaction = DotInteraction()

    def call(self, inputs):
        dense = self.bottom(inputs["numbers"])
        looked_up = [
            table(inputs[name])
            for table, name in zip(self.tables, ("city", "user"))
        ]
        crossed = self.interaction([dense, *looked_up])
        return self.top(ops.concatenate([dense, crossed], axis=1))


def dlrm():
    model = DLRM()
    model.compile(
        optimizer=keras.optimizers.Adagrad(0.05),
        loss="binary_crossentropy",
        metrics=["AUC"],
    )
    features = {
        "numbers": np.stack([AGE / 80, HOURS / 60], 1),
        "city": CITY,
        "user": np.arange(ROWS) % 32,
    }
    dataset = tf.data.Dataset.from_tensor_slices(
        (features, LABEL[:, None])
    ).batch(16)
    history = model.fit(dataset, epochs=3, verbose=0).history
    return history["loss"] + history["AUC"], [model]


PROGRAMS = [preprocessing, normalization_in_the_model, wide_and_deep, dlrm]
