"""One process that fits models whose tables have open vocabularies.

    python sharded_keys_program.py FOLDER LIBRARY [CASE ...]

LIBRARY is "keras" or "tf_keras". test_sharded_keys.py starts several of these
processes. Each process runs each case with replicated tables and with tables
that are sharded over the processes, and writes the results to FOLDER. By
default, a process runs all cases of the library.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.contract import tpu_layer
from tests.contract.runtimes import tensors_in
from tests.embedding.host import open_tables_program as tables
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

tpu = tf.tpu.experimental.embedding
BATCH = 12  # Samples of a global batch; divisible by 2 and 3.
REPLICATED, SHARDED = "replicated", "sharded"
Results = dict[str, Any]
# Sizes of the features in each sample.
SIZES = {"shown": 3, "history": 2, "name": 3, "price": 2}


def modules_of(library: str) -> tuple[Any, Any]:
    """Returns the module of a Keras version, and its layers."""
    if library == "keras":
        import keras

        return keras, tlm.layers
    import tf_keras

    return tf_keras, tlm.layers.tf_keras


class OnEvict:
    """An `on_evict` that records keys and rows."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.rows: list[float] = []

    def __call__(self, evicted: Any) -> None:
        self.keys.extend(evicted.keys)
        self.rows.extend(np.ravel(evicted.rows))


