"""Reads checkpoints with TensorFlow's `TPUEmbedding` class."""

import numpy as np
import tensorflow as tf

tpu = tf.tpu.experimental.embedding


def features():
    """Returns tables with optimizers that TensorFlow's class also supports."""
    words = tpu.TableConfig(
        20, 5, tf.ones_initializer(), tpu.Adagrad(0.1), "mean", name="words"
    )
    users = tpu.TableConfig(
        9, 3, tf.ones_initializer(), tpu.Adam(0.1), "sum", name="users"
    )
    return {
        "title": tpu.FeatureConfig(words, name="title"),
        "user": tpu.FeatureConfig(users, name="user"),
    }


def tables_in(path):
    """Returns the variables that TensorFlow's class restores, by name.

    Raises:
      AssertionError: The variables in the checkpoint differ from the variables
        of the class.
    """
    embedding = tpu.TPUEmbedding(features(), tpu.SGD(0.1))
    embedding.build()
    tf.train.Checkpoint(embedding=embedding).read(str(path)).assert_consumed()
    return {
        table if name == "parameters" else f"{table}/{name}": np.asarray(
            variable
        )
        for table, variables in embedding._variables.items()
        for name, variable in variables.items()
    }


def train(embedding, num_steps, strategy=None):
    """Trains on ids that include the first and last rows."""

    @tf.function
    def step(number):
        def replica():
            embedding.enqueue(
                {
                    "title": tf.stack([number, 19 - number, 3]),
                    "user": tf.stack([number, 8 - number, 3]),
                }
            )
            activations = embedding.dequeue()
            embedding.apply_gradients(
                {name: tf.cos(one) for name, one in activations.items()}
            )

        return strategy.run(replica) if strategy else replica()

    for number in range(num_steps):
        step(tf.constant(number, tf.int64))
