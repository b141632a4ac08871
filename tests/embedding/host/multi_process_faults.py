"""One of two processes; one process makes a mistake.

    python multi_process_faults.py OUTPUT CASE

test_multi_process.py starts the program. The program runs a step after the
mistake and writes the error of the step to OUTPUT.
"""

import json
import os
import pathlib
import sys

import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes

tpu = tf.tpu.experimental.embedding

# Variable with the learning rate.
RATES = []


def bad_id(embedding, worker, folder):
    """Returns an out-of-range id for the second sample of process 1."""
    return {
        "dense": tf.constant([[0, 1], [2, 7 if worker else 3]]),
        "ragged": tf.ragged.constant([[0], [1, 2]]),
    }


def bad_ragged_id(embedding, worker, folder):
    return {
        "dense": tf.constant([[0, 1], [2, 3]]),
        "ragged": tf.ragged.constant([[0, 1], [], [1, -1 if worker else 2]]),
    }


def restore_in_one(embedding, worker, folder):
    prefix = str(folder / f"table_{worker}")
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    checkpoint.write(prefix)
    if worker:
        checkpoint.read(prefix)
    return {
        "dense": tf.constant([[0, 1], [2, 3]]),
        "ragged": tf.ragged.constant([[0], [1, 2]]),
    }


def restore_in_both(embedding, worker, folder):
    prefix = str(folder / f"table_{worker}")
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    checkpoint.write(prefix)
    checkpoint.read(prefix)
    return {
        "dense": tf.constant([[0, 1], [2, 3]]),
        "ragged": tf.ragged.constant([[0], [1, 2]]),
    }


def other_rate(embedding, worker, folder):
    """The learning rate differs in process 1."""
    RATES[0].assign(0.5 if worker else 0.25)
    return {
        "dense": tf.constant([[0, 1], [2, 3]]),
        "ragged": tf.ragged.constant([[0], [1, 2]]),
    }


def main(output, case):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    RATES.append(tf.Variable(0.5))
    words = tpu.TableConfig(5, 2, tf.ones_initializer(), name="words")
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            {
                "dense": tpu.FeatureConfig(words),
                "ragged": tpu.FeatureConfig(words),
            },
            tpu.SGD(lambda: RATES[0].read_value()),
        )

    @tf.function
    def step(features):
        def replica(features):
            embedding.enqueue(features)
            activations = embedding.dequeue()
            embedding.apply_gradients(activations)
            return activations["dense"]

        return strategy.run(replica, (features,))

    path = pathlib.Path(output)
    features = globals()[case](embedding, worker, path.parent)
    try:
        step(features)
        path.write_text("trained")
    except Exception as error:
        path.write_text(f"{type(error).__name__}: {error}")
    processes.stay_until_written(path.parent, "[01].txt")


if __name__ == "__main__":
    main(*sys.argv[1:])
