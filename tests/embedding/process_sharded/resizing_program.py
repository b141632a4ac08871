"""One process of a group that resizes vocabularies of sharded tables.

    python resizing_program.py FOLDER

Makes calls of `resize` that fail in some or all processes, and uses objects and
functions of the time before a resize. Writes their errors to FOLDER. Then
writes a base and a delta with the new capacity, exports the embedding, and
writes the checkpoint FOLDER/end.
"""

import json
import os
import pathlib
import sys
from unittest import mock

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.host import open_tables_program as plan
from tests.embedding.process_sharded import checkpoints
from tests.embedding.process_sharded.keys_program import contents, error_of
from tests.embedding.process_sharded.tables_program import table_of
from tf_layoutmap.embedding import resizing
from tf_layoutmap.embedding.process_sharded.backend import ProcessShardedBackend
from tf_layoutmap.embedding.process_sharded.tables import (
    ProcessShardedTable,
    ProcessStore,
)
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

CAPACITY = 300
# Number of rows that a block of a transfer contains at most.
ROWS_AT_ONCE = 5


def fail_in(worker, failing, owner, method):
    """Returns a scope in which a method has no memory in one process."""
    if worker != failing:
        return mock.patch.object(owner, method, getattr(owner, method))
    return mock.patch.object(owner, method, side_effect=MemoryError("full"))


def failed_calls(embedding, strategy, worker):
    """Returns the errors of calls that must not change any variable."""
    items = embedding.vocabularies["items"]
    capacity = CAPACITY

    def without_memory(failing, owner, method):
        with fail_in(worker, failing, owner, method):
            items.resize(capacity)

    def with_step_in_flight():
        features, _ = plan.batch(1, worker)
        tf.function(lambda: strategy.run(lambda: embedding.enqueue(features)))()
        items.resize(capacity)

    calls = {
        "other capacity": lambda: items.resize(24 + 8 * worker),
        "zero": lambda: items.resize(0),
        "no integer": lambda: items.resize(2.5),
        "in a function": tf.function(lambda: items.resize(24).num_kept),
        "no memory for keys": lambda: without_memory(
            1, ProcessShardedTable, "empty_array"
        ),
        "no memory for tables": lambda: without_memory(
            1, ProcessStore, "create"
        ),
        "no memory for rows": lambda: without_memory(1, resizing, "known_size"),
        "no memory for an engine": lambda: without_memory(
            0, ProcessShardedBackend, "_make_engine"
        ),
        "step in flight": with_step_in_flight,
    }
    found = {}
    before = contents(embedding)
    for name, call in calls.items():
        found[name] = error_of(call)
        if name != "step in flight":  # This step has admitted keys.
            for variable, value in contents(embedding).items():
                np.testing.assert_array_equal(
                    value, before[variable], err_msg=f"{name}: {variable}"
                )
    embedding.reset()
    return found


def outdated_calls(embedding, strategy, worker, step):
    """Resizes a vocabulary, and returns errors of older objects."""
    items, prices = (embedding.vocabularies[one] for one in ("items", "prices"))
    rows = table_of(embedding, "items")
    names = table_of(embedding, "names")
    reader = tf.function(lambda: strategy.run(lambda: rows.sparse_read([1, 2])))
    before = names.sparse_read([3]).numpy()
    reader()
    keys = items.keys()
    items.resize(CAPACITY)
    calls = {
        "step": lambda: step(*plan.batch(1, worker)),
        "step again": lambda: step(*plan.batch(1, worker)),
        "rows": rows.numpy,
        "blocks": lambda: list(rows.blocks()),
        "sparse_read": lambda: rows.sparse_read([1]),
        "sparse_read in a function": reader,
    }
    found = {name: error_of(call) for name, call in calls.items()}
    # Tables that were not resized, and all vocabularies, are still valid.
    np.testing.assert_array_equal(names.sparse_read([3]).numpy(), before)
    for one in (items, prices):
        assert one.settings.capacity == CAPACITY
        np.testing.assert_array_equal(np.sort(one.keys()), np.sort(keys))
    new_rows = table_of(embedding, "items")
    places = items.lookup(StoredKeys(keys))
    np.testing.assert_array_equal(
        new_rows.sparse_read(places).numpy(), new_rows.numpy()[places]
    )
    return found


def main(folder):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    ProcessStore.values_per_read = 3 * ROWS_AT_ONCE
    with strategy.scope():
        embedding = plan.embedding(over_processes="sharded")
    embedding.build()
    save = checkpoints.restored(embedding, folder, worker)
    step = plan.train_step(embedding, strategy)
    for number in range(3):
        step(*plan.batch(number, worker))
    found = failed_calls(embedding, strategy, worker)
    # After failed calls, the traced step and the old engine still work.
    step(*plan.batch(3, worker))
    save("base")
    writer = tlm.deltas.DeltaWriter(
        embedding, folder / "old deltas", base=str(folder / "base")
    )
    found |= outdated_calls(embedding, strategy, worker, step)
    found["delta"] = error_of(writer.write)
    step = plan.train_step(embedding, strategy)
    for number in range(4, 6):
        step(*plan.batch(number, worker))
    save("new base")
    writer = tlm.deltas.DeltaWriter(
        embedding, folder / "deltas", base=str(folder / "new base")
    )
    step(*plan.batch(6, worker))
    writer.write()
    saved = tf.train.Checkpoint(embedding=embedding)
    saved.write(
        checkpoints.path_of(folder, "asynchronous", worker),
        tf.train.CheckpointOptions(enable_async=True),
    )
    saved.sync()
    save("end")
    tlm.export(embedding, str(folder / "exported"))
    np.savez(folder / f"{worker}.npz", **contents(embedding))
    (folder / f"{worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
