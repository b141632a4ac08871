"""One process of a group that writes deltas together.

    python deltas_program.py FOLDER HOW

Trains `embedding()`, which is "sharded" or "replicated" over the processes, and
writes deltas to FOLDER/deltas, based on FOLDER/base. One write fails in one
process. Writes the checkpoint FOLDER/end and the errors of the failed write.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.process_sharded import checkpoints
from tf_layoutmap.deltas import parts

tpu = tf.tpu.experimental.embedding


def embedding(**options):
    """Returns tables of all dtypes; one table has fewer rows than processes."""

    def rows(shape):
        size = shape[0] * shape[1]
        return tf.reshape(tf.range(size, dtype=tf.float32) / 8, shape)

    words = tpu.TableConfig(19, 3, rows, tpu.Adagrad(0.1), "sum", name="words")
    users = tpu.TableConfig(9, 2, rows, tpu.SGD(0.5), "sum", name="users")
    items = tpu.TableConfig(9, 2, rows, tpu.Adam(0.5), "sum", name="items")
    one = tpu.TableConfig(1, 2, rows, tpu.Adagrad(0.5), name="one")
    return tlm.TPUEmbedding(
        {
            "word": tpu.FeatureConfig(words),
            "user": tpu.FeatureConfig(users),
            "item": tpu.FeatureConfig(items),
            "one": tpu.FeatureConfig(one),
        },
        None,
        table_dtypes={"users": "bfloat16", "items": "float16"},
        rounding_seed=3,
        **options,
    )


def batch(step, replica):
    """Returns inputs and gradients of one replica."""
    rng = np.random.default_rng([step, replica])
    features = {
        name: tf.constant(rng.integers(0, num_rows, 2))
        for name, num_rows in {"word": 19, "user": 9, "item": 9}.items()
    } | {"one": tf.constant([0, 0])}
    return features, {
        name: tf.constant(rng.normal(size=[2, dim]), tf.float32)
        for name, dim in {"word": 3, "user": 2, "item": 2, "one": 2}.items()
    }


def train_step(one, strategy):
    """Returns a step function."""

    def in_replica(features, gradients):
        one.enqueue(features)
        one.dequeue()
        one.apply_gradients(gradients)

    return tf.function(lambda *args: strategy.run(in_replica, args))


def write_deltas(one, step, base, directory, failing_write=None):
    """Trains 7 steps and writes 4 deltas.

    Args:
      one: The embedding.
      step: Function that runs a step; its argument is the number of the step.
      base: Prefix of the base, which was saved before step 0.
      directory: Directory of the deltas.
      failing_write: Function that tries to write a delta with a writer.
    """
    writer = tlm.deltas.DeltaWriter(one, directory, base=base)
    step(0)
    writer.write()
    step(1)
    if failing_write is not None:
        failing_write(writer)
    step(2)
    writer.write(wait=False)
    step(3)
    assert writer.finish().meta.sequence == 2
    step(4)
    # A new writer compares all rows with the base and the deltas.
    writer = tlm.deltas.DeltaWriter(one, directory, base=base)
    step(5)
    writer.write()
    assert writer.write().meta.tables["words"]["num_rows"] == 0


class Model(tf.Module):
    """A model with a weight and with statistics of each replica."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.kernel = tf.Variable(
            tf.ones([2]), aggregation=tf.VariableAggregation.MEAN
        )
        self.mean = tf.Variable(
            1.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )


def write_weights(one, strategy, folder, worker):
    """Writes a delta with weights to FOLDER/weights."""
    with strategy.scope():
        model = Model(one)
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.write(checkpoints.path_of(folder, "base_of_model", worker))
    writer = tlm.deltas.DeltaWriter(
        model, folder / "weights", base=str(folder / "base_of_model")
    )

    @tf.function
    def update():
        def in_replica():
            replica = tf.distribute.get_replica_context()
            number = tf.cast(replica.replica_id_in_sync_group, tf.float32)
            model.kernel.assign(model.kernel + 1.0)
            model.mean.assign(number)

        strategy.run(in_replica)

    update()
    writer.write()
    checkpoint.write(checkpoints.path_of(folder, "end_of_model", worker))


def write_with_error(writer, fails_here):
    """Tries to write a delta, and returns the error."""
    write_part = parts.ProcessesDelta.write_part

    def raise_disk_full(delta, tensors):
        raise OSError(28, "disk full")

    if fails_here:
        parts.ProcessesDelta.write_part = raise_disk_full
    try:
        writer.write()
    except OSError as error:
        return str(error)
    finally:
        parts.ProcessesDelta.write_part = write_part
    return "no error"


def main(folder, how):
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        one = embedding(over_processes=how)
    checkpoint = tf.train.Checkpoint(embedding=one)

    def save(name):
        checkpoint.write(checkpoints.path_of(folder, name, worker))

    save("base")
    step = train_step(one, strategy)
    failing = int(how == "sharded")
    write_deltas(
        one,
        lambda number: step(*batch(number, worker)),
        str(folder / "base"),
        folder / "deltas",
        lambda writer: (folder / f"error_{worker}.txt").write_text(
            write_with_error(writer, worker == failing)
        ),
    )
    save("end")
    write_weights(one, strategy, folder, worker)


if __name__ == "__main__":
    main(*sys.argv[1:])
