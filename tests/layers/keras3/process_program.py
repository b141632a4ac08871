"""One process that trains Keras 3 models under MultiWorkerMirroredStrategy.

python process_program.py FOLDER [PROGRAM ...]

test_processes.py starts two of these processes, and runs the same programs in
one process. Each process runs the programs, and writes their results to FOLDER.
By default, a process runs all programs.
"""

import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers.keras3 import test_tpu_embedding_replicas as plan

tpu = tf.tpu.experimental.embedding
BATCH = plan.BATCH
Results = dict[str, Any]
Program = Callable[[tf.distribute.Strategy, dict[str, Any]], Results]
# Maps names to programs. A program receives a strategy and the arguments of the
# `TPUEmbedding` layer.
PROGRAMS: dict[str, Program] = {}

# Values of `over_processes`.
REPLICATED, SHARDED = "replicated", "sharded"
# Pairs of a program and a value of `over_processes`. The samples of a process
# do not depend on the placement of tables.
CASES = [
    *(
        (name, how)
        for name in (
            "datasets",
            "batches of different sizes",
            "two steps per execution",
            "callbacks",
        )
        for how in (REPLICATED, SHARDED)
    ),
    ("Sequential model", REPLICATED),
    ("data of unknown size", REPLICATED),
    ("generator", REPLICATED),
    ("model without tables", REPLICATED),
    ("order of arrays", REPLICATED),
    ("rows without a seed", REPLICATED),
    ("ShardedEmbedding", REPLICATED),
]
# Programs that compute other results with several replicas of one process. The
# order of arrays is random, and Keras discards batches of a generator.
WITHOUT_REFERENCE = ("order of arrays", "generator", "rows without a seed")


def last_placement(name: str) -> str:
    """Returns the last placement of tables with which a program runs."""
    return [how for one, how in CASES if one == name][-1]


def program(name: str) -> Callable[[Program], Program]:
    """Registers a function as a program."""

    def register(function: Program) -> Program:
        PROGRAMS[name] = function
        return function

    return register


