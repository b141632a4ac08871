"""One process that trains Keras 3 models under MultiWorkerMirroredStrategy.

python process_program.py FOLDER

test_processes.py starts these processes. Each process trains all models and
writes the results of each model to FOLDER.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.layers.keras3 import test_tpu_embedding_replicas as plan

GLOBAL_BATCH, NUM_BATCHES = 8, 3

# Maps each model to the arguments of its `TPUEmbedding`, or to None if the
# model has no table. The first model with a table enables `fit` for all models.
MODELS = {
    "copied": {"over_processes": "copied"},
    "sharded": {"over_processes": "sharded"},
    "stock": None,
}
# Pairs of a model and the form of its samples. TensorFlow shards arrays and
# datasets over the processes, so each process trains on different samples.
CASES = (
    ("copied", "dataset"),
    ("sharded", "dataset"),
    ("stock", "arrays"),
)


class StepLogs(keras.callbacks.Callback):
    """Records the logs of each training step."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})


def samples(kind):
    """Returns the features and the labels of all processes."""
    rng = np.random.default_rng(0)
    size = NUM_BATCHES * GLOBAL_BATCH
    numbers = {"numbers": rng.normal(size=[size, 3]).astype(np.float32)}
    labels = rng.normal(size=[size, 2]).astype(np.float32)
    if MODELS[kind] is None:
        return numbers, labels
    return (
        {
            **numbers,
            "title": rng.integers(0, 12, [size, 3]),
            "body": rng.integers(0, 12, [size, 2]),
            "user": rng.integers(0, 5, [size]),
        },
        labels,
    )


def data_of(kind, how):
    """Returns the arguments of `fit` and `evaluate` for the samples."""
    x, y = samples(kind)
    if how == "arrays":
        return {"x": x, "y": y, "batch_size": GLOBAL_BATCH}
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return {"x": dataset.batch(GLOBAL_BATCH).with_options(options)}


def make_model(kind):
    """Returns a model with two Dense layers."""
    inputs = {"numbers": keras.Input([3], name="numbers")}
    parts = [inputs["numbers"]]
    if MODELS[kind] is not None:
        ids = {
            "title": keras.Input([3], dtype="int64", name="title"),
            "body": keras.Input([2], dtype="int64", name="body"),
            "user": keras.Input([], dtype="int64", name="user"),
        }
        found = plan.make_layer(**MODELS[kind])(ids)
        inputs.update(ids)
        parts += [
            found["title"],
            keras.layers.Flatten()(found["body"]),
            found["user"],
        ]
    hidden = parts[0] if len(parts) == 1 else keras.layers.Concatenate()(parts)
    for number, width in enumerate((4, 2)):
        hidden = keras.layers.Dense(
            width,
            kernel_initializer=keras.initializers.RandomNormal(seed=number),
        )(hidden)
    return keras.Model(inputs, hidden)


def train(strategy, kind, how="arrays"):
    """Trains a model for two epochs.

    Returns:
      The model, the results of `fit` and `evaluate` by name, and the arrays of
      the model by name: the result of `predict`, the weights, and the rows and
      slot variables of the tables.
    """
    with strategy.scope():
        model = make_model(kind)
        model.compile(
            keras.optimizers.Adam(0.05),
            "mse",
            metrics=["mae", keras.metrics.R2Score(name="r2")],
        )
    arguments = data_of(kind, how)
    steps = StepLogs()
    history = model.fit(
        **arguments,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[steps],
        validation_data=arguments["x"]
        if how != "arrays"
        else (arguments["x"], arguments["y"]),
    ).history
    results = {
        "history": history,
        "steps": steps.logs,
        "evaluate": model.evaluate(**arguments, verbose=0, return_dict=True),
    }
    arguments.pop("y", None)
    arrays = {"predict": model.predict(**arguments, verbose=0)}
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            for number, weight in enumerate(layer.get_weights()):
                arrays[f"{len(arrays)} {number}"] = weight
    if MODELS[kind] is not None:
        tables = plan.values_of(plan.embedding_of(model))
        arrays.update({f"table {key}": one for key, one in tables.items()})
    return results, arrays


def main(folder):
    folder = pathlib.Path(folder)
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # The processes draw different random values.
    keras.utils.set_random_seed(worker)
    for kind, how in CASES:
        results, arrays = train(strategy, kind, how)
        name = f"{kind}_{how}_{worker}"
        (folder / f"{name}.json").write_text(json.dumps(results))
        np.savez(folder / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
