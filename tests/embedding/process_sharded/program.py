"""One process of a group with sharded tables.

    python program.py FOLDER NUM_STEPS [USERS_DTYPE [DIES_BEFORE]]

Trains `multi_process_program.embedding()`. Writes to FOLDER the checkpoints
`start` and `end` of process 0, and the activations and rows of this process.
Continues from the checkpoint `restart` if it exists. The last process exits
without cleanup before step DIES_BEFORE.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

from tests.embedding.host import multi_process_program as plan
from tests.embedding.process_sharded import checkpoints


def own_rows(embedding):
    """Returns the row range and the shape of this process's block, by name."""
    found = {}
    for one, table in embedding.embedding_tables.items():
        slots = embedding.slot_variables[one]
        for name, part in {"": table, **slots}.items():
            found[f"{one.name}/{name}"] = [
                part.rows.start,
                part.rows.stop,
                part.block.shape.as_list(),
            ]
    return found


def main(folder, num_steps, users_dtype="bfloat16", dies_before=None):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    task = json.loads(os.environ["TF_CONFIG"])
    worker, size = task["task"]["index"], len(task["cluster"]["worker"])
    with strategy.scope():
        embedding = plan.embedding(users_dtype, over_processes="sharded")
    save = checkpoints.restored(embedding, folder, worker)
    save("start")
    step = plan.train_step(embedding, strategy)
    for number in range(int(num_steps)):
        if dies_before and int(dies_before) == number:
            if worker == size - 1:
                os._exit(1)
            print("alone", flush=True)
        activations = step(*plan.batch(number, worker))
    save("end")
    (folder / f"rows_{worker}.json").write_text(json.dumps(own_rows(embedding)))
    np.savez(
        folder / f"{worker}.npz",
        **{name: one.numpy() for name, one in activations.items()},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
