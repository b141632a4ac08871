"""Programs that learn similarity: pairs, triplets, two towers."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RNG = np.random.default_rng(0)
SIDE = 16
IMAGES = RNG.uniform(size=(32, SIDE, SIDE, 1)).astype(np.float32)
CLASSES = np.arange(32) % 4
USERS = RNG.integers(0, 32, 64)
ITEMS = RNG.integers(0, 16, 64)


def encoder():
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            layers.Conv2D(4, 5, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.BatchNormalization(),
            layers.Dense(16, activation="tanh"),
        ]
    )


def siamese():
    """Predicts from two encodings whether two images have the same class."""
    tower = encoder()
    first, second = keras.Input((SIDE, SIDE, 1)), keras.Input((SIDE, SIDE, 1))

    def distance(codes):
        squares = ops.sum(
            ops.square(codes[0] - codes[1]), axis=1, keepdims=True
        )
        return ops.sqrt(ops.maximum(squares, keras.backend.epsilon()))

    def contrastive(y_true, y_pred):
        near = ops.square(y_pred)
        far = ops.square(ops.maximum(1.0 - y_pred, 0))
        return ops.mean((1 - y_true) * near + y_true * far)

    x = layers.Lambda(distance, output_shape=(1,))(
        [tower(first), tower(second)]
    )
    x = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(x))
    model = keras.Model([first, second], x)
    model.compile(loss=contrastive, optimizer="RMSprop", metrics=["accuracy"])
    others = np.roll(np.arange(32), 2)
    same = (CLASSES != CLASSES[others]).astype(np.float32)
    return model.fit(
        [IMAGES, IMAGES[others]],
        same,
        batch_size=16,
        epochs=3,
        shuffle=False,
        verbose=0,
    ).history["loss"], [tower]


class Triplets(keras.Model):
    """Model that is trained on anchors, positives and negatives."""

    def __init__(self, tower, margin=0.5):
        super().__init__()
        self.tower, self.margin = tower, margin
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        anchor, positive, negative = map(self.tower, inputs)
        return (
            ops.sum(ops.square(anchor - positive), -1),
            ops.sum(ops.square(anchor - negative), -1),
        )

    def _loss(self, data):
        near, far = self(data)
        return ops.maximum(near - far + self.margin, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        gradients = tape.gradient(loss, self.tower.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.tower.trainable_weights)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self._loss(data))
        return {"loss": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


def triplets():
    model = Triplets(encoder())
    model.compile(optimizer=keras.optimizers.Adam(1e-4), weighted_metrics=[])
    dataset = tf.data.Dataset.zip(
        tuple(
            tf.data.Dataset.from_tensor_slices(np.roll(IMAGES, shift, 0))
            for shift in (0, 4, 1)
        )
    ).batch(16)
    history = model.fit(
        dataset, epochs=3, validation_data=dataset, verbose=0
    ).history
    return history["loss"] + history["val_loss"], [model.tower]


class MetricLearning(keras.Model):
    """Model whose batches contain an anchor and a positive of each class."""

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[:, 0], data[:, 1]
        with tf.GradientTape() as tape:
            first = self(anchors, training=True)
            second = self(positives, training=True)
            close = ops.einsum("ae,pe->ap", first, second) / 0.2
            labels = ops.arange(4)
            loss = self.compute_loss(y=labels, y_pred=close)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


def metric_learning():
    inputs = keras.Input((SIDE, SIDE, 1))
    x = layers.Conv2D(8, 3, strides=2, activation="relu")(inputs)
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.UnitNormalization()(layers.Dense(8)(x))
    model = MetricLearning(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    pairs = np.stack([IMAGES[:16], IMAGES[16:]], 1)
    history = model.fit(
        pairs, batch_size=4, epochs=3, shuffle=False, verbose=0
    ).history
    return history["loss"], [model]


class TwoTowers(keras.Model):
    """Two-tower model whose negatives are the other items of the batch."""

    def __init__(self):
        super().__init__()
        self.user = keras.Sequential(
            [layers.Embedding(32, 16), layers.Dense(8)]
        )
        self.item = keras.Sequential(
            [layers.Embedding(16, 16), layers.Dense(8)]
        )
        self.loss_of_scores = keras.losses.CategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )

    def call(self, inputs):
        return self.user(inputs["user"]), self.item(inputs["item"])

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        users, items = y_pred
        scores = ops.matmul(users, ops.transpose(items))
        return self.loss_of_scores(ops.eye(16), scores)


def two_towers():
    """Trains retrieval of items for users."""
    model = TwoTowers()
    model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
    dataset = tf.data.Dataset.from_tensor_slices(
        {"user": USERS, "item": ITEMS}
    ).batch(16, drop_remainder=True)
    losses = model.fit(dataset, epochs=3, verbose=0).history["loss"]
    scores = model.user.predict(USERS[:8], verbose=0) @ (
        model.item.predict(np.arange(16), verbose=0).T
    )
    return losses + [float(best) for best in scores.argmax(1)], [model]


PROGRAMS = [siamese, triplets, metric_learning, two_towers]
