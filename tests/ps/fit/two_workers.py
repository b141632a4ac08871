"""Runs `fit` with two workers; test_fit.py starts and restarts them.

python -m tests.ps.fit.two_workers FOLDER [STEPS_PER_EXECUTION]

Prints a line of JSON when the file FOLDER/stop exists.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.ps.train import RATE, ROW, worked

tpu = tf.tpu.experimental.embedding
SIZES = (2, 9)
NUM_EPOCHS = 2


def model(strategy, steps_per_execution):
    with strategy.scope():
        inputs = {"a": keras.Input([1], dtype="int64", name="a")}
        layer = tlm.layers.TPUEmbedding(
            {
                "a": tpu.FeatureConfig(
                    tpu.TableConfig(
                        8, 4, initializer=tf.zeros_initializer(), name="a"
                    ),
                    name="a",
                )
            },
            tpu.SGD(RATE),
        )
        built = Slow(inputs, layer(inputs)["a"])
        # With this loss, the gradient of a row is 1 for each sample.
        built.compile(
            "sgd",
            loss=lambda y, x: keras.ops.sum(x, axis=1),
            metrics=[keras.metrics.MeanSquaredError()],
            steps_per_execution=steps_per_execution,
        )
    return built, layer


def uneven(context):
    first = context.input_pipeline_id == 0
    size = tf.where(first, *(tf.constant(size, tf.int64) for size in SIZES))
    label = tf.where(first, 1.0, 3.0)
    return tf.data.Dataset.range(size).map(
        lambda _: ({"a": tf.constant([[0]], tf.int64)}, tf.fill([1, 4], label))
    )


def endless():
    return tf.data.Dataset.from_tensors(
        ({"a": tf.constant([[ROW]], tf.int64)}, tf.zeros([1, 4]))
    ).repeat()


def accumulation_error(strategy):
    """Returns the error of `fit` with an optimizer that accumulates."""
    with strategy.scope():
        built = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        built.compile(
            keras.optimizers.SGD(gradient_accumulation_steps=2), "mse"
        )
    data = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1])))
    before = [one.numpy() for one in built.trainable_variables]
    try:
        built.fit(tlm.ps.Datasets(lambda: data.repeat(2)), verbose=0)
    except ValueError as error:
        after = [one.numpy() for one in built.trainable_variables]
        return [
            str(error),
            all(map(np.array_equal, before, after)),
        ]
    return None


class Slow(keras.Model):
    """Model whose steps take most of their time after the updates are sent."""

    is_slow = False

    def train_step(self, data):
        logs = super().train_step(data)
        if self.is_slow:
            with tf.control_dependencies(tf.nest.flatten(logs)):
                tf.function(worked)(8_000)
        return logs


class Counts(keras.callbacks.Callback):
    """Callback that counts steps and ends training if the stop file exists."""

    def __init__(self, folder=None):
        super().__init__()
        self.folder = folder
        self.ends = []

    def on_epoch_begin(self, epoch, logs=None):
        self.ends.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.ends[-1] = batch + 1
        print("TRAINED" if self.folder else "DONE", sum(self.ends), flush=True)
        if self.folder and (self.folder / "stop").exists():
            self.model.stop_training = True


def main(folder: pathlib.Path, steps_per_execution: int):
    strategy = tlm.ps.connect()
    built, layer = model(strategy, steps_per_execution)
    counts = Counts()
    built.fit(
        tlm.ps.Datasets(uneven),
        epochs=NUM_EPOCHS,
        verbose=0,
        callbacks=[counts],
    )
    rows = next(iter(layer.embedding_tables.values())).numpy()
    expected = rows[0, 0] - np.repeat([1.0, 3.0], SIZES)
    found = {
        "ends": counts.ends,
        "iterations": int(built.optimizer.iterations.numpy()),
        "uneven_row": float(rows[0, 0]),
        "mean": built.evaluate(tlm.ps.Datasets(uneven), verbose=0)[1],
        "expected_mean": float(np.mean(expected**2)),
        "accumulation_error": accumulation_error(strategy),
    }
    print("UNEVEN", flush=True)
    built.is_slow = True
    counts = Counts(folder)
    built.fit(
        tlm.ps.Datasets(endless),
        epochs=1000,
        steps_per_epoch=100,
        verbose=0,
        callbacks=[counts],
    )
    stats = layer.embedding.stats()
    found.update(
        num_steps=sum(counts.ends),
        num_repeated=stats["num_repeated"],
        row=next(iter(layer.embedding_tables.values())).numpy()[ROW].tolist(),
    )
    print("FOUND " + json.dumps(found), flush=True)
    os._exit(0)  # A coordinator would not exit normally while its workers run.


if __name__ == "__main__":
    main(
        pathlib.Path(sys.argv[1]),
        int(sys.argv[2]) if len(sys.argv) > 2 else 1,
    )
