"""One of two processes with sharded tables; one process makes a mistake.

    python faults.py FOLDER CASE

test_process_sharded.py starts the program. The program runs a step after the
mistake and writes the error of the step to FOLDER.
"""

import json
import os
import pathlib
import sys
import time

import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes

tpu = tf.tpu.experimental.embedding

# Variable with the learning rate.
RATES = []


def valid_features():
    return {
        "dense": tf.constant([[0, 1], [2, 3]]),
        "ragged": tf.ragged.constant([[0], [1, 2]]),
    }


def bad_id(embedding, strategy, worker, folder):
    """Passes an out-of-range id in the second sample of process 1."""
    step(
        embedding,
        strategy,
        {
            **valid_features(),
            "dense": tf.constant([[0, 1], [2, 7 if worker else 3]]),
        },
    )


def bad_splits(embedding, strategy, worker, folder):
    """Passes a ragged tensor with invalid row splits in process 1."""
    step(
        embedding,
        strategy,
        {
            **valid_features(),
            "ragged": tf.RaggedTensor.from_row_splits(
                [0, 1, 2], [0, 3, 1 if worker else 3, 3], validate=False
            ),
        },
    )


def restore_in_one(embedding, strategy, worker, folder):
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    # All processes must call `write`, but only process 0 writes the tables.
    checkpoint.write(str(folder / f"table_{worker}"))
    if worker:
        # The checkpoint is complete when its index file exists.
        while not (folder / "table_0.index").exists():
            time.sleep(0.05)
        checkpoint.read(str(folder / "table_0"))
    step(embedding, strategy, valid_features())


def lookup_outside_of_a_step(embedding, strategy, worker, folder):
    embedding(valid_features())


def equal_rates(embedding, strategy, worker, folder):
    RATES[0].assign(0.25)
    step(embedding, strategy, valid_features())


def other_rate(embedding, strategy, worker, folder):
    """The learning rate differs in process 1."""
    RATES[0].assign(0.5 if worker else 0.25)
    step(embedding, strategy, valid_features())


def calls_in_two_functions(embedding, strategy, worker, folder):
    tf.function(lambda: strategy.run(embedding.enqueue, (valid_features(),)))()
    tf.function(lambda: strategy.run(embedding.dequeue))()


def step(embedding, strategy, features):
    def replica(features):
        embedding.enqueue(features)
        activations = embedding.dequeue()
        embedding.apply_gradients(activations)
        return activations["dense"]

    tf.function(lambda: strategy.run(replica, (features,)))()


def main(folder, case):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    RATES.append(tf.Variable(1.0))
    words = tpu.TableConfig(5, 2, tf.ones_initializer(), name="words")
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            {
                "dense": tpu.FeatureConfig(words),
                "ragged": tpu.FeatureConfig(words),
            },
            tpu.SGD(lambda: RATES[0].read_value())
            if case.endswith(("rate", "rates"))
            else tpu.SGD(0.5),
            over_processes="sharded",
        )
    path = folder / f"{worker}.txt"
    try:
        globals()[case](embedding, strategy, worker, folder)
        path.write_text("trained")
    except Exception as error:
        path.write_text(f"{type(error).__name__}: {error}")
    processes.stay_until_written(folder, "[01].txt")


if __name__ == "__main__":
    main(*sys.argv[1:])
