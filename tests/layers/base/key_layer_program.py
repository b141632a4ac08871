"""One process that trains a ShardedEmbedding with an open vocabulary.

    python key_layer_program.py OUTPUT LIBRARY

LIBRARY is "keras" or "tf_keras". Writes the rows of all keys to OUTPUT.npz.
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

NUM_STEPS = 4


def batch(step, replica):
    """Returns keys and factors of one replica."""
    rng = np.random.default_rng([step, replica])
    return (
        tf.constant(rng.integers(0, 40, [3, 2]) * 1009),
        tf.constant(rng.integers(-3, 4, [3, 2, 4]), tf.float32),
    )


def train(library, strategy, batches):
    """Trains a layer, and returns its rows by key, sorted by key.

    Args:
      library: "keras" or "tf_keras".
      strategy: Strategy of the layer.
      batches: Arguments of each step.
    """
    if library == "keras":
        import keras

        layers = tlm.layers
    else:
        import tf_keras as keras

        layers = tlm.layers.tf_keras
    with strategy.scope():
        layer = layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(400),
            4,
            optimizer="adagrad",
            name="words",
        )
        layer.build(None)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(layer.trainable_variables)

    def in_replica(keys, factors):
        with tf.GradientTape() as tape:
            found = layer(keys)
            loss = tf.reduce_sum(found * factors)
        variables = layer.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables)
        )
        return layer(keys)

    step = tf.function(lambda *args: strategy.run(in_replica, args))
    for one in batches:
        rows_after = step(*one)
    keys = np.sort(layer.vocabulary.keys().numpy())
    rows = layer.vocabulary.lookup(keys)
    return {
        "keys": keys,
        "rows": tf.gather(layer.embeddings, rows).numpy(),
        "slots": tf.gather(layer.optimizer.slots["accumulators"], rows).numpy(),
        "iterations": int(layer.optimizer.iterations.numpy()),
        "looked_up": strategy.experimental_local_results(rows_after)[0].numpy(),
    }


def main(output, library):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    np.savez(
        output,
        **train(
            library,
            strategy,
            [batch(number, worker) for number in range(NUM_STEPS)],
        ),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
