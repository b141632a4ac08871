"""One process of a group with open vocabularies in sharded tables.

    python keys_program.py FOLDER NUM_STEPS HOW [ORDER]

Trains `open_tables_program.embedding()` with sharded tables. HOW has the same
meaning as in `open_tables_program`; "evict" evicts keys between the steps, and
"resize" also changes the capacities. With "by token" in HOW, a step consists of
the calls of a layer.
Writes to FOLDER the checkpoints `start` and `end` of process 0, and the
activations, evicted keys and reads of this process. Continues from the
checkpoint `restart` if it exists. With HOW "full", a step fails because a
vocabulary is full, and with HOW "failing evict", "failing resize" and "failing
step" because `on_evict` raises an error; FOLDER then contains the errors. With
HOW "refused", FOLDER contains the errors of unsupported calls. With HOW
"sampled", FOLDER contains lookups, counts and samples of keys.
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
from tests.embedding.host import open_tables_program as plan
from tests.embedding.process_sharded import checkpoints
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


def evict(embedding, number):
    """Evicts keys after some steps, and returns the evicted keys."""
    items, names = (embedding.vocabularies[one] for one in ("items", "names"))
    if number == 3:
        keys = items.keys().numpy()
        return items.evict([*keys[::3], 10**9, *keys[:2]]).numpy()
    if number == 5:
        gone = names.evict(StoredKeys(names.keys()[:7])).numpy()
        assert not len(names.evict_expired())
        return gone
    return np.zeros([0], np.int64)


# Capacities of both vocabularies, by the number of the next step. A vocabulary
# with a small capacity is in one process only.
CAPACITIES = {3: (24, 16), 5: (600, 90)}


def resize(embedding, number):
    """Changes the capacities before some steps.

    Returns:
      Contents and numbers of keys after the change, or an empty dict.
    """
    found = {}
    for table, capacity in zip(("items", "names"), CAPACITIES.get(number, ())):
        vocabulary = embedding.vocabularies[table]
        conversion = vocabulary.resize(capacity)
        keys = vocabulary.keys()
        assert len(keys) == conversion.num_kept
        found[f"conversion {number}/{table}"] = np.array(
            [conversion.num_kept, conversion.num_dropped]
        )
        found[f"rows {number}/{table}"] = vocabulary.lookup(
            StoredKeys(keys)
        ).numpy()
        # The object of the vocabulary can be used after its resize.
        found[f"evicted {number}/{table}"] = vocabulary.evict(
            StoredKeys(keys[:2])
        ).numpy()
    if found:
        for name, value in contents(embedding).items():
            found[f"contents {number}/{name}"] = value
    return found


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
                if key not in ("hit_rate", "key_type")
            ],
            np.float64,
        )
    return found


def train(embedding, strategy, step, num_steps, how, batches, on_evict):
    """Runs all steps, and returns activations, evicted keys and reads."""
    evicted = [np.zeros([0], np.int64)]
    activations = {}
    resized = {}
    for number in range(num_steps):
        if how == "write":
            plan.write(embedding, number)
        if "evict" in how:
            evicted.append(evict(embedding, number))
        if how == "resize" and number in CAPACITIES:
            resized.update(resize(embedding, number))
            # Functions that were traced before the resize raise errors.
            step = plan.train_step(embedding, strategy)
        activations = step(*batches(number))
    return activations, {
        "evicted": np.concatenate(evicted),
        "on_evict": np.array(on_evict.keys),
        **resized,
        **reads(embedding),
    }


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
            "few": tlm.vocabulary.OpenVocabulary(
                64, evict="none", on_full="error"
            ),
            "many": tlm.vocabulary.OpenVocabulary(64, evict="lru"),
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


def read_keys(items, worker):
    """Returns lookups, counts and samples, which differ between processes."""
    keys = tf.constant(1009 * np.arange(20 + worker)[:, None] - [5, -95])
    found = {"rows": items.lookup(keys), "counts": items.counts(keys)}
    for number, distribution in enumerate(("count", "uniform")):
        sampled = tlm.ops.sample_keys(
            items, 9 + worker, distribution=distribution, seed=[worker, number]
        )
        found |= {
            f"{distribution}/{name}": value
            for name, value in sampled._asdict().items()
        }
    return found


def sample(strategy, folder, worker):
    """Writes reads of keys, outside of functions and in a training step."""
    with strategy.scope():
        embedding = plan.embedding(over_processes="sharded")
    embedding.build()
    step = plan.train_step(embedding, strategy)
    for number in range(3):
        step(*plan.batch(number, worker))
    checkpoints.restored(embedding, folder, worker)("end")
    items = embedding.vocabularies["items"]

    @tf.function
    def in_replica():
        return strategy.run(lambda: read_keys(items, worker))

    for name, found in (
        ("eager", read_keys(items, worker)),
        ("in a replica", in_replica()),
    ):
        np.savez(
            folder / f"{name} {worker}.npz",
            **{key: value.numpy() for key, value in found.items()},
        )


def refuse(strategy, worker):
    """Returns the errors of unsupported calls, in JSON."""
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
                    "words": tlm.vocabulary.OpenVocabulary(8, keep_strings=True)
                },
                over_processes="sharded",
            )

    calls = {
        "lookup in a function": tf.function(lambda: items.lookup([1])),
        "keys in a function": tf.function(lambda: items.keys()),
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


def main(folder, num_steps, how, order="exact"):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    calls = {
        "full": lambda: fail_when_full(strategy, worker, how),
        "failing evict": lambda: fail_on_evict(strategy, worker, how),
        "failing resize": lambda: fail_on_evict(strategy, worker, how),
        "failing step": lambda: fail_on_evict(strategy, worker, how),
        "refused": lambda: refuse(strategy, worker),
    }
    if how == "sampled":
        sample(strategy, folder, worker)
        return
    call = calls.get(how.removesuffix(" by token"))
    if call is not None:
        (folder / f"{worker}.txt").write_text(call())
        processes.stay_until_written(folder, "[01].txt")
        return
    on_evict = plan.OnEvict()
    with strategy.scope():
        embedding = plan.embedding(
            on_evict, over_processes="sharded", gradient_aggregation=order
        )
    embedding.build()
    save = checkpoints.restored(embedding, folder, worker)
    save("start")
    step = plan.train_step(embedding, strategy, calls_of(how))
    activations, found = train(
        embedding,
        strategy,
        step,
        int(num_steps),
        how,
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
