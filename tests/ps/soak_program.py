"""Coordinator of `soak.py`: a model that learns synthetic clicks by `fit`.

The arguments are a folder, the number of steps, and the pause after each epoch
in seconds. If the number of steps is 0, the program trains until FOLDER/stop
exists.
"""

import json
import os
import pathlib
import sys
import time

START_SECONDS = 180
_FEATURES, _ROWS, _DIM, _BATCH = 8, 50_000, 16, 256
_STEPS_AN_EPOCH = 200


def batch_of(seed):
    """Returns skewed ids, and clicks that depend on each id."""
    import tensorflow as tf

    draws = tf.random.stateless_uniform([_BATCH, _FEATURES + 1], seed)
    ids = tf.cast(draws[:, 1:] ** 3 * _ROWS, tf.int64)
    merit = tf.reduce_sum(
        tf.sin(12.9898 * tf.cast(ids % 9973, tf.float32)), axis=1, keepdims=True
    )
    clicked = draws[:, :1] < tf.sigmoid(1.5 * merit)
    return (
        {f"f{one}": ids[:, one : one + 1] for one in range(_FEATURES)},
        tf.cast(clicked, tf.float32),
    )


def training(context):
    import tensorflow as tf

    # The batches depend on the time, so a restarted worker gets new batches.
    began = tf.cast(tf.timestamp() * 1000, tf.int64)
    return tf.data.Dataset.counter(dtype=tf.int64).map(
        lambda number: batch_of(
            tf.stack([began * 2 + context.input_pipeline_id, number])
        )
    )


def held_out(context):
    import tensorflow as tf

    return (
        tf.data.Dataset.range(100)
        .shard(context.num_input_pipelines, context.input_pipeline_id)
        .map(
            lambda number: batch_of(
                tf.stack([tf.constant(-1, tf.int64), number])
            )
        )
    )


def train(folder: pathlib.Path, num_steps: int, rest_seconds: float):
    """Trains for a number of steps, or until FOLDER/stop exists."""
    import keras
    import tensorflow as tf

    import tf_layoutmap as tlm

    tpu = tf.tpu.experimental.embedding
    strategy = tlm.ps.connect(timeout_seconds=START_SECONDS)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = {
            f"f{one}": keras.Input([1], dtype="int64", name=f"f{one}")
            for one in range(_FEATURES)
        }
        found = tlm.layers.TPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    tpu.TableConfig(
                        _ROWS,
                        _DIM,
                        tf.initializers.RandomUniform(-0.05, 0.05),
                        combiner="sum",
                        name=name,
                    )
                )
                for name in inputs
            },
            tpu.Adagrad(0.5),
        )(inputs)
        hidden = keras.layers.Dense(32, "relu")(
            keras.layers.Concatenate()([found[name] for name in inputs])
        )
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
        )

    class Progress(keras.callbacks.Callback):
        done = 0

        def on_epoch_end(self, epoch, logs=None):
            self.done += _STEPS_AN_EPOCH
            print(f"DONE {self.done} {logs['examples/s']:.0f}", flush=True)
            self.model.stop_training = (folder / "stop").exists()
            time.sleep(rest_seconds)

    progress = Progress()
    model.fit(
        tlm.ps.Datasets(training),
        steps_per_epoch=_STEPS_AN_EPOCH,
        epochs=(num_steps // _STEPS_AN_EPOCH) or 1 << 30,
        verbose=0,
        callbacks=[progress],
    )
    figures = model.evaluate(
        tlm.ps.Datasets(held_out), verbose=0, return_dict=True
    )
    print(
        "FOUND " + json.dumps({"num_steps": progress.done, **figures}),
        flush=True,
    )
    os._exit(0)  # A coordinator would not exit normally while its workers run.


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