class StepLogs(keras.callbacks.Callback):
    """Records the logs of each training step."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append([float(logs[name]) for name in sorted(logs)])


def results_of(model: Any, x: Any, y: Any = None, **options: Any) -> Results:
    """Trains a compiled model, and returns all results by name.

    Args:
      model: The model.
      x: Argument of `fit`, `evaluate` and `predict`.
      y: Argument of `fit` and `evaluate`.
      **options: Other arguments of `fit`.
    """
    steps = StepLogs()
    callbacks = [*options.pop("callbacks", ()), steps]
    data = {} if y is None else {"y": y, "batch_size": BATCH}
    history = model.fit(
        x,
        **data,
        shuffle=False,
        verbose=0,
        **{"epochs": 2, **options},
        callbacks=callbacks,
    ).history
    data.pop("y", None)
    found = {f"history/{name}": one for name, one in history.items()}
    found["logs of steps"] = steps.logs
    found["evaluate"] = model.evaluate(x, y, **data, verbose=0)
    found["predict"] = model.predict(x, **data, verbose=0)
    return {**found, **weights_of(model)}


def weights_of(model: Any) -> Results:
    """Returns the tables and the other weights of a model."""
    found = {}
    for layer in model.layers:
        if isinstance(layer, tlm.layers.TPUEmbedding):
            tables = plan.values_of(layer.embedding)
            found |= {f"table/{name}": one for name, one in tables.items()}
        else:
            for number, weight in enumerate(layer.get_weights()):
                found[f"{len(found)}/{number}"] = weight
    return found


def as_dataset(*arrays: Any) -> tf.data.Dataset:
    """Returns a dataset with the default options of TensorFlow."""
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


def product(options: dict[str, Any]) -> Callable[[], keras.Model]:
    """Returns a function that creates a model without sums over samples."""
    return lambda: plan.Product(plan.make_layer(**options))


def dense(width: int, seed: int, **options: Any) -> keras.layers.Layer:
    """Returns a layer with the same initial values in all processes."""
    return keras.layers.Dense(
        width,
        kernel_initializer=keras.initializers.RandomNormal(seed=seed),
        **options,
    )


@program("datasets")
def datasets(strategy: Any, options: dict[str, Any]) -> Results:
    """Trains a functional model with weights of samples."""

    def make():
        inputs = {
            "title": keras.Input([3], dtype="int64", name="title"),
            "body": keras.Input([2], dtype="int64", name="body"),
            "user": keras.Input([], dtype="int64", name="user"),
        }
        found = plan.make_layer(**options)(inputs)
        hidden = keras.layers.Concatenate()(
            [
                found["title"],
                keras.layers.Flatten()(found["body"]),
                found["user"],
            ]
        )
        return keras.Model(inputs, dense(4, 2)(dense(4, 1)(hidden)))

    with strategy.scope():
        model = make()
        model.compile(
            keras.optimizers.Adam(0.05),
            "mse",
            metrics=["mae"],
            weighted_metrics=[keras.metrics.R2Score(name="r2")],
        )
    x, y = plan.batches()
    data = as_dataset(x, y, np.linspace(0.5, 2.0, len(y)).astype(np.float32))
    return results_of(model, data, validation_data=as_dataset(x, y))


@program("batches of different sizes")
def uneven(strategy: Any, options: dict[str, Any]) -> Results:
    """Trains with last batches of 11 and of 5 samples.

    In a batch of 5 samples, one of two replicas has no samples.
    """
    model = plan.compiled(strategy, product(options), metrics=["mae"])
    found = {}
    for size, is_dataset in ((11, False), (5, True)):
        x, y = tf.nest.map_structure(
            lambda one, size=size: one[: 2 * BATCH + size], plan.batches()
        )
        data = [as_dataset(x, y)] if is_dataset else [x, y]
        found |= {
            f"{size} {name}": one
            for name, one in results_of(model, *data, epochs=1).items()
        }
    return found


@program("two steps per execution")
def two_steps(strategy: Any, options: dict[str, Any]) -> Results:
    """Trains with executions of two steps and of one step."""
    model = plan.compiled(
        strategy, product(options), metrics=["mae"], steps_per_execution=2
    )
    x, y = plan.batches()
    found = results_of(model, x, y)
    data = as_dataset(x, y).filter(lambda *_: True)
    model.fit(data, verbose=0)
    return {**found, **weights_of(model)}


@program("Sequential model")
def sequential(strategy: Any, options: dict[str, Any]) -> Results:
    """Trains with weights of classes."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                tlm.layers.TPUEmbedding(
                    tpu.FeatureConfig(
                        tpu.TableConfig(12, 4, plan.start, combiner="sum")
                    ),
                    tpu.Adagrad(0.5),
                    **options,
                ),
                dense(3, 1, activation="softmax"),
            ]
        )
        model.compile(
            "adam", "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    x = plan.batches()[0]["title"]
    return results_of(
        model, x, x.sum(1) % 3, class_weight={0: 0.5, 1: 1.0, 2: 3.0}
    )


@program("callbacks")
def callbacks(strategy: Any, options: dict[str, Any]) -> Results:
    """Reads weights that callbacks have saved and restored."""
    model = plan.compiled(strategy, product(options))
    x, y = plan.batches()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/best.weights.h5"
        monitored = {"monitor": "val_loss", "mode": "max"}
        found = results_of(
            model,
            x,
            y,
            epochs=4,
            # The loss decreases, so the first epoch is the best epoch.
            validation_data=(x, y),
            callbacks=[
                keras.callbacks.ModelCheckpoint(
                    path,
                    save_best_only=True,
                    save_weights_only=True,
                    **monitored,
                ),
                keras.callbacks.LearningRateScheduler(
                    lambda epoch: 0.1 / (1 + epoch)
                ),
                keras.callbacks.EarlyStopping(
                    patience=2, restore_best_weights=True, **monitored
                ),
            ],
        )
        restored = weights_of(model)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        model.load_weights(path)
    for name, value in weights_of(model).items():
        assert np.array_equal(value, restored[name]), name
    return {**found, "rate": model.optimizer.learning_rate.numpy()}


@program("data of unknown size")
def unknown_size(strategy: Any, options: dict[str, Any]) -> Results:
    """Trains with datasets whose number of batches is not known."""
    model = plan.compiled(strategy, product(options))
    x, y = plan.batches()
    found = results_of(model, as_dataset(x, y).filter(lambda *_: True))

    def make_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return (
            tf.data.Dataset.from_tensor_slices((x, y))
            .batch(context.get_per_replica_batch_size(BATCH))
            .shard(context.num_input_pipelines, context.input_pipeline_id)
        )

    history = model.fit(
        strategy.distribute_datasets_from_function(make_dataset), verbose=0
    ).history
    return {**found, "distributed": history["loss"], **weights_of(model)}


@program("generator")
def generator(strategy: Any, options: dict[str, Any]) -> Results:
    """Trains with a Python generator, which yields each batch once."""
    model = plan.compiled(strategy, product(options))
    x, y = plan.batches(8)

    def generate():
        for first in range(0, len(y), BATCH):
            rows = slice(first, first + BATCH)
            yield {name: one[rows] for name, one in x.items()}, y[rows]

    history = model.fit(generate(), verbose=0, shuffle=False).history
    return {"loss": history["loss"], **weights_of(model)}


@program("model without tables")
def stock(strategy: Any, options: dict[str, Any]) -> Results:
    """Trains a stock model with the default settings of Keras."""
    del options
    rng = np.random.default_rng(0)
    x = rng.normal(size=[3 * BATCH, 3]).astype(np.float32)
    y = rng.normal(size=[3 * BATCH, 2]).astype(np.float32)
    found = {}
    for name, settings in {
        "default": {},
        "eager": {"run_eagerly": True},
        "steps": {"steps_per_execution": 2},
    }.items():
        with strategy.scope():
            model = keras.Sequential([dense(4, 1), dense(2, 2)])
            model.compile("adam", "mse", metrics=["mae"], **settings)
        found |= {
            f"{name} {key}": one for key, one in results_of(model, x, y).items()
        }
    return found


@program("rows without a seed")
def rows_without_a_seed(
    strategy: tf.distribute.Strategy, options: dict[str, Any]
) -> Results:
    """Returns the initial rows of a closed `ShardedEmbedding`."""
    del options
    with strategy.scope():
        layer = tlm.layers.ShardedEmbedding(5, 2, num_shards=2, optimizer="sgd")
        layer.build()
    return {"table/rows": layer.embeddings.numpy()}


@program("ShardedEmbedding")
def closed_table(
    strategy: tf.distribute.Strategy, options: dict[str, Any]
) -> Results:
    """Trains a table with the model's optimizer. The last batch is smaller."""
    del options
    random = np.random.default_rng(4)
    ids = random.integers(0, 9, [2 * BATCH + 4, 2])
    y = random.standard_normal([len(ids), 2, 3]).astype(np.float32)
    with strategy.scope():
        inputs = keras.Input([2], dtype="int64")
        layer = tlm.layers.ShardedEmbedding(
            9, 3, optimizer="model", embeddings_initializer="ones"
        )
        model = keras.Model(inputs, layer(inputs))
        model.compile(
            keras.optimizers.Adam(0.25, clipnorm=0.5), Sum(reduction="sum")
        )
    found = results_of(model, ids, y, epochs=1)
    found["table/rows"] = layer.embeddings.numpy()
    for name, slot in layer.optimizer.slots.items():
        found[f"table/{name}"] = slot.numpy()
    return found


@program("order of arrays")
def order_of_arrays(strategy: Any, options: dict[str, Any]) -> Results:
    """Counts how often each sample is used in epochs with random orders."""
    del options
    count = 2 * BATCH + 5
    found = {}
    for shuffle in (True, "batch"):
        with strategy.scope():
            layer = tlm.layers.TPUEmbedding(
                tpu.FeatureConfig(
                    tpu.TableConfig(count, 1, tf.zeros_initializer())
                ),
                tpu.SGD(1.0),
            )
            model = keras.Sequential([keras.Input([], dtype="int64"), layer])
            # The gradient of each sample is -1.
            model.compile("sgd", Sum(reduction="sum"))
        seen = []
        for _ in range(2):
            model.fit(
                np.arange(count),
                np.zeros([count, 1], np.float32),
                batch_size=BATCH,
                epochs=3,
                shuffle=shuffle,
                verbose=0,
            )
            (rows,) = layer.embedding_tables.values()
            seen.append(rows.numpy())
        found[f"counts {shuffle}"] = seen
    found["error"] = error_of_py_dataset(model)
    return found


@keras.saving.register_keras_serializable("tests")
class Sum(keras.losses.Loss):
    """Negative sum of the outputs."""

    def call(self, y: Any, x: Any) -> Any:
        return -x[:, 0]


def error_of_py_dataset(model: Any) -> str:
    """Returns the error of `fit` with batches that Keras shuffles."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.arange(BATCH), np.zeros([BATCH, 1], np.float32)

    try:
        model.fit(Batches(), verbose=0)
    except ValueError as error:
        # The address of the object differs between the processes.
        return re.sub("0x[0-9a-f]+", "", str(error))
    return "none"


def main(folder: str, *names: str) -> None:
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # The processes draw different random values.
    keras.utils.set_random_seed(worker)
    for name, how in CASES:
        if names and name not in names:
            continue
        print("program", name, how, flush=True)
        found = PROGRAMS[name](strategy, {"over_processes": how})
        np.savez(pathlib.Path(folder, f"{name} {how} {worker}.npz"), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
