"""One process of a MultiWorkerMirroredStrategy with open vocabularies.

    python open_tables_program.py OUTPUT NUM_STEPS HOW

Trains `embedding()` and writes its variables to OUTPUT.npz. HOW is "in order"
for the calls of a TPUEmbedding, "by token" for the calls of a layer, or
"packed" for packed batches. With other values of HOW, the program fails and
writes the error to OUTPUT.txt: "mixed" enqueues a training step in the first
process and a forward-only step in the other, "write one" writes a row in the
first process only, "keep strings" creates a vocabulary that keeps strings,
"evict other" and "resize other" pass other arguments in each process, "resize
in flight" resizes a table when a step is in flight in the second process,
"evict in a function" evicts a key in a `tf.function`, and "failing evict" and
"failing resize" evict keys with an `on_evict` that raises an error.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes
from tests.embedding.host import open_table_cases as cases
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

tpu = tf.tpu.experimental.embedding

NUM_WORKERS = 2

# Values of HOW whose first call fails.
FAILING = (
    "mixed",
    "write one",
    "keep strings",
    "evict other",
    "resize other",
    "resize in flight",
    "evict in a function",
)


def table_configs():
    """Returns the configs of three tables.

    One table counts integer keys, one has string keys, and one has another dim
    and the vocabulary of the first table.
    """
    first = tf.random_uniform_initializer(-1.0, 1.0)
    return (
        tpu.TableConfig(80, 3, first, tpu.Adagrad(0.1), "mean", name="items"),
        tpu.TableConfig(40, 2, first, tpu.SGD(0.5), "sum", name="names"),
        tpu.TableConfig(80, 1, first, tpu.SGD(0.25), "sum", name="prices"),
    )


def table_options(on_evict):
    """Returns arguments of `TPUEmbedding` for the tables of `table_configs`.

    Args:
      on_evict: Function for the evicted keys of the table "names", or None.
    """
    return {
        "table_dtypes": {"names": "bfloat16"},
        "rounding_seed": 3,
        "vocabularies": {
            "items": tlm.vocabulary.OpenVocabulary(
                80,
                admission="count",
                min_count=2,
                evict="lfu",
                half_life_steps=2,
            ),
            "names": tlm.vocabulary.OpenVocabulary(
                40, oov_embedding="trainable", on_evict=on_evict
            ),
            "prices": "items",
        },
    }


def embedding(on_evict=None, **options):
    """Returns an embedding with the tables of `table_configs`."""
    items, names, prices = table_configs()
    return tlm.TPUEmbedding(
        {
            "shown": tpu.FeatureConfig(items),
            "history": tpu.FeatureConfig(items, max_sequence_length=2),
            "name": tpu.FeatureConfig(names),
            "price": tpu.FeatureConfig(prices),
        },
        None,
        **table_options(on_evict),
        **options,
    )


def batch(step, replica):
    """Returns inputs and gradients of one replica."""
    rng = np.random.default_rng([step, replica])
    num_samples = 6 + (step + replica) % 3

    def ragged(most):
        sizes = rng.integers(0, 5, num_samples)
        keys = rng.integers(0, most, sizes.sum()) * 1009 - 5 + 100 * step
        return tf.RaggedTensor.from_row_lengths(tf.constant(keys), sizes)

    names = ragged(40)
    features = {
        "shown": ragged(60),
        "history": ragged(60),
        "name": names.with_values(tf.strings.as_string(names.values)),
        "price": ragged(90),
    }
    return features, {
        name: tf.constant(rng.normal(size=shape), tf.float32)
        for name, shape in {
            "shown": [num_samples, 3],
            "history": [num_samples, 2, 3],
            "name": [num_samples, 2],
            "price": [num_samples, 1],
        }.items()
    }


def train_step(tpu_embedding, strategy, how="in order"):
    """Returns a step function that is traced once for all batch sizes."""

    def in_order(features, gradients):
        tpu_embedding.enqueue(features)
        activations = tpu_embedding.dequeue()
        tpu_embedding.apply_gradients(gradients)
        # This forward-only step looks up keys and must not change any variable.
        tpu_embedding.enqueue(features, training=False)
        tpu_embedding.dequeue()
        return activations

    def by_token(features, gradients):
        backend = tpu_embedding._state.backend
        lookup, activations = backend.open(features, None)
        backend.apply_followed(
            backend.follow(lookup, tf.nest.flatten(gradients))
        )
        return tf.nest.pack_sequence_as(features, activations)

    def packed(features, gradients):
        return in_order(tlm.pack(features), gradients)

    replica_step = {
        "in order": in_order,
        "by token": by_token,
        "packed": packed,
    }[how]
    return tf.function(
        lambda *args: strategy.run(replica_step, args), reduce_retracing=True
    )


def write(tpu_embedding, number):
    """Writes rows of both tables."""
    rng = np.random.default_rng(number)
    keys = np.unique(rng.integers(0, 60, 30) * 1009 - 5 + 100 * number)
    tpu_embedding.vocabularies["items"].write(
        keys, rng.normal(size=[len(keys), 3])
    )
    tpu_embedding.vocabularies["prices"].write(
        keys[::2] + 1, rng.normal(size=[len(keys[::2]), 1])
    )
    tpu_embedding.vocabularies["names"].write(
        [str(key) for key in keys[:5]], rng.normal(size=[5, 2])
    )


def sample(tpu_embedding, strategy):
    """Returns counts and samples of keys of this process."""

    @tf.function
    def in_replica():
        items = tpu_embedding.vocabularies["items"]
        same = tlm.ops.sample_keys(items, 20, seed=[1, 2])
        other = tlm.ops.sample_keys(items, 20, seed=3)
        return items.counts(same.ids()), same.keys, other.keys

    names = ("counts", "same_keys", "other_keys")
    found = strategy.run(in_replica)
    return {
        f"sampled/{name}": strategy.experimental_local_results(one)[0].numpy()
        for name, one in zip(names, found)
    }


def contents(tpu_embedding):
    """Returns all variables of all tables, by name."""
    return {
        f"{table}/{name}": tf.cast(
            tf.convert_to_tensor(variable),
            tf.float64 if variable.dtype.is_floating else tf.int64,
        ).numpy()
        for table, by_name in tpu_embedding._variables.items()
        for name, variable in by_name.items()
    }


def fail(tpu_embedding, strategy, how, worker):
    """Returns the error of a call that only one process makes."""
    features, _ = batch(0, worker)

    @tf.function
    def enqueue():
        strategy.run(
            lambda: tpu_embedding.enqueue(
                features, training=worker == 0 or how != "mixed"
            )
        )

    try:
        if how == "keep strings":
            with strategy.scope():
                cases.embedding(
                    tlm.vocabulary.OpenVocabulary(8, keep_strings=True),
                    tpu.SGD(0.1),
                )
        items = tpu_embedding.vocabularies["items"]
        if how == "evict other":
            items.evict([1, worker])
        elif how == "resize other":
            items.resize(24 + 8 * worker)
        elif how == "evict in a function":
            tf.function(lambda: items.evict([1]))()
        elif how == "resize in flight":
            enqueue()
            if worker == 0:
                tpu_embedding.reset()
            items.resize(24)
        else:
            if how == "write one" and worker == 0:
                tpu_embedding.vocabularies["items"].write([1])
            enqueue()
    except (
        RuntimeError,
        ValueError,
        tf.errors.InvalidArgumentError,
    ) as error:
        return str(error)
    return "nothing"


class OnEvict:
    """An `on_evict` that can raise errors.

    Attributes:
      keys: All keys that were evicted.
      fails: Whether calls raise errors.
    """

    def __init__(self):
        self.keys = [0]
        self.fails = False

    def __call__(self, evicted):
        if self.fails:
            raise OSError("disk full")
        self.keys.extend(evicted.keys)


def fail_on_evict(tpu_embedding, on_evict, how, step):
    """Returns the error of `on_evict`, after which a further call succeeds."""
    for number in range(3):
        step(number)
    names = tpu_embedding.vocabularies["names"]
    calls = {
        "failing evict": lambda: names.evict(StoredKeys(names.keys()[::2])),
        "failing resize": lambda: names.resize(16),
    }
    before, on_evict.fails = contents(tpu_embedding), True
    found = "no error"
    try:
        calls[how]()
    except (OSError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
    after, on_evict.fails = contents(tpu_embedding), False
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    step(3)
    calls[how]()
    return found


def main(output, num_steps, how):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    on_evict = OnEvict()
    with strategy.scope():
        tpu_embedding = embedding(on_evict)
    if how.startswith("failing"):
        tpu_embedding.build()
        step = train_step(tpu_embedding, strategy)
        pathlib.Path(f"{output}.txt").write_text(
            fail_on_evict(
                tpu_embedding,
                on_evict,
                how,
                lambda number: step(*batch(number, worker)),
            )
        )
    elif how in FAILING:
        pathlib.Path(f"{output}.txt").write_text(
            fail(tpu_embedding, strategy, how, worker)
        )
    if how.startswith("failing") or how in FAILING:
        output = pathlib.Path(output)
        processes.stay_until_written(output.parent, "[01].txt")
        return
    tpu_embedding.build()
    step = train_step(tpu_embedding, strategy, how)
    for number in range(int(num_steps)):
        activations = step(*batch(number, worker))
    np.savez(
        output,
        evicted_keys=on_evict.keys,
        **contents(tpu_embedding),
        **{
            f"activation/{name}": one.numpy()
            for name, one in activations.items()
        },
        **sample(tpu_embedding, strategy),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
