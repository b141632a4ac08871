"""One process that fits a tf_keras model with tables sharded over processes.

python process_sharded_program.py FOLDER HOW

test_process_sharded.py starts two of these processes. HOW is a value of
`over_processes`. Each process writes the results of `fit` and `evaluate`, and
the errors of unsupported calls. Process 0 also writes a checkpoint.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers.tf_keras import test_tpu_embedding as plan
from tf_layoutmap.layers.base import weight_files

GLOBAL_BATCH = 8


def data():
    rng = np.random.default_rng(0)
    size = 4 * GLOBAL_BATCH
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return (
        tf.data.Dataset.from_tensor_slices(
            (
                {
                    "title": rng.integers(0, 12, [size, 3]),
                    "body": rng.integers(0, 12, [size, 2]),
                    "user": rng.integers(0, 5, [size]),
                },
                rng.normal(size=[size, 4]).astype(np.float32),
            )
        )
        .batch(GLOBAL_BATCH, drop_remainder=True)
        .with_options(options)
    )


def fit(strategy, **options):
    """Returns a trained model and its losses."""

    def make():
        return plan.make_model(**options)

    model = plan.compiled(strategy, make=make)
    losses = model.fit(data(), epochs=2, verbose=0).history["loss"]
    return model, [*losses, model.evaluate(data(), verbose=0)]


def refusals(model, folder):
    """Returns the outcome of each call that requires unsharded variables."""
    embedding = plan.embedding_of(model)
    uses = {
        "h5": lambda: model.save_weights(str(folder / "model.h5")),
        "set_weights": lambda: model.set_weights(
            # A copy of the array does not hold the rows.
            [np.array(one) for one in model.get_weights()]
        ),
        "saved_model": lambda: tf.saved_model.save(
            embedding, str(folder / "saved")
        ),
    }
    found = {}
    for name, use in uses.items():
        try:
            use()
            found[name] = "done"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def clear(tables):
    for one in tables:
        one.block.assign(tf.zeros_like(one.block))


def main(folder, how):
    folder = pathlib.Path(folder)
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    model, losses = fit(strategy, over_processes=how)
    tf.train.Checkpoint(model=model).write(
        str(folder / (f"temporary/{worker}" if worker else "model"))
    )
    (folder / f"losses_{worker}.json").write_text(json.dumps(losses))
    if how == "sharded":
        own_folder = folder / f"own_{worker}"
        own_folder.mkdir()
        # All processes send their rows.
        tlm.export(model, str(folder / "exported"))
        model.save_weights(own_folder / "model.weights.h5")
        embedding = plan.embedding_of(model)
        tables = embedding.embedding_tables.values()
        weights = model.get_weights()
        clear(tables)
        # `EarlyStopping` restores the best weights in this way.
        model.set_weights(weights)
        np.savez(folder / f"set_{worker}.npz", *[one.numpy() for one in tables])
        store = {}
        weight_files.save_tables(embedding, store)
        clear(tables)
        # `load_weights` of tf_keras fails for the metrics of a strategy.
        weight_files.load_tables(embedding, store, layer="layer")
        np.savez(
            folder / f"loaded_{worker}.npz", *[one.numpy() for one in tables]
        )
        (folder / f"refused_{worker}.json").write_text(
            json.dumps(refusals(model, own_folder))
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
