"""A dense reference of the engine: one-hot matrices, a tape, an optimizer.

Every feature becomes a matrix of gains `[num_samples, num_rows]` that is
multiplied with the full table. A tape differentiates the product, and
TensorFlow's own dense optimizer updates every row of the table. The reference
is slow, and simple enough to be verified by reading.
"""

import dataclasses

import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class Bag:
    """Input of one feature: the ids and weights of each sample."""

    ids: list[list[int]]
    weights: list[list[float]] | None = None

    def weights_of(self, sample):
        if self.weights is None:
            return [1.0] * len(self.ids[sample])
        return self.weights[sample]


def gain_matrix(bag: Bag, num_rows: int, combiner: str) -> np.ndarray:
    """Returns the factor of each row for each sample, `[samples, rows]`."""
    matrix = np.zeros([len(bag.ids), num_rows], np.float32)
    for sample, ids in enumerate(bag.ids):
        weights = np.asarray(bag.weights_of(sample), np.float32)
        divisor = {
            "sum": 1.0,
            "mean": weights.sum(),
            "sqrtn": np.sqrt(np.square(weights).sum()),
        }[combiner]
        for id_, weight in zip(ids, weights, strict=True):
            if divisor != 0:
                matrix[sample, id_] += weight / divisor
    return matrix


def sequence_matrix(bag: Bag, num_rows: int, length: int) -> np.ndarray:
    """Returns one-hot rows by position, `[num_samples, length, num_rows]`."""
    matrix = np.zeros([len(bag.ids), length, num_rows], np.float32)
    for sample, ids in enumerate(bag.ids):
        for position, id_ in enumerate(ids[:length]):
            matrix[sample, position, id_] = 1
    return matrix


class DenseTables:
    """Tables that a dense optimizer trains.

    `optimizers` maps each table to `("sgd", rate)` or
    `("adagrad", rate, initial_accumulator)`.
    """

    def __init__(self, rows: dict, optimizers: dict):
        self.tables = {
            name: tf.Variable(tf.constant(value, tf.float32))
            for name, value in rows.items()
        }
        self.accumulators = {}
        self._optimizers = optimizers
        for name, (kind, _, *rest) in optimizers.items():
            if kind == "adagrad":
                self.accumulators[name] = tf.Variable(
                    tf.fill(self.tables[name].shape, tf.constant(rest[0]))
                )

    def lookup(self, name: str, matrix: np.ndarray) -> tf.Tensor:
        return tf.tensordot(tf.constant(matrix), self.tables[name], 1)

    def train(self, steps_features):
        """Runs one step on a list of (table, matrix, coefficients) tuples.

        The loss is the sum of all activations times their coefficients, so the
        gradient of an activation is its coefficient.
        """
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.reduce_sum(self.lookup(name, matrix) * coefficients)
                    for name, matrix, coefficients in steps_features
                ]
            )
        gradients = tape.gradient(
            loss, self.tables, unconnected_gradients="zero"
        )
        for name, gradient in gradients.items():
            gradient = tf.convert_to_tensor(gradient)
            kind, rate, *_ = self._optimizers[name]
            handle = self.tables[name].handle
            if kind == "sgd":
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=handle, alpha=rate, delta=gradient
                )
            else:
                tf.raw_ops.ResourceApplyAdagrad(
                    var=handle,
                    accum=self.accumulators[name].handle,
                    lr=rate,
                    grad=gradient,
                )
