"""One process of a MultiWorkerMirroredStrategy with open vocabularies.

    python open_tables_program.py OUTPUT NUM_STEPS HOW

Trains `embedding()` and writes its variables to OUTPUT.npz. HOW is "in order"
for the calls of a TPUEmbedding, or "by token" for the calls of a layer. "write"
also writes rows by key and exports them. With other values of HOW, the program
fails and writes the error to OUTPUT.txt: "mixed" enqueues a training step in
the first process and a forward-only step in the other, "evict" evicts a key,
"write one" writes a row in the first process only, "layer" creates a layer with
an open vocabulary, and "keep strings" creates a vocabulary that keeps strings.
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

tpu = tf.tpu.experimental.embedding

NUM_WORKERS = 2


def embedding(on_evict=None):
    """Returns three open tables.

    One table counts integer keys, one has string keys, and one has another dim
    and the vocabulary of the first table.
    """
    first = tf.random_uniform_initializer(-1.0, 1.0)
    items = tpu.TableConfig(
        80, 3, first, tpu.Adagrad(0.1), "mean", name="items"
    )
    names = tpu.TableConfig(40, 2, first, tpu.SGD(0.5), "sum", name="names")
    prices = tpu.TableConfig(80, 1, first, tpu.SGD(0.25), "sum", name="prices")
    return tlm.TPUEmbedding(
        {
            "shown": tpu.FeatureConfig(items),
            "history": tpu.FeatureConfig(items, max_sequence_length=2),
            "name": tpu.FeatureConfig(names),
            "price": tpu.FeatureConfig(prices),
        },
        None,
        table_dtypes={"names": "bfloat16"},
        rounding_seed=3,
        vocabularies={
            "items": tlm.OpenVocabulary(
                80,
                admission="count",
                min_count=2,
                evict="lfu",
                half_life_steps=2,
            ),
            "names": tlm.OpenVocabulary(40, unknown="row", on_evict=on_evict),
            "prices": "items",
        },
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
    try:
        if how == "evict":
            tpu_embedding.vocabularies["items"].evict([1])
        elif how == "layer":
            with strategy.scope():
                tlm.layers.ShardedEmbedding(
                    tlm.OpenVocabulary(8), 2, optimizer="adagrad", name="one"
                )
        elif how == "keep strings":
            with strategy.scope():
                cases.embedding(
                    tlm.OpenVocabulary(8, keep_strings=True), tpu.SGD(0.1)
                )
        else:
            if how == "write one" and worker == 0:
                tpu_embedding.vocabularies["items"].write([1])
            features, _ = batch(0, worker)
            tf.function(
                lambda: strategy.run(
                    lambda: tpu_embedding.enqueue(
                        features, training=worker == 0 or how != "mixed"
                    )
                )
            )()
    except (NotImplementedError, tf.errors.InvalidArgumentError) as error:
        return str(error)
    return "nothing"


def main(output, num_steps, how):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    evicted = []
    with strategy.scope():
        tpu_embedding = embedding(evicted.append)
    if how in ("mixed", "evict", "layer", "write one", "keep strings"):
        pathlib.Path(f"{output}.txt").write_text(
            fail(tpu_embedding, strategy, how, worker)
        )
        output = pathlib.Path(output)
        processes.stay_until_written(output.parent, "[01].txt")
        return
    writes = how == "write"
    tpu_embedding.build()
    step = train_step(tpu_embedding, strategy, "in order" if writes else how)
    for number in range(int(num_steps)):
        if writes:
            write(tpu_embedding, number)
        activations = step(*batch(number, worker))
    if writes:
        # The folder is written by the first process only.
        tpu_embedding.vocabularies["items"].export(
            pathlib.Path(output).parent / f"items {worker}"
        )
    np.savez(
        output,
        evicted_keys=np.concatenate([[0], *(one.keys for one in evicted)]),
        **contents(tpu_embedding),
        **{
            f"activation/{name}": one.numpy()
            for name, one in activations.items()
        },
        **sample(tpu_embedding, strategy),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
