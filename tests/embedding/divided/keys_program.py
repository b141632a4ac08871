"""One process of a group with open vocabularies in sharded tables.

    python keys_program.py FOLDER NUM_STEPS train
    python keys_program.py FOLDER NUM_STEPS CALL...

With "train", the program trains `open_tables_program.embedding()` with sharded
tables. Writes to FOLDER the checkpoints `start` and `end` of process 0, and the
activations, evicted keys and reads of this process. Continues from the
checkpoint `restart` if it exists. Otherwise, the program makes calls of
`FAILING`, and writes their errors to FOLDER.
"""

import json
import os
import pathlib
import sys
import tempfile

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes
from tests.embedding.divided import checkpoints
from tests.embedding.host import open_tables_program as plan
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

tpu = tf.tpu.experimental.embedding


def contents(embedding):
    """Returns all variables of all tables, by name."""
    return {
        f"{table}/{name}": np.asarray(
            variable.numpy(),
            np.float64 if variable.dtype.is_floating else np.int64,
        )
        for table, by_name in embedding._variables.items()
        for name, variable in by_name.items()
    }


def reads(embedding):
    """Returns what a program can read from the vocabularies."""
    items = embedding.vocabularies["items"]
    keys = items.keys().numpy()
    blocks = list(items.blocks(16))
    with tempfile.TemporaryDirectory() as folder:
        num_exported = items.export(folder + "/items", block_size=16)
    found = {
        "exported": np.array(num_exported),
        "keys": keys,
        "lookup": items.lookup([*keys[::2], 10**9, keys[0]]).numpy(),
        "contains": items.contains([[keys[0]], [10**9]]).numpy(),
        "block/keys": np.concatenate([one.keys for one in blocks]),
        "block/rows": np.concatenate([one.rows for one in blocks]),
        "block/counts": np.concatenate([one.counts for one in blocks]),
        "block/last_steps": np.concatenate([one.last_steps for one in blocks]),
        "block/slots": np.concatenate(
            [one.slots["accumulators"] for one in blocks]
        ),
    }
    for name, vocabulary in embedding.vocabularies.items():
        found[f"stats/{name}"] = np.array(
            [
                value
                for key, value in vocabulary.stats().items()
                if key not in ("share_known", "keys_are")
            ],
            np.float64,
        )
    return found


def calls_of(how):
    """Returns the argument `how` of `plan.train_step`."""
    return "by token" if "by token" in how else "in order"


def full_table(**options):
    """Returns two open tables, one of which must not become full."""
    tables = [
        tpu.TableConfig(
            capacity, 2, tf.constant_initializer(1.0), name=name, combiner="sum"
        )
        for name, capacity in (("few", 64), ("many", 64))
    ]
    return tlm.TPUEmbedding(
        {one.name: tpu.FeatureConfig(one, name=one.name) for one in tables},
        tpu.SGD(0.5),
        vocabularies={
            "few": tlm.OpenVocabulary(64, evict="none", on_full="error"),
            "many": tlm.OpenVocabulary(64, evict="lru"),
        },
        **options,
    )