class Case:
    """A model of one Keras version, and its data.

    Attributes:
      version: Module of the Keras version.
      layers: Module with the layers of this package.
      strategy: Strategy of the model.
      model: The compiled model.
      layer: The `TPUEmbedding` layer.
      on_evict: Records the evicted keys of the table "names".
      folder: Folder of the case, which all processes share.
      worker: Index of this process.
    """

    def __init__(
        self,
        library: str,
        strategy: tf.distribute.Strategy,
        folder: pathlib.Path,
        worker: int,
        *,
        num_calls: int = 1,
        reports_evicted: bool = True,
        **options: Any,
    ):
        self.version, self.layers = modules_of(library)
        self.strategy = strategy
        self.folder = folder
        self.worker = worker
        self._num_calls = num_calls
        self._reports_evicted = reports_evicted
        self._options = options
        self.start()

    def start(self) -> None:
        """Creates a new model."""
        self.on_evict = OnEvict()
        with self.strategy.scope():
            self.layer = self._make_layer()
            self.model = self._make_model()

    def _make_layer(self) -> Any:
        items, names, prices = tables.table_configs()
        users = tpu.TableConfig(
            7, 2, tf.zeros_initializer(), tpu.Adam(0.1), "sum", name="users"
        )
        return self.layers.TPUEmbedding(
            {
                "shown": tpu.FeatureConfig(items, name="shown"),
                "history": tpu.FeatureConfig(
                    items, max_sequence_length=2, name="history"
                ),
                "name": tpu.FeatureConfig(names, name="name"),
                "price": tpu.FeatureConfig(prices, name="price"),
                "user": tpu.FeatureConfig(users, name="user"),
            },
            None,
            **tables.table_options(
                self.on_evict if self._reports_evicted else None
            ),
            name="tables",
            **self._options,
        )

    def _make_model(self) -> Any:
        version = self.version
        inputs = {
            name: version.Input(
                [size], dtype="string" if name == "name" else "int64", name=name
            )
            for name, size in SIZES.items()
        }
        inputs["user"] = version.Input([], dtype="int64", name="user")
        # Calls with odd numbers look up the keys of other features.
        others = {
            **inputs,
            "history": inputs["price"],
            "price": inputs["history"],
        }
        outputs = []
        for number in range(self._num_calls):
            found = self.layer(others if number % 2 else inputs)
            joined = version.layers.Concatenate()(
                [
                    version.layers.Flatten()(found[name])
                    for name in (*SIZES, "user")
                ]
            )
            if number == 2:
                # This call gets no gradients.
                joined = version.layers.Lambda(tf.stop_gradient)(joined)
            outputs.append(joined)
        output = version.layers.Dense(
            4, kernel_initializer=version.initializers.RandomNormal(seed=1)
        )(
            outputs[0]
            if len(outputs) == 1
            else version.layers.Concatenate()(outputs)
        )
        model = version.Model(inputs, output)
        is_keras = self.version.__name__ == "keras"
        model.compile(
            version.optimizers.Adam(0.01),
            tpu_layer.Keras3Sum() if is_keras else tpu_layer.TfKerasSum(),
            metrics=["mae"],
        )
        return model

    def data(
        self, num_batches: int = 4, seed: int = 0, num_more: int = 0
    ) -> tf.data.Dataset:
        """Returns global batches of keys, and labels.

        Args:
          num_batches: Number of batches of `BATCH` samples.
          seed: Seed of the batches.
          num_more: Number of samples in an additional batch.
        """
        random = np.random.default_rng(seed)
        size = num_batches * BATCH + num_more
        # The keys of later samples are larger, so that earlier keys are
        # evicted.
        first = 20 * np.arange(size)[:, np.newaxis] // BATCH
        keys: dict[str, Any] = {
            name: (first + random.integers(0, 60, [size, width])) * 1009 - 5
            for name, width in SIZES.items()
        }
        keys["name"] = keys["name"].astype(str)
        keys["user"] = random.integers(0, 7, [size])
        labels = random.integers(-4, 5, [size, 4]).astype(np.float32)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        arrays: Any = (keys, labels)
        return (
            tf.data.Dataset.from_tensor_slices(arrays)
            .batch(BATCH)
            .with_options(options)
        )

    def fit(self, data: tf.data.Dataset | None = None, **options: Any) -> Any:
        """Trains the model, and returns the logs of the epochs."""
        return self.model.fit(
            self.data() if data is None else data,
            verbose=0,
            **{"epochs": 2, **options},
        ).history

    def own_path(self, name: str) -> str:
        """Returns the path of a file of this process."""
        own = self.folder / f"worker_{self.worker}"
        own.mkdir(parents=True, exist_ok=True)
        return str(own / name)

    def shared_path(self, name: str) -> str:
        """Returns a path of the first process, or of a temporary file."""
        if self.worker:
            return self.own_path(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        return str(self.folder / name)

    def values(self, name: str = "values") -> Results:
        """Returns the tensors of a checkpoint; empty in other processes."""
        path = self.shared_path(name)
        tf.train.Checkpoint(it=self.layer.embedding).write(path)
        if self.worker:
            return {}
        return {f"values/{key}": one for key, one in tensors_in(path).items()}

    def results(self, logs: Any) -> Results:
        """Returns logs, predictions, evicted keys and all variables."""
        data = self.data(2, seed=7)
        return {
            **{f"logs/{name}": one for name, one in logs.items()},
            "evaluate": self.model.evaluate(data, verbose=0),
            "predict": self.model.predict(data, verbose=0),
            "evicted": np.array(self.on_evict.keys, np.int64),
            "evicted rows": np.array(self.on_evict.rows, np.float32),
            **self.values("end"),
        }


Program = Callable[..., Results]
CASES: dict[str, Program] = {}


def case(function: Program) -> Program:
    """Registers a function as a case, with its name."""
    CASES[function.__name__] = function
    return function


@case
def fit(make: Callable[..., Case]) -> Results:
    """Trains, evaluates and predicts, and logs statistics."""
    one = make()
    logger = one.layers.VocabularyLogger(
        one.layer, names=["num_keys", "num_evicted"]
    )
    return one.results(one.fit(callbacks=[logger]))


@case
def several_calls(make: Callable[..., Case]) -> Results:
    """Calls the layer three times in a step; one call gets no gradients."""
    one = make(num_calls=3)
    return one.results(one.fit())


@case
def small_batches(make: Callable[..., Case]) -> Results:
    """Trains with a last batch in which only one process has a sample."""
    one = make()
    return one.results(one.fit(one.data(2, num_more=1)))


@case
def evict(make: Callable[..., Case]) -> Results:
    """Evicts keys between the epochs."""
    one = make()

    def evict_some(epoch: int, logs: Any = None) -> None:
        del logs
        for name in ("items", "names"):
            vocabulary = one.layer.embedding.vocabularies[name]
            keys = np.sort(vocabulary.keys().numpy())
            vocabulary.evict(
                # The keys of strings are hashes.
                StoredKeys(tf.constant(keys[epoch::3]))
                if name == "names"
                else keys[::4]
            )

    callback = one.version.callbacks.LambdaCallback(on_epoch_end=evict_some)
    return one.results(one.fit(epochs=3, callbacks=[callback]))


@case
def early_stopping(make: Callable[..., Case]) -> Results:
    """Restores the weights of the first epoch."""
    one = make()
    stopping = one.version.callbacks.EarlyStopping(
        "loss", patience=2, mode="max", restore_best_weights=True
    )
    return one.results(one.fit(epochs=4, callbacks=[stopping]))


@case
def checkpoint(make: Callable[..., Case]) -> Results:
    """Continues from a checkpoint of a model."""
    one = make()
    one.fit()
    path = one.shared_path("model")
    tf.train.Checkpoint(model=one.model).write(path)
    one.start()
    one.model.predict(one.data(1), verbose=0)
    tf.train.Checkpoint(model=one.model).read(
        str(one.folder / "model")
    ).expect_partial()
    return one.results(one.fit(one.data(2, seed=1)))


@case
def weight_file(make: Callable[..., Case]) -> Results:
    """Writes a `.weights.h5` file, and reads it in Keras 3."""
    one = make()
    one.fit()
    path = one.own_path("model.weights.h5")
    one.model.save_weights(path)
    # `load_weights` of tf_keras fails for the metrics of a strategy.
    # test_sharded_keys.py reads the file in one process.
    if one.version.__name__ == "keras":
        one.fit(one.data(2, seed=1))
        one.model.load_weights(path)
    return one.results({})


@case
def keras_file(make: Callable[..., Case]) -> Results:
    """Writes a `.keras` file, which cannot contain an `on_evict`."""
    one = make(reports_evicted=False)
    one.fit()
    one.model.save(one.own_path("model.keras"))
    return one.results({})


class FitInterruptedError(Exception):
    """Ends `fit`."""


@case
def backup(make: Callable[..., Case]) -> Results:
    """Continues `fit` of an interrupted program."""
    one = make()
    # tf_keras itself writes temporary files in other processes.
    path = (
        one.own_path("backup")
        if one.version.__name__ == "keras"
        else str(one.folder / "backup")
    )

    def interrupt(epoch: int, logs: Any = None) -> None:
        del logs
        if epoch == 2:
            raise FitInterruptedError

    callbacks = one.version.callbacks
    try:
        one.fit(
            epochs=3,
            callbacks=[
                callbacks.BackupAndRestore(path),
                callbacks.LambdaCallback(on_epoch_begin=interrupt),
            ],
        )
    except FitInterruptedError:
        one.start()
    logs = one.fit(epochs=3, callbacks=[callbacks.BackupAndRestore(path)])
    assert len(logs["loss"]) == 1
    return one.results(logs)


@case
def export(make: Callable[..., Case]) -> Results:
    """Exports the model. test_sharded_keys.py loads the SavedModel."""
    one = make()
    one.fit()
    tlm.export(one.model, one.shared_path("exported"))
    return one.results({})


@case
def folded(make: Callable[..., Case]) -> Results:
    """Sends one gradient per row if tables are sharded."""
    one = make(gradient_aggregation="local")
    return one.results(one.fit())


def cases_of(library: str) -> list[str]:
    """Returns the names of the cases that a Keras version supports."""
    return [
        name
        for name in CASES
        # tf_keras does not train on batches in which a replica has no sample.
        if not (library == "tf_keras" and name == "small_batches")
    ]


def main(folder: str, library: str, *names: str) -> None:
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for name in names or cases_of(library):
        for how in (REPLICATED, SHARDED):
            print("case", name, how, flush=True)
            own = pathlib.Path(folder, f"{name} {how}")

            def make(how: str = how, own: Any = own, **options: Any) -> Case:
                if how == REPLICATED:
                    options.pop("gradient_aggregation", None)
                return Case(
                    library,
                    strategy,
                    own,
                    worker,
                    over_processes=how,
                    **options,
                )

            found = CASES[name](make)
            np.savez(
                pathlib.Path(folder, f"{name} {how} {worker}.npz"), **found
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
