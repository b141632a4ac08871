"""Programs that `fit` a Keras model with a `TPUEmbedding` layer.

Each program runs one feature on any runtime and returns numbers by name. The
programs support Keras 3 and tf_keras.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.contract import steps
from tests.contract.runtimes import BATCH, NUM_REPLICAS, Array, Runtime

tpu = tf.tpu.experimental.embedding
# Maps each feature to a program, with Keras 3 and with tf_keras.
PROGRAMS: dict[str, steps.Program] = {}
TF_KERAS_PROGRAMS: dict[str, steps.Program] = {}

DIMS = {"item": 4, "user": 2}
Function = Callable[[Runtime, Any], dict[str, Array]]


def program(
    feature: str, *, versions: tuple[str, ...] = ("keras", "tf_keras")
) -> Callable[[Function], Function]:
    """Registers a function as the program of a feature.

    Args:
      feature: Name of the feature.
      versions: Versions of Keras that have the feature.
    """

    def register(function: Function) -> Function:
        if "keras" in versions:
            PROGRAMS[feature] = functools.partial(function, version=keras)
        if "tf_keras" in versions:
            TF_KERAS_PROGRAMS[feature] = functools.partial(
                function, version=tf_keras
            )
        return function

    return register


@keras.saving.register_keras_serializable("tests")
class Keras3Sum(keras.losses.Loss):
    """Sum of the products of labels and outputs."""

    def call(self, y: Any, x: Any) -> Any:
        return keras.ops.sum(x * y, axis=1)


@tf_keras.saving.register_keras_serializable("tests")
class TfKerasSum(tf_keras.losses.Loss):
    """The same loss for tf_keras."""

    def call(self, y: Any, x: Any) -> Any:
        return tf.reduce_sum(x * y, axis=1)


def model_of(
    runtime: Runtime | None,
    version: Any,
    *,
    is_open: bool = False,
    calls: int = 1,
    model_optimizer: Callable[[], Any] | None = None,
    **options: Any,
) -> Any:
    """Creates and compiles a model with a `TPUEmbedding` layer.

    Args:
      runtime: The runtime, or None for the default strategy.
      version: The module of Keras 3 or tf_keras.
      is_open: Whether the table "items" has an open vocabulary.
      calls: Number of calls of the layer in one step.
      model_optimizer: Function that creates the optimizer of the model.
      **options: Arguments of the layer.
    """
    runtime = runtime or Runtime()
    layers = tlm.layers if version is keras else tlm.layers.tf_keras
    of_keys = tf.random_uniform_initializer(-1.0, 1.0)
    items = tpu.TableConfig(
        steps.CAPACITY if is_open else steps.NUM_ITEMS,
        DIMS["item"],
        initializer=of_keys if is_open else steps.initializer,
        combiner="sum",
        name="items",
    )
    users = tpu.TableConfig(
        steps.NUM_USERS,
        DIMS["user"],
        initializer=steps.initializer,
        combiner="sum",
        name="users",
    )
    if is_open:
        options["vocabularies"] = {
            "items": tlm.vocabulary.OpenVocabulary(steps.CAPACITY)
        }
    # SparseCores require the number of samples of each replica.
    shape: dict[str, Any] = (
        {"output_shape": [BATCH // NUM_REPLICAS]}
        if runtime.name == "sparse_cores"
        else {}
    )
    with runtime.scope():
        inputs = {
            name: version.Input([1], dtype="int64", name=name) for name in DIMS
        }
        layer = layers.TPUEmbedding(
            {
                "item": tpu.FeatureConfig(items, name="item", **shape),
                "user": tpu.FeatureConfig(users, name="user", **shape),
            },
            tpu.Adagrad(0.5, initial_accumulator_value=0.25),
            name="tables",
            **runtime.options,
            **options,
        )
        outputs = []
        for _ in range(calls):
            found = layer(inputs)
            outputs.append(
                version.layers.Concatenate()([found["item"], found["user"]])
            )
        model = version.Model(
            inputs, outputs[0] if calls == 1 else version.layers.add(outputs)
        )
        model.compile(
            (model_optimizer or (lambda: version.optimizers.SGD(0.5)))(),
            Keras3Sum() if version is keras else TfKerasSum(),
        )
    return model


def data(
    num_batches: int = 4, seed: int = 0, keys: int | None = None
) -> tuple[dict[str, Array], Array]:
    """Returns ids of both features, and integer labels."""
    batches = steps.batches_of(num_batches, seed, keys)
    ids = {
        name: np.concatenate([ids[name] for ids, _ in batches])[:, np.newaxis]
        for name in DIMS
    }
    labels = np.random.default_rng(seed + 100).integers(
        -4, 5, [num_batches * BATCH, sum(DIMS.values())]
    )
    return ids, labels.astype(np.float32)


def values_of(runtime: Runtime, model: Any, name: str = "end") -> Any:
    """Returns the tables and slot variables of the layer."""
    return runtime.values(model.get_layer("tables").embedding, name)


@program("`fit`, closed table")
def fit(runtime: Runtime, version: Any) -> dict[str, Array]:
    model = model_of(runtime, version)
    runtime.fit(model, *data(), epochs=2)
    return values_of(runtime, model)


@program("`fit`, open vocabulary")
def fit_open(runtime: Runtime, version: Any) -> dict[str, Array]:
    model = model_of(runtime, version, is_open=True)
    runtime.fit(model, *data(keys=30), epochs=2)
    return values_of(runtime, model)


@program("`tlm.export`")
def export(runtime: Runtime, version: Any) -> dict[str, Array]:
    model = model_of(runtime, version)
    runtime.fit(model, *data())
    path = runtime.path("exported")
    tlm.export(model, path)
    ids, _ = data(1, seed=1)
    served = tf.saved_model.load(steps.shared_path(runtime, path))
    found = served.serve({name: tf.constant(one) for name, one in ids.items()})
    return {"served": found.numpy()}


@program("`.keras` file")
def keras_file(runtime: Runtime, version: Any) -> dict[str, Array]:
    """Loads the file with the default strategy, and continues."""
    model = model_of(runtime, version)
    runtime.fit(model, *data())
    path = runtime.path("model.keras")
    model.save(path)
    # A `.keras` file contains the initializer of each table by its name.
    with version.saving.custom_object_scope({"initializer": steps.initializer}):
        return continued(runtime, version.models.load_model(path))


def continued(runtime: Runtime, model: Any) -> dict[str, Array]:
    """Trains a loaded model with the default strategy."""
    host = Runtime()
    host.start(runtime.folder / f"host_{'first' if runtime.is_first else ''}")
    host.fit(model, *data(2, seed=1))
    return values_of(host, model)


@program("`.weights.h5` file")
def weight_file(runtime: Runtime, version: Any) -> dict[str, Array]:
    """Loads the file with the default strategy, and continues."""
    return saved(runtime, version, "model.weights.h5")


@program("`.h5` file", versions=("tf_keras",))
def legacy_file(runtime: Runtime, version: Any) -> dict[str, Array]:
    """Saves weights to a legacy file, and continues on the host."""
    return saved(runtime, version, "model.h5")


def saved(runtime: Runtime, version: Any, name: str) -> dict[str, Array]:
    model = model_of(runtime, version)
    runtime.fit(model, *data())
    path = runtime.path(name)
    model.save_weights(path)
    host = model_of(None, version)
    host.load_weights(path)
    return continued(runtime, host)


@program("checkpoint")
def checkpoint(runtime: Runtime, version: Any) -> dict[str, Array]:
    """Continues a checkpoint on the same runtime."""
    model = model_of(runtime, version)
    runtime.fit(model, *data())
    path = steps.shared_path(runtime, runtime.write(model))
    runtime.restart()
    again = model_of(runtime, version)
    # Tables on a TPU are created by the first step.
    runtime.fit(again, *data(1, seed=3))
    tf.train.Checkpoint(it=again).read(path).expect_partial()
    runtime.fit(again, *data(2, seed=1))
    return values_of(runtime, again)


@program("optimizer with gradient accumulation", versions=("keras",))
def gradient_accumulation(runtime: Runtime, version: Any) -> dict[str, Array]:
    model = model_of(
        runtime,
        version,
        model_optimizer=lambda: keras.optimizers.SGD(
            0.5, gradient_accumulation_steps=2
        ),
    )
    runtime.fit(model, *data())
    return values_of(runtime, model)


@program("several calls of the layer in a step")
def several_calls(runtime: Runtime, version: Any) -> dict[str, Array]:
    model = model_of(runtime, version, calls=2)
    runtime.fit(model, *data())
    return values_of(runtime, model)


@program("`EarlyStopping(restore_best_weights=True)`")
def early_stopping(runtime: Runtime, version: Any) -> dict[str, Array]:
    model = model_of(runtime, version)
    runtime.fit(
        model,
        *data(),
        epochs=4,
        callbacks=[
            version.callbacks.EarlyStopping(
                "loss", patience=2, mode="max", restore_best_weights=True
            )
        ],
    )
    return values_of(runtime, model)