def error_of(call):
    """Returns the class and the message of the error of a call."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail_when_full(strategy, worker, how):
    """Returns the error of a step for which a vocabulary has too few rows."""
    with strategy.scope():
        embedding = full_table(over_processes="sharded")
    embedding.build()

    @tf.function(reduce_retracing=True)
    def step(few, many):
        features = {"few": few, "many": many}

        def in_replica():
            if "by token" in how:
                backend = embedding._state.backend
                lookup, found = backend.open(features, None)
                backend.apply_followed(
                    backend.follow(lookup, [tf.ones_like(one) for one in found])
                )
                return
            embedding.enqueue(features)
            found = embedding.dequeue()
            embedding.apply_gradients(
                tf.nest.map_structure(tf.ones_like, found)
            )

        strategy.run(in_replica)

    def run(first, size):
        keys = tf.range(first, first + size, dtype=tf.int64) * 1009 + worker
        step(keys, keys)

    run(0, 4)
    before = contents(embedding)
    found = error_of(lambda: run(0, 400))
    after = contents(embedding)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    embedding.reset()
    run(2, 4)
    return found


def fail_on_evict(strategy, worker, how):
    """Returns the error of a call during which `on_evict` raises an error."""
    on_evict = plan.OnEvict()
    with strategy.scope():
        embedding = plan.embedding(on_evict, over_processes="sharded")
    embedding.build()
    step = plan.train_step(embedding, strategy, calls_of(how))
    for number in range(3):
        step(*plan.batch(number, worker))
    names = embedding.vocabularies["names"]
    calls = {
        "failing evict": lambda: names.evict(StoredKeys(names.keys()[::2])),
        "failing resize": lambda: names.resize(16),
        "failing step": lambda: [
            step(*plan.batch(number, worker)) for number in range(3, 9)
        ],
    }
    call = calls[how.removesuffix(" by token")]
    before, on_evict.fails = contents(embedding), True
    found = error_of(call)
    after, on_evict.fails = contents(embedding), False
    if "failing step" not in how:
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)
    embedding.reset()
    step(*plan.batch(3, worker))
    call()
    return found


def refuse(strategy, worker, how):
    """Returns the errors of unsupported calls, in JSON."""
    del how
    with strategy.scope():
        embedding = plan.embedding(over_processes="sharded")
    embedding.build()
    items = embedding.vocabularies["items"]

    def keep_strings():
        with strategy.scope():
            tlm.TPUEmbedding(
                tpu.FeatureConfig(tpu.TableConfig(8, 2, name="words")),
                tpu.SGD(0.1),
                vocabularies={
                    "words": tlm.OpenVocabulary(8, keep_strings=True)
                },
                over_processes="sharded",
            )

    calls = {
        "lookup in a function": tf.function(lambda: items.lookup([1])),
        "keys in a function": tf.function(lambda: items.keys()),
        "sample": lambda: tlm.ops.sample_keys(items, 4, seed=1),
        "evict other": lambda: items.evict([worker]),
        "write other": lambda: items.write([worker]),
        "keep strings": keep_strings,
        "integers": lambda: embedding.vocabularies["names"].write([1]),
    }
    found = {}
    for name, call in calls.items():
        if name == "integers":
            embedding.vocabularies["names"].write(["a"])
        found[name] = error_of(call).replace("\n", " ")
    return json.dumps(found)


def train(embedding, step, num_steps, batches, on_evict):
    """Runs all steps, and returns activations, evicted keys and reads."""
    activations = {}
    for number in range(num_steps):
        activations = step(*batches(number))
    return activations, {
        "on_evict": np.array(on_evict.keys),
        **reads(embedding),
    }


def flush_in_one(strategy, worker, how):
    """Returns the error of a step after only process 0 has called `flush`."""
    del how
    with strategy.scope():
        embedding = plan.embedding(
            over_processes="sharded", pipeline_execution_with_tensor_core=True
        )
    embedding.build()
    step = plan.train_step(embedding, strategy)
    step(*plan.batch(0, worker))
    if worker == 0:
        embedding.flush()
    before = contents(embedding)
    error = error_of(lambda: step(*plan.batch(1, worker)))
    after = contents(embedding)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    embedding.flush()
    step(*plan.batch(2, worker))
    return error


# Functions that return the error of a call, by the name of the call.
FAILING = {
    "refused": refuse,
    "full": fail_when_full,
    "full by token": fail_when_full,
    "failing evict": fail_on_evict,
    "failing resize": fail_on_evict,
    "failing step": fail_on_evict,
    "failing step by token": fail_on_evict,
    "flush in one": flush_in_one,
}


def main(folder, num_steps, *calls):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    for how in calls:
        if how in FAILING:
            print(how, flush=True)
            error = FAILING[how](strategy, worker, how)
            (folder / f"{how} {worker}.txt").write_text(error)
            processes.stay_until_written(folder, f"{how} [01].txt")
    if calls != ("train",):
        return
    on_evict = plan.OnEvict()
    with strategy.scope():
        embedding = plan.embedding(on_evict, over_processes="sharded")
    embedding.build()
    save = checkpoints.restored(embedding, folder, worker)
    save("start")
    activations, found = train(
        embedding,
        plan.train_step(embedding, strategy),
        int(num_steps),
        lambda number: plan.batch(number, worker),
        on_evict,
    )
    save("end")
    np.savez(
        folder / f"{worker}.npz",
        **found,
        **contents(embedding),
        **{
            f"activation/{name}": one.numpy()
            for name, one in activations.items()
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
