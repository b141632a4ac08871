"""Records the copies of one training step on a GPU in host memory.

    python -m tests.accelerators.copies_program LIBRARY PROGRAM ...

The program trains each model with tables of several sizes. For each size, it
prints the copies of one step after two other steps, which trace functions and
create variables.
"""

import dataclasses
import functools
import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.accelerators import fake_gpu

BATCH, WIDTH, NUM_NUMBERS = 16, 8, 5
# Number of ids of a sample, by feature.
FEATURES = {"user": 1, "item": 2, "words": 3}
SIZES = (1_000, 4_000)
NUM_STEPS = 4

config = tf.tpu.experimental.embedding


def batch(dtype="int64"):
    """Returns numbers, ids and labels of one batch."""
    random = np.random.default_rng(0)
    ids = {
        name: random.integers(0, SIZES[0], [BATCH, count])
        for name, count in FEATURES.items()
    }
    numbers = random.normal(size=[BATCH, NUM_NUMBERS]).astype(np.float32)
    return (
        numbers,
        {name: one.astype(dtype) for name, one in ids.items()},
        random.integers(0, 2, [BATCH, 1]).astype(np.float32),
    )


def dlrm(rows_of):
    """Returns a DLRM.

    Args:
      rows_of: Function that receives the ids of all features, and returns
        tensors of shape `[BATCH, WIDTH]`.
    """
    numbers = keras.Input([NUM_NUMBERS], name="numbers")
    ids = {
        name: keras.Input([count], dtype="int64", name=name)
        for name, count in FEATURES.items()
    }
    bottom = keras.layers.Dense(WIDTH, "relu", name="bottom")(numbers)
    pairs = tlm.layers.DotInteraction()([bottom, *rows_of(ids)])
    top = keras.layers.Concatenate()([bottom, pairs])
    click = keras.layers.Dense(1, name="top")(top)
    return keras.Model([numbers, ids], click)


def table_configs(num_rows):
    return {
        name: config.FeatureConfig(
            config.TableConfig(num_rows, WIDTH, combiner="sum", name=name)
        )
        for name in FEATURES
    }


def fit_step(model, path, x, y):
    """Returns the copies of one step of `fit`, from end to end."""

    class Steps(keras.callbacks.Callback):
        copies = recording = None

        def on_train_batch_end(self, step, logs=None):
            if step == NUM_STEPS - 3:
                self.recording = fake_gpu.record_copies(path)
                self.copies = self.recording.__enter__()
            elif step == NUM_STEPS - 2:
                self.recording.__exit__(None, None, None)

    steps = Steps()
    model.compile("adam", "mse", jit_compile=False)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(NUM_STEPS)
    model.fit(dataset, verbose=0, callbacks=[steps])
    return steps.copies


def sharded_embedding(path, num_rows):
    def rows_of(ids):
        for name, one in ids.items():
            rows = tlm.layers.ShardedEmbedding(
                num_rows, WIDTH, optimizer="adagrad", name=f"{name}_table"
            )(one)
            yield keras.ops.sum(rows, axis=1)

    numbers, ids, y = batch()
    return fit_step(dlrm(rows_of), path, (numbers, ids), y)


def layer(path, num_rows):
    def rows_of(ids):
        features = table_configs(num_rows)
        rows = tlm.layers.TPUEmbedding(features, config.Adagrad(0.1))(ids)
        return [rows[name] for name in FEATURES]

    numbers, ids, y = batch()
    return fit_step(dlrm(rows_of), path, (numbers, ids), y)


def stock(path, num_rows):
    def rows_of(ids):
        for name, one in ids.items():
            rows = keras.layers.Embedding(num_rows, WIDTH, name=f"{name}_table")(
                one
            )
            yield keras.ops.sum(rows, axis=1)

    numbers, ids, y = batch()
    return fit_step(dlrm(rows_of), path, (numbers, ids), y)


def loop(path, num_rows, vocabularies=None):
    embedding = tlm.TPUEmbedding(
        table_configs(num_rows), config.Adagrad(0.1), vocabularies=vocabularies
    )
    numbers = keras.Input([NUM_NUMBERS])
    rows = {name: keras.Input([WIDTH]) for name in FEATURES}
    bottom = keras.layers.Dense(WIDTH, "relu")(numbers)
    top = keras.layers.Concatenate()([bottom, *rows.values()])
    model = keras.Model([numbers, rows], keras.layers.Dense(1)(top))
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(numbers, ids, labels):
        embedding.enqueue(ids)
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            tape.watch(activations)
            logits = model([numbers, activations], training=True)
            loss = tf.reduce_mean(tf.math.squared_difference(logits, labels))
        variables = model.trainable_variables
        rows, dense = tape.gradient(loss, (activations, variables))
        embedding.apply_gradients(rows)
        optimizer.apply_gradients(zip(dense, variables))
        return loss

    numbers, ids, labels = batch()
    dataset = iter(tf.data.Dataset.from_tensors((numbers, ids, labels)).repeat())
    for _ in range(2):
        step(*next(dataset))
    with fake_gpu.record_copies(path) as copies:
        step(*next(dataset))
    return copies


def open_vocabulary(path, num_rows):
    vocabularies = {name: tlm.OpenVocabulary(num_rows) for name in FEATURES}
    return loop(path, num_rows, vocabularies)


PROGRAMS = {
    "ShardedEmbedding in fit": sharded_embedding,
    "layers.TPUEmbedding in fit": layer,
    "TPUEmbedding in a loop": loop,
    "open vocabularies in a loop": open_vocabulary,
    "keras.layers.Embedding in fit": stock,
}


def main():
    path, *names = sys.argv[1:]
    fake_gpu.load(path, 1)
    found = {}
    for name in names:
        try:
            found[name] = [
                [dataclasses.asdict(copy) for copy in PROGRAMS[name](path, size)]
                for size in SIZES
            ]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[-1000:]}"
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
