"""Reads checkpoints with TensorFlow's own `TPUEmbedding`."""

import numpy as np
import tensorflow as tf

tpu = tf.tpu.experimental.embedding


def features():
    """Tables of rules that TensorFlow has, too."""
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
    """Each variable that TensorFlow's class finds in a checkpoint, by name.

    Raises:
      AssertionError: There is more in the file, or less, than it has.
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
    """Steps on ids that reach the first and last rows."""

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
