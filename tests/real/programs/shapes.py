"""Programs on graphs and point clouds that use gather and scatter ops."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RNG = np.random.default_rng(0)
NODES, EDGES = 32, 64
FEATURES = RNG.normal(size=(NODES, 8)).astype(np.float32)
LINKS = RNG.integers(0, NODES, (2, EDGES))
CLASSES = RNG.integers(0, 4, NODES)
POINTS = RNG.normal(size=(16, 32, 3)).astype(np.float32)


class GraphConvolution(layers.Layer):
    """Layer in which each node averages the messages of its neighbors."""

    def __init__(self, units, links, nodes):
        super().__init__()
        self.links, self.nodes = links, nodes
        self.prepare = layers.Dense(units, activation="gelu")
        self.update = layers.Dense(units, activation="gelu")

    def call(self, states):
        neighbours = ops.take(states, self.links[1], axis=0)
        sums = ops.segment_sum(
            self.prepare(neighbours), self.links[0], num_segments=self.nodes
        )
        return ops.normalize(
            self.update(ops.concatenate([states, sums], axis=1)), axis=-1
        )


class GraphNetwork(keras.Model):
    """Model that stores a graph and classifies its nodes."""

    def __init__(self):
        super().__init__()
        self.features = ops.convert_to_tensor(FEATURES)
        self.before = keras.Sequential(
            [layers.Dense(16, activation="gelu"), layers.BatchNormalization()]
        )
        links = ops.convert_to_tensor(LINKS)
        self.first = GraphConvolution(16, links, NODES)
        self.second = GraphConvolution(16, links, NODES)
        self.head = layers.Dense(4)

    def call(self, nodes):
        x = self.before(self.features)
        x = self.first(x) + x
        x = self.second(x) + x
        return self.head(ops.take(x, ops.squeeze(nodes, 1), axis=0))


def graph_network():
    model = GraphNetwork()
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["acc"],
    )
    nodes = np.arange(NODES)[:, None]
    return model.fit(
        nodes, CLASSES, epochs=3, batch_size=16, shuffle=False, verbose=0
    ).history["loss"], [model]


class OrthogonalRegularizer(keras.regularizers.Regularizer):
    """Regularizer that keeps a transformation close to a rotation."""

    def __init__(self, size, weight=0.001):
        self.size, self.weight = size, weight
        self.eye = ops.eye(size)

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.size, self.size))
        xxt = ops.tensordot(x, x, axes=(2, 2))
        xxt = ops.reshape(xxt, (-1, self.size, self.size))
        return ops.sum(self.weight * ops.square(xxt - self.eye))


def transformed(inputs, size):
    """Applies a learned transformation to points."""
    x = layers.Conv1D(8, 1, activation="relu")(inputs)
    x = layers.GlobalMaxPooling1D()(x)
    x = layers.Dense(16, activation="relu")(x)
    matrix = layers.Dense(
        size * size,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(np.eye(size).flatten()),
        activity_regularizer=OrthogonalRegularizer(size),
    )(x)
    matrix = layers.Reshape((size, size))(matrix)
    return layers.Dot(axes=(2, 1))([inputs, matrix])


def point_cloud():
    """Classifies point clouds; the order of the points has no effect."""
    inputs = keras.Input((32, 3))
    x = layers.Conv1D(8, 1)(transformed(inputs, 3))
    x = layers.Activation("relu")(layers.BatchNormalization(momentum=0.0)(x))
    x = layers.GlobalMaxPooling1D()(transformed(x, 8))
    x = layers.Dropout(0.3, seed=8)(layers.Dense(16, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(x))
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(0.001),
        metrics=["sparse_categorical_accuracy"],
    )
    dataset = (
        tf.data.Dataset.from_tensor_slices((POINTS, np.arange(16) % 4))
        .shuffle(16, seed=1)
        .batch(8)
    )
    return model.fit(dataset, epochs=3, verbose=0).history["loss"], [model]


PROGRAMS = [graph_network, point_cloud]
