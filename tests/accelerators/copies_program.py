"""Records the copies of a training step on a GPU in host memory.

    python -m tests.accelerators.copies_program LIBRARY PROGRAM ...

Each program trains a model with tables of each of `SIZES`. For each size, this
module prints the copies of one step. Earlier steps trace the functions and
create the variables.
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
# Number of ids of a sample, by feature. Each feature has a table.
FEATURES = {"user": 1, "item": 2, "words": 3}
# Numbers of rows of each table.
SIZES = (1_000, 4_000)
# Number of steps before the recorded step.
NUM_BEFORE = 2

config = tf.tpu.experimental.embedding


def dataset():
    """Returns batches of the inputs, numbers and ids, and the labels."""
    random = np.random.default_rng(0)
    ids = {
        name: random.integers(0, SIZES[0], [BATCH, count])
        for name, count in FEATURES.items()
    }
    numbers = random.normal(size=[BATCH, NUM_NUMBERS]).astype(np.float32)
    labels = random.integers(0, 2, [BATCH, 1]).astype(np.float32)
    return tf.data.Dataset.from_tensors(((numbers, ids), labels)).repeat()


def dense_part(numbers, rows):
    """Returns the output of a DLRM for the rows of its features."""
    bottom = keras.layers.Dense(WIDTH, "relu")(numbers)
    pairs = tlm.layers.DotInteraction()([bottom, *rows])
    return keras.layers.Dense(1)(keras.layers.Concatenate()([bottom, pairs]))


def table_configs(num_rows):
    return {
        name: config.FeatureConfig(
            config.TableConfig(num_rows, WIDTH, combiner="sum", name=name)
        )
        for name in FEATURES
    }


class RecordOneStep(keras.callbacks.Callback):
    """Records the copies from the end of one step to the end of the next."""

    def __init__(self, path):
        super().__init__()
        self._recording = fake_gpu.record_copies(path)
        self.copies = []

    def on_train_batch_end(self, step, logs=None):
        if step == NUM_BEFORE - 1:
            self.copies = self._recording.__enter__()
        elif step == NUM_BEFORE:
            self._recording.__exit__(None, None, None)


def fit(rows_of, path, num_rows):
    """Trains a DLRM by `fit`, and returns the copies of a step.

    Args:
      rows_of: Function of the ids of all features and the number of rows of the
        tables. It returns one tensor `[BATCH, WIDTH]` for each feature.
      path: The library.
      num_rows: Number of rows of each table.
    """
    numbers = keras.Input([NUM_NUMBERS])
    ids = {
        name: keras.Input([count], dtype="int64", name=name)
        for name, count in FEATURES.items()
    }
    clicks = dense_part(numbers, rows_of(ids, num_rows))
    model = keras.Model((numbers, ids), clicks)
    model.compile("adam", "mse", jit_compile=False)
    recorded = RecordOneStep(path)
    # The recorded step is not the last one of the epoch, whose end copies the
    # results.
    model.fit(
        dataset(),
        steps_per_epoch=NUM_BEFORE + 2,
        verbose=0,
        callbacks=[recorded],
    )
    return recorded.copies


def sum_of_rows(make, ids, num_rows):
    return [
        keras.ops.sum(make(num_rows, WIDTH)(one), axis=1)
        for one in ids.values()
    ]


def rows_of_layer(ids, num_rows):
    rows = tlm.layers.TPUEmbedding(
        table_configs(num_rows), config.Adagrad(0.1)
    )(ids)
    return [rows[name] for name in FEATURES]


def loop(path, num_rows, *, is_open):
    """Trains a DLRM in a custom loop, and returns the copies of a step."""
    embedding = tlm.TPUEmbedding(
        table_configs(num_rows),
        config.Adagrad(0.1),
        vocabularies={
            name: tlm.vocabulary.OpenVocabulary(num_rows) for name in FEATURES
        }
        if is_open
        else None,
    )
    numbers = keras.Input([NUM_NUMBERS])
    rows = {name: keras.Input([WIDTH]) for name in FEATURES}
    model = keras.Model((numbers, rows), dense_part(numbers, rows.values()))
    variables = model.trainable_variables
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)

    @tf.function
    def step(numbers, ids, labels):
        embedding.enqueue(ids)
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            tape.watch(activations)
            clicks = model((numbers, activations), training=True)
            loss = tf.reduce_mean(tf.math.squared_difference(clicks, labels))
        of_rows, of_variables = tape.gradient(loss, (activations, variables))
        embedding.apply_gradients(of_rows)
        optimizer.apply_gradients(zip(of_variables, variables))

    batches = iter(dataset())
    for _ in range(NUM_BEFORE):
        (numbers, ids), labels = next(batches)
        step(numbers, ids, labels)
    with fake_gpu.record_copies(path) as copies:
        (numbers, ids), labels = next(batches)
        step(numbers, ids, labels)
    return copies


# Functions of the path of the library and the number of rows of each table.
PROGRAMS = {
    "ShardedEmbedding": functools.partial(
        fit,
        functools.partial(
            sum_of_rows,
            functools.partial(tlm.layers.ShardedEmbedding, optimizer="adagrad"),
        ),
    ),
    "ShardedEmbedding, open vocabulary": functools.partial(
        fit,
        functools.partial(
            sum_of_rows,
            lambda num_rows, width: tlm.layers.ShardedEmbedding(
                tlm.vocabulary.OpenVocabulary(num_rows),
                width,
                optimizer="adagrad",
            ),
        ),
    ),
    "layers.TPUEmbedding": functools.partial(fit, rows_of_layer),
    "TPUEmbedding": functools.partial(loop, is_open=False),
    "open vocabulary": functools.partial(loop, is_open=True),
    "keras.layers.Embedding": functools.partial(
        fit, functools.partial(sum_of_rows, keras.layers.Embedding)
    ),
}


def main():
    path, *names = sys.argv[1:]
    fake_gpu.load(path, 1)
    found = {
        name: [
            [dataclasses.asdict(copy) for copy in PROGRAMS[name](path, size)]
            for size in SIZES
        ]
        for name in names
    }
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
