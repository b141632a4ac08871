"""Coordinator that trains planned tables of two towers, for test_servers.py.

python -m tests.planning.servers_program FOLDER

Prints the planned bytes of each server, and the bytes of the variables that
each server holds after training.
"""

import collections
import json
import os
import pathlib
import sys

import tensorflow as tf

import tf_layoutmap as tlm
from tests.planning.resident_variables import variables_of

tpu = tf.tpu.experimental.embedding

NUM_SERVERS, BATCH_SIZE, NUM_STEPS, DIM = 2, 32, 4, 8
# Number of rows and tower of each table.
TABLES = {
    "queries": (2000, "query"),
    "countries": (7, "query"),
    "items": (5001, "item"),
    "brands": (601, "item"),
}
OPEN_TABLE = "queries"


def features():
    return {
        name: tpu.FeatureConfig(
            tpu.TableConfig(rows, DIM, tf.constant_initializer(0.1), name=name)
        )
        for name, (rows, _) in TABLES.items()
    }


def options():
    return {"vocabularies": {OPEN_TABLE: tlm.vocabulary.OpenVocabulary(2000)}}


def plan():
    return tlm.plan(
        features(),
        num_servers=NUM_SERVERS,
        memory="1MB",
        optimizer=tpu.Adagrad(0.1),
        batch_size=BATCH_SIZE,
        pins={"items": "rows", "brands": "table"},
        costs=tlm.planning.MachineCosts.typical(),
        **options(),
    )


def batches():
    """Returns a dataset of one id per sample and table."""
    batch = {
        name: tf.random.stateless_uniform(
            [BATCH_SIZE], [3, index], maxval=rows, dtype=tf.int64
        )
        for index, (name, (rows, _)) in enumerate(TABLES.items())
    }
    return tf.data.Dataset.from_tensors(batch).repeat()


def loss(activations):
    """Returns the loss of the products of both towers, with one positive."""
    query, item = (
        tf.add_n(
            [
                activations[name]
                for name, (_, one) in TABLES.items()
                if one == tower
            ]
        )
        for tower in ("query", "item")
    )
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(BATCH_SIZE), tf.matmul(query, item, transpose_b=True)
        )
    )


def resident_bytes(embedding):
    """Returns the bytes of all variables of each server, read from it."""
    found = collections.Counter()
    applied = embedding._state.backend._started.applied_closures._applied
    for variable in [*variables_of(embedding), *applied]:
        device = tf.DeviceSpec.from_string(variable.device)
        assert device.job == "ps"
        found[device.task] += variable.read_value().numpy().nbytes
    return [found[task] for task in range(NUM_SERVERS)]


def main():
    folder = pathlib.Path(sys.argv[1])
    strategy = tlm.ps.connect(timeout_seconds=60)
    planned = plan()
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            features(), tpu.Adagrad(0.1), partitioner=planned, **options()
        )

    def step(ids):
        embedding.enqueue(ids)
        activations = embedding.dequeue()
        with tf.GradientTape() as tape:
            tape.watch(activations)
            value = loss(activations)
        embedding.apply_gradients(tape.gradient(value, activations))
        return value

    run = tlm.ps.Run(
        strategy,
        step,
        batches,
        folder / "checkpoints",
        objects={"embedding": embedding},
    )
    run.steps(NUM_STEPS)
    found = {
        "planned": planned.solution.memory(),
        "resident": resident_bytes(embedding),
        "choices": planned.choices,
        "num_done": run.num_done,
    }
    print("FOUND " + json.dumps(found), flush=True)
    os._exit(0)  # A coordinator would not exit normally while its workers run.


if __name__ == "__main__":
    main()
