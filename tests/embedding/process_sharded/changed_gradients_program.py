"""One process of a group that changes gradients before it applies them.

    python -m tests.embedding.process_sharded.changed_gradients_program \
        FOLDER HOW

test_changed_gradients.py starts the processes.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

START = np.random.default_rng(1).standard_normal([12, 4]).astype(np.float32)
IDS = [[[1, 4], [9]], [[9, 2], [11]]]
WEIGHTS = [[0.5, 2.0, 1.0], [1.0, 3.0, 2.0]]
RATE = 0.5


def start(shape, shard_info=None, dtype=None):
    first = shard_info.offset[0] if shard_info is not None else 0
    size = shard_info.shape[0] if shard_info is not None else shape[0]
    return tf.constant(START[first : first + size])


def main(folder, how):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        table = tpu.TableConfig(12, 4, start, None, "mean", "words")
        layer = tlm.layers.TPUEmbedding(
            tpu.FeatureConfig(table), tpu.SGD(RATE), over_processes=how
        )
        layer.build()
        optimizer = keras.optimizers.SGD()
        optimizer.build(layer.trainable_variables)
    ids = tf.ragged.constant(IDS[worker], dtype=tf.int64)
    marks = layer.trainable_variables[0]

    def step(change):
        @tf.function
        def run(weights):
            def of_replica(weights):
                with tf.GradientTape() as tape:
                    tape.watch(weights)
                    found = layer(ids, ids.with_values(weights))
                    loss = tf.reduce_sum(tf.sin(found)) / 2
                mark, of_weights = tape.gradient(loss, [marks.value, weights])
                optimizer.apply([change(mark)], [marks])
                return tf.norm(mark), of_weights

            return strategy.run(of_replica, [weights])

        return [one.numpy() for one in run(tf.constant(WEIGHTS[worker]))]

    norm, of_weights = step(lambda mark: mark / tf.norm(mark))
    try:
        step(tf.sign)
        error = ""
    except tf.errors.OpError as raised:
        error = str(raised)
    (rows,) = layer.embedding_tables.values()
    pathlib.Path(folder, f"{worker}.json").write_text(
        json.dumps(
            {
                "norm": float(norm),
                "of_weights": of_weights.tolist(),
                "rows": np.asarray(rows.numpy()).tolist(),
                "error": error,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
