"""One process of a group that counts its threads while it trains and reads.

    python -m tests.embedding.process_sharded.threads_program FOLDER HOW

test_threads.py starts the processes.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

from tests.embedding.process_sharded import deltas_program as plan

NUM_CALLS = 40


def num_threads():
    return len(os.listdir("/proc/self/task"))


def main(folder, how):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        one = plan.embedding(over_processes=how)
    step = plan.train_step(one, strategy)

    def call(number):
        step(*plan.batch(number, worker))
        for table in one.embedding_tables.values():
            np.asarray(table.numpy())

    counts = []
    for number in range(2 * NUM_CALLS):
        call(number)
        counts.append(num_threads())
    pathlib.Path(folder, f"{worker}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
