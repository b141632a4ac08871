"""One process of a group whose tables are planned, for test_workers.py.

    python workers_program.py FOLDER OVER_PROCESSES

Plans and trains `features()`. Writes to FOLDER/WORKER.json the planned and the
resident bytes of this process, and to FOLDER/WORKER.npz the tables and the
activations of the last step. Process 0 writes the checkpoint `end`.
"""

import collections
import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes
from tf_layoutmap.embedding import tables

tpu = tf.tpu.experimental.embedding

NUM_WORKERS, NUM_STEPS, BATCH_SIZE = 2, 3, 16
# The first process has one row more of each table than the second process.
ROWS = {"words": 1001, "users": 301}


def features():
    def rows(shape):
        size = shape[0] * shape[1]
        return tf.reshape(tf.range(size, dtype=tf.float32) / size, shape)

    return {
        name: tpu.FeatureConfig(
            tpu.TableConfig(num_rows, 4, rows, combiner="sum", name=name)
        )
        for name, num_rows in ROWS.items()
    }


def optimizer():
    return tpu.Adam(0.1)


# Bytes of rows and slot variables of both tables.
TABLE_BYTES = 3 * 4 * 4 * sum(ROWS.values())
# Budget of each process, number of ids per sample, and number of different ids
# for each planned value of `over_processes`. Replicated tables exceed the
# smaller budget. If samples have many ids, replicated tables exchange less
# data.
CASES = {
    "replicated": (2 * TABLE_BYTES, 200, 10),
    "sharded": (TABLE_BYTES, 2, 300),
}


def plan(over_processes):
    batches = [batch(over_processes, 0, w)[0] for w in range(NUM_WORKERS)]
    return tlm.plan(
        features(),
        num_workers=NUM_WORKERS,
        memory=CASES[over_processes][0],
        optimizer=optimizer(),
        id_report=tlm.inspect_ids(batches, features()),
        costs=tlm.planning.MachineCosts.typical(),
    )


def batch(over_processes, step, worker):
    """Returns the ids and the gradients of one process."""
    _, count, highest = CASES[over_processes]
    rng = np.random.default_rng([step, worker])
    ids = {
        name: tf.constant(rng.integers(0, highest, [BATCH_SIZE, count]))
        for name in ROWS
    }
    gradients = {
        name: tf.constant(rng.normal(size=[BATCH_SIZE, 4]), tf.float32)
        for name in ROWS
    }
    return ids, gradients


def resident_bytes(embedding):
    """Returns the bytes of rows and slot variables in this process."""
    found = collections.Counter()
    for by_name in embedding._variables.values():
        for name, value in by_name.items():
            for shard in tables.shards_of(value):
                part = "weights" if name == "parameters" else "slot variables"
                found[part] += shard.numpy().nbytes
    return dict(found)


def main(folder, over_processes):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    planned = plan(over_processes)
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            features(), optimizer(), over_processes=planned.over_processes
        )
        embedding.build()

    def step(ids, gradients):
        embedding.enqueue(ids)
        activations = embedding.dequeue()
        embedding.apply_gradients(gradients)
        return activations

    run = tf.function(lambda *batch: strategy.run(step, batch))
    for number in range(NUM_STEPS):
        activations = run(*batch(over_processes, number, worker))
    found = {
        "over_processes": planned.over_processes,
        "planned": planned.solution.memory()[worker],
        "resident": resident_bytes(embedding),
    }
    (folder / f"{worker}.json").write_text(json.dumps(found))
    name = "end" if worker == 0 else f"temporary_{worker}/end"
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    checkpoint.write(str(folder / name))
    np.savez(
        folder / f"{worker}.npz",
        **{name: one.numpy() for name, one in activations.items()},
    )
    processes.stay_until_written(folder, "*.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
