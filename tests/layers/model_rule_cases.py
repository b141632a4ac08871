"""Optimizers and settings that a table with `optimizer="model"` follows.

The cases are shared by the tests of Keras 3 and tf_keras.
"""

import numpy as np
import tensorflow as tf

NUM_ROWS, DIM = 7, 3

# Class name and arguments of each optimizer.
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    "nesterov": (
        "SGD",
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "adagrad": ("Adagrad", {"learning_rate": 0.1, "epsilon": 1e-3}),
    "adam": ("Adam", {"learning_rate": 0.01, "epsilon": 1e-3}),
    "adamw": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.5}),
    "rmsprop": ("RMSprop", {"learning_rate": 0.01, "rho": 0.8}),
    "ftrl": (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.1,
            "beta": 0.1,
        },
    ),
}
SETTINGS = {
    "plain": {},
    "clipnorm": {"clipnorm": 1.0},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "clipvalue": {"clipvalue": 0.5},
    "weight_decay": {"weight_decay": 0.2},
    "schedule": {"learning_rate": None},
}


def make(keras, name, setting, **more):
    """Returns an optimizer of a Keras version."""
    kind, arguments = OPTIMIZERS[name]
    arguments = {**arguments, **SETTINGS.get(setting, {}), **more}
    if arguments["learning_rate"] is None:
        arguments["learning_rate"] = (
            keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        )
    return getattr(keras.optimizers, kind)(**arguments)


def start_rows():
    return np.random.default_rng(1).normal(size=(NUM_ROWS, DIM)).astype("f")


def gradients(num_steps):
    """Yields ids, their gradients, and the gradient of another weight.

    Each step contains all rows, and some of them several times.
    """
    rng = np.random.default_rng(2)
    for _ in range(num_steps):
        ids = np.concatenate(
            [rng.permutation(NUM_ROWS), rng.integers(0, NUM_ROWS, 5)]
        )
        yield (
            ids,
            rng.normal(size=(len(ids), DIM)).astype("f"),
            rng.normal(size=[4]).astype("f"),
        )


def train(weights, apply, num_steps=4, scale=1.0, is_dense=False):
    """Applies steps to a table and another weight, eagerly.

    Args:
      weights: The weight of the table, and the other weight.
      apply: Function that applies `(gradient, weight)` pairs.
      num_steps: Number of steps.
      scale: Factor of the gradients.
      is_dense: Whether the gradient of the table is a dense tensor.
    """
    table, other = weights
    for ids, values, of_other in gradients(num_steps):
        slices = tf.IndexedSlices(
            tf.constant(scale * values),
            tf.constant(ids),
            tf.constant([NUM_ROWS, DIM]),
        )
        gradient = tf.convert_to_tensor(slices) if is_dense else slices
        apply([(gradient, table), (tf.constant(scale * of_other), other)])
