"""One process that fits a tf_keras model with divided tables.

    python divided_program.py FOLDER HOW

test_divided.py starts two. HOW is a value of `over_processes`. Writes a
checkpoint, of process 0, and what `fit` and `evaluate` gave.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

from tests.layers.tf_keras import test_tpu_embedding as plan

GLOBAL_BATCH = 8


def data():
    rng = np.random.default_rng(0)
    size = 4 * GLOBAL_BATCH
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA)
    return tf.data.Dataset.from_tensor_slices((
        {"title": rng.integers(0, 12, [size, 3]),
         "body": rng.integers(0, 12, [size, 2]),
         "user": rng.integers(0, 5, [size])},
        rng.normal(size=[size, 4]).astype(np.float32),
    )).batch(GLOBAL_BATCH, drop_remainder=True).with_options(options)


def fit(strategy, **options):
    """A model, trained, and what it told."""
    def make():
        return plan.make_model(**options)

    model = plan.compiled(strategy, make=make)
    losses = model.fit(data(), epochs=2, verbose=0).history["loss"]
    return model, [*losses, model.evaluate(data(), verbose=0)]


def main(folder, how):
    folder = pathlib.Path(folder)
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    model, losses = fit(strategy, over_processes=how)
    tf.train.Checkpoint(model=model).write(
        str(folder / (f"temporary/{worker}" if worker else "model")))
    (folder / f"losses_{worker}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
