"""Runs rounds that fail in one worker; test_failing_rounds.py starts it.

python -m tests.ps.rounds.failing_program FOLDER [OPTIONS AS JSON]

The cluster has two servers, and each server holds one half of a table. Each
step applies the gradient 1 to the first and the last row. The program performs
runs of three kinds. In the first kind, the dataset of the second worker ends.
In the second kind, all batches of the second worker after a certain number
contain bad ids. In the third kind, exactly one batch has a bad id, and workers
wait for each batch. Prints a line of JSON with `num_done`, both rows, and both
rows of the newest checkpoint for each run.
"""

import json
import os
import pathlib
import random
import sys

import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
NUM_ROWS = 8
NUM_CALLS, NUM_STEPS = 4, 60


def embedding():
    return tlm.TPUEmbedding(
        tpu.FeatureConfig(
            tpu.TableConfig(
                NUM_ROWS, 4, initializer=tf.zeros_initializer(), name="table"
            )
        ),
        tpu.SGD(1.0),
        partitioner=tlm.partitioners.FixedShardsPartitioner(2),
    )


def both_rows(one):
    (table,) = one.embedding_tables.values()
    return [-table.numpy()[row][0] for row in (0, NUM_ROWS - 1)]


def sleeping(dataset, microseconds):
    """Returns a dataset that waits `microseconds` before each batch."""
    return tf.data.experimental.from_variant(
        tf.raw_ops.SleepDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            sleep_microseconds=tf.constant(microseconds, tf.int64),
            output_types=[tf.int32],
            output_shapes=[[2]],
        ),
        dataset.element_spec,
    )


def run_once(strategy, folder, num_good, kind):
    with strategy.scope():
        embeddings = embedding()

    def batch(number):
        last = tf.where(number < num_good, NUM_ROWS - 1, NUM_ROWS)
        return tf.stack([tf.constant(0), last])

    def dataset_fn(context):
        is_second = context.input_pipeline_id == 1
        if kind == "ends":
            return tf.data.Dataset.range(
                tf.where(is_second, tf.constant(num_good, tf.int64), 10**9)
            ).map(lambda _: tf.constant([0, NUM_ROWS - 1]))
        bad = tf.data.Dataset.range(10**9).map(
            lambda number: batch(tf.where(is_second, number, 0))
        )
        if kind == "is bad":
            return bad
        good = bad.take(1).repeat()
        return sleeping(
            good.take(num_good // 2)
            .concatenate(bad.skip(num_good).take(1))
            .concatenate(good),
            5_000,
        )

    def step(ids):
        embeddings.enqueue(ids)
        embeddings.apply_gradients(tf.ones_like(embeddings.dequeue()))

    run = tlm.ps.Run(
        strategy, step, dataset_fn, folder, objects={"embedding": embeddings}
    )
    num_errors = 0
    for _ in range(NUM_CALLS):
        try:
            run.steps(NUM_STEPS)
        except (ValueError, tf.errors.InvalidArgumentError):
            num_errors += 1
    rows = both_rows(embeddings)
    run.save()
    with strategy.scope():
        restored = embedding()
    read = tlm.ps.Run(
        strategy, step, dataset_fn, folder, objects={"embedding": restored}
    )
    return {
        "num_done": run.num_done,
        "rows": rows,
        "num_errors": num_errors,
        "num_saved": read.num_done,
        "saved_rows": both_rows(restored),
    }


def main():
    folder = pathlib.Path(sys.argv[1])
    num_runs = json.loads(sys.argv[2])["num_runs"]
    strategy = tlm.ps.connect(timeout_seconds=60)
    dice = random.Random(3)
    found = []
    for number in range(num_runs):
        found.append(
            run_once(
                strategy,
                folder / f"run_{number}",
                dice.randrange(1, 60),
                ("ends", "is bad", "ends", "has one bad")[number % 4],
            )
        )
        print(f"RUN {number} {found[-1]}", flush=True)
    print("FOUND " + json.dumps(found, default=float), flush=True)
    os._exit(0)  # A coordinator would not exit normally while its workers run.


if __name__ == "__main__":
    main()
