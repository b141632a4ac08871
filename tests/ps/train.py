"""Trains a row on parameter servers; started by tests of failures.

python -m tests.ps.train FOLDER [OPTIONS AS JSON]

Each closure applies the gradient 1 to one row of two tables, so that with SGD
the row is `-RATE * closures`. The program trains until the file FOLDER/stop
exists, and then prints the tables. Errors are not caught.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

import keras
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
RATE = 0.5
ROW = 3
CHUNK = 40  # A DONE line is printed after this number of closures.


def embedding():
    return tlm.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    8, 4, initializer=tf.zeros_initializer(), name=name
                )
            )
            for name in ("a", "b")
        },
        tpu.SGD(RATE),
        partitioner=tlm.partitioners.FixedShardsPartitioner(2),
    )


def rows(one):
    return [
        table.numpy()[ROW].tolist() for table in one.embedding_tables.values()
    ]


class Layers:
    """Two layers whose lookups and updates are joined."""

    def __init__(self):
        self.layers = [
            tlm.layers.ShardedEmbedding(
                8,
                4,
                num_shards=2,
                embeddings_initializer="zeros",
                optimizer=tpu.SGD(RATE),
            )
            for _ in range(2)
        ]
        for layer in self.layers:
            layer.build()
        self.weights = [layer.weights[0] for layer in self.layers]
        self.optimizer = keras.optimizers.SGD()
        self.optimizer.build(self.weights)
        self.saved = tf.train.Checkpoint(
            layers=[layer.embeddings for layer in self.layers]
        )

    @property
    def embedding_tables(self):
        return {layer.name: layer.embeddings for layer in self.layers}

    def step(self, ids):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [tf.reduce_sum(layer(ids)) for layer in self.layers]
            )
        gradients = tape.gradient(loss, [one.value for one in self.weights])
        self.optimizer.apply(gradients, self.weights)

    def stats(self):
        table: Any = self.layers[0].optimizer
        (joint,) = table._trained_table().joint_ops.values()
        counts = joint.count().values()
        return {
            "num_updates": max(one.num_updates for one in counts),
            "num_repeated": max(one.num_repeated for one in counts),
            "staleness": {},
        }


def worked(times: int) -> tf.Tensor:
    """Returns a tensor whose computation takes time."""
    matrix = tf.random.uniform([64, 64])
    for _ in tf.range(times):
        matrix = tf.linalg.l2_normalize(matrix @ matrix)
    return tf.reduce_sum(matrix)


def main():
    folder = pathlib.Path(sys.argv[1])
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    chunk = options.pop("chunk", CHUNK)
    bad = options.pop("bad_closure", None)
    slow = options.pop("slow_save", 0)
    work = options.pop("work", 0)
    survives = options.pop("survives", False)
    strategy = tlm.ps.connect(timeout_seconds=60)
    has_layers = options.pop("layers", False)
    with strategy.scope():
        embeddings: Any = Layers() if has_layers else embedding()

    def dataset_fn():
        ids = tf.data.Dataset.from_tensors([ROW]).repeat()
        if bad is not None:
            # `bad` counts the batches of one worker, so it is not a closure
            # number.
            wrong = tf.data.Dataset.from_tensors([9])
            ids = ids.take(bad).concatenate(wrong).concatenate(ids)
        return ids

    def step(ids):
        if has_layers:
            embeddings.step(ids)
            return worked(work)
        embeddings.enqueue({"a": ids, "b": ids})
        activations = embeddings.dequeue()
        embeddings.apply_gradients(
            {name: tf.ones_like(one) for name, one in activations.items()}
        )
        return worked(work)

    run = tlm.ps.Run(
        strategy,
        step,
        dataset_fn,
        folder / "checkpoints",
        objects={"embedding": embeddings.saved if has_layers else embeddings},
        **options,
    )
    if slow:
        write = run._checkpoint.write

        def slowly(prefix):
            write(prefix)
            print(f"WRITING {run.num_done}", flush=True)
            time.sleep(slow)

        run._checkpoint.write = slowly
    print(f"BEGIN {run.num_done} {rows(embeddings)}", flush=True)
    while not (folder / "stop").exists():
        try:
            run.steps(chunk)
        except tf.errors.InvalidArgumentError as error:
            print("REFUSED " + json.dumps(error.message), flush=True)
        except (OSError, tf.errors.OpError) as error:
            if not survives:
                raise
            print(
                "NOT SAVED " + json.dumps(f"{type(error).__name__}: {error}"),
                flush=True,
            )
        print(f"DONE {run.num_done}", flush=True)
    stats = embeddings.stats()
    print(
        "FOUND "
        + json.dumps(
            {
                "rows": rows(embeddings),
                "num_done": run.num_done,
                "num_repeated": stats["num_repeated"],
                "num_updates": stats["num_updates"],
                "staleness": stats["staleness"],
            }
        ),
        flush=True,
    )
    os._exit(0)  # A coordinator would not exit normally while its workers run.


if __name__ == "__main__":
    main()
