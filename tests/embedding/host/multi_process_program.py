"""One process of a MultiWorkerMirroredStrategy, for test_multi_process.py.

    python multi_process_program.py OUTPUT NUM_STEPS HOW [DIES_BEFORE]

Trains `embedding()` and writes the tables to OUTPUT.npz. HOW is "in order" for
the calls of a TPUEmbedding, or "by token" for the calls of a layer. The last
process exits without cleanup before step DIES_BEFORE.
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

NUM_WORKERS = 2


def embedding(users_dtype="bfloat16", **options):
    """Returns tables of several optimizers; the table `random` has no seed."""

    def rows(shape):
        size = shape[0] * shape[1]
        return tf.reshape(tf.range(size, dtype=tf.float32) / 7, shape)

    words = tpu.TableConfig(20, 5, rows, tpu.Adagrad(0.1), "mean", name="words")
    users = tpu.TableConfig(
        9, 3, rows, tlm.optimizers.LAMB(0.05), "sum", name="users"
    )
    random = tpu.TableConfig(4, 2, None, tpu.SGD(0.5), name="random")
    return tlm.TPUEmbedding(
        {
            "title": tpu.FeatureConfig(words),
            "body": tpu.FeatureConfig(words),
            "history": tpu.FeatureConfig(words, max_sequence_length=2),
            "user": tpu.FeatureConfig(users),
            "random": tpu.FeatureConfig(random),
        },
        None,
        table_dtypes={"users": users_dtype},
        rounding_seed=3,
        **options,
    )


def batch(step, replica):
    """Returns inputs, weights and gradients of one replica."""
    rng = np.random.default_rng([step, replica])
    num_samples = 3 + (step + replica) % 2

    def ragged(num_rows):
        sizes = rng.integers(0, 4, num_samples)
        return tf.RaggedTensor.from_row_lengths(
            tf.constant(rng.integers(0, num_rows, sizes.sum())), sizes
        )

    body = ragged(20)
    weights = body.with_values(
        tf.constant(rng.integers(1, 4, body.values.shape[0]), tf.float32)
    )
    features = {
        "title": ragged(20),
        "body": body.to_sparse(),
        "history": ragged(20),
        "user": tf.constant(rng.integers(0, 9, num_samples)),
        "random": tf.constant(rng.integers(0, 4, num_samples)),
    }
    gradients = {
        name: tf.constant(rng.normal(size=shape), tf.float32)
        for name, shape in {
            "title": [num_samples, 5],
            "body": [num_samples, 5],
            "history": [num_samples, 2, 5],
            "user": [num_samples, 3],
            "random": [num_samples, 2],
        }.items()
    }
    return features, weights.to_sparse(), gradients


def train_step(embedding, strategy, how="in order"):
    """Returns a step function that is traced once for all batch sizes."""

    def in_order(features, weights, gradients):
        embedding.enqueue(features, weights)
        activations = embedding.dequeue()
        embedding.apply_gradients(gradients)
        return activations

    def by_token(features, weights, gradients):
        backend = embedding._state.backend
        lookup, activations = backend.open(features, weights)
        # This lookup receives no gradients.
        backend.open(features, weights)
        backend.apply_followed(
            backend.follow(lookup, tf.nest.flatten(gradients))
        )
        return tf.nest.pack_sequence_as(features, activations)

    def replica_step(features, weights, gradients):
        weights = {
            name: weights if name == "body" else None for name in features
        }
        step = {"in order": in_order, "by token": by_token}[how]
        return step(features, weights, gradients)

    return tf.function(
        lambda *args: strategy.run(replica_step, args), reduce_retracing=True
    )


def tables(embedding):
    found = {
        one.name: tf.cast(rows, tf.float32).numpy()
        for one, rows in embedding.embedding_tables.items()
    }
    for one, slots in embedding.slot_variables.items():
        for name, slot in slots.items():
            found[f"{one.name}/{name}"] = slot.numpy()
    return found


def train_replicas(embedding, strategy, num_steps):
    """Trains in one process; returns tables and each replica's activations."""
    step = train_step(embedding, strategy)
    num_replicas = strategy.num_replicas_in_sync
    for number in range(num_steps):
        by_replica = [batch(number, replica) for replica in range(num_replicas)]
        activations = step(
            *(
                tf.nest.map_structure(
                    lambda *parts: (
                        strategy.experimental_distribute_values_from_function(
                            lambda context: parts[
                                context.replica_id_in_sync_group
                            ]
                        )
                    ),
                    *[one[part] for one in by_replica],
                )
                for part in range(3)
            )
        )
    return tables(embedding), [
        {
            name: strategy.experimental_local_results(one)[replica].numpy()
            for name, one in activations.items()
        }
        for replica in range(num_replicas)
    ]


def main(output, num_steps, how, dies_before=None):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        trained = embedding()
    step = train_step(trained, strategy, how)
    start = tables(trained)["random"]
    for number in range(int(num_steps)):
        if dies_before and int(dies_before) == number:
            if worker == NUM_WORKERS - 1:
                os._exit(1)
            print("alone", flush=True)
        activations = step(*batch(number, worker))
    np.savez(
        output,
        start=start,
        **tables(trained),
        **{
            f"activation/{name}": one.numpy()
            for name, one in activations.items()
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
