"""One process of a group that reads and exports sharded tables.

    python tables_program.py FOLDER

Trains `deltas_program.embedding()`, reads its tables, exports it, writes
deltas, and saves checkpoints in another thread while it trains. Writes the
results of each process to FOLDER.
"""

import dataclasses
import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.process_sharded import checkpoints
from tests.embedding.process_sharded import deltas_program as plan
from tf_layoutmap.embedding.process_sharded import row_transfer
from tf_layoutmap.serving import sources

ASYNC = tf.train.CheckpointOptions(enable_async=True)
# Formats of the exports, by folder.
FORMATS = ("float32", "int8")


def ids_of(worker):
    """Returns the rows that a process reads; the first process reads few."""
    return [[18, 0], [7, 18]] if worker else [3]


def table_of(one, name):
    """Returns the rows of a table."""
    (found,) = [
        rows
        for config, rows in one.embedding_tables.items()
        if config.name == name
    ]
    return found


def read(one, worker):
    """Returns all tables, and some rows of the first table."""
    tables = {
        config.name: rows for config, rows in one.embedding_tables.items()
    }
    for config, slots in one.slot_variables.items():
        for name, slot in slots.items():
            tables[f"{config.name}/{name}"] = slot
    found = {
        name: table.numpy().astype(np.float32) for name, table in tables.items()
    }
    for name, table in tables.items():
        blocks = list(table.blocks(2))
        assert max(len(block) for block in blocks) <= 2
        np.testing.assert_array_equal(
            np.concatenate([block.numpy() for block in blocks]).astype(
                np.float32
            ),
            found[name],
        )
    found["read"] = tables["words"].sparse_read(ids_of(worker)).numpy()
    return found


def read_in_step(one, strategy, worker):
    """Returns rows and activations that a tf.function reads in each replica."""
    words = table_of(one, "words")
    features, _ = plan.batch(9, worker)

    @tf.function
    def in_replica():
        return words.sparse_read(ids_of(worker)), one(features)

    rows, activations = strategy.run(in_replica)
    found = {"read in a step": rows}
    found.update(
        {f"activation/{name}": one for name, one in activations.items()}
    )
    return {
        name: strategy.experimental_local_results(value)[0].numpy()
        for name, value in found.items()
    }


def errors_of(one, folder, worker):
    """Returns the errors of invalid calls, in which all processes take part."""
    words = table_of(one, "words")
    blocked = folder / "blocked"
    if worker == 0:
        blocked.mkdir()
        (blocked / "a file of the user").touch()
    calls = {
        "bad id": lambda: words.sparse_read([1, 19 if worker else 2]),
        "not finite": lambda: tlm.export(
            one, str(folder / "nan"), row_format="int8"
        ),
        "blocked": lambda: tlm.export(one, str(blocked)),
        "in a function": tf.function(words.numpy),
        "implicit": lambda: tf.convert_to_tensor(words),
    }
    found = {}
    for name, call in calls.items():
        if name == "not finite" and worker:
            words.block[1, 0].assign(float("nan"))
        try:
            call()
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if name == "not finite" and worker:
            words.block[1, 0].assign(1.0)
    return found


def main(folder):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    # With these small limits, tables are transferred in several blocks.
    row_transfer._CHUNK, sources.BLOCK_BYTES = 8, 32
    with strategy.scope():
        one = plan.embedding(over_processes="sharded")
    step = plan.train_step(one, strategy)

    def path_of(name):
        return checkpoints.path_of(folder, name, worker)

    checkpoint = tf.train.Checkpoint(embedding=one)
    checkpoint.write(path_of("base"))
    step(*plan.batch(0, worker))
    # All processes must wait until the first process has written the base.
    writer = tlm.deltas.DeltaWriter(
        one, folder / "deltas", base=str(folder / "base")
    )
    writer.write()
    step(*plan.batch(1, worker))
    reports = {
        rows: [
            dataclasses.asdict(table)
            for table in tlm.export(
                one, str(folder / rows), row_format=rows, delta_writer=writer
            ).tables
        ]
        for rows in FORMATS
    }
    step(*plan.batch(2, worker))
    writer.write()
    checkpoint.write(path_of("after_delta"))
    found = read(one, worker)
    found.update(read_in_step(one, strategy, worker))
    in_thread = tf.train.Checkpoint(embedding=one)
    for number in range(3, 9):
        step(*plan.batch(number, worker))
        if number % 2:
            in_thread.write(path_of(f"async_{number}"), ASYNC)
            checkpointed = number
    # The last two steps have run while the checkpoint was written.
    in_thread.sync()
    assert checkpointed == 7
    checkpoint.write(path_of("end"))
    np.savez(folder / f"{worker}.npz", **found)
    (folder / f"reports_{worker}.json").write_text(json.dumps(reports))
    (folder / f"errors_{worker}.json").write_text(
        json.dumps(errors_of(one, folder, worker))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
