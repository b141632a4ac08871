"""Programs that `fit` a tf_keras model with a `ShardedEmbedding` layer.

Each program runs one feature on any runtime and returns numbers by name.
"""

from typing import Any

import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.contract import sharded_layer, steps
from tests.contract.runtimes import Array, Runtime
from tests.contract.sharded_layer import CAPACITY, DIM, LENGTH, NUM_ROWS
from tests.layers.tf_keras import models

tpu = tf.tpu.experimental.embedding
PROGRAMS: dict[str, steps.Program] = {}


program = steps.registrar(PROGRAMS)


def model_of(
    runtime: Runtime | None,
    *,
    is_open: bool = False,
    calls: int = 1,
    **options: Any,
) -> Any:
    """Creates and compiles a model with one table."""
    with (runtime or Runtime()).scope():
        ids = tf_keras.Input([LENGTH], dtype="int64")
        layer = tlm.layers.tf_keras.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(CAPACITY) if is_open else NUM_ROWS,
            DIM,
            optimizer=tpu.Adagrad(0.5, initial_accumulator_value=0.25),
            embeddings_initializer=(
                tf.random_uniform_initializer(-1.0, 1.0)
                if is_open
                else tf_keras.initializers.RandomUniform(-1, 1, seed=3)
            ),
            name="words",
            **options,
        )
        rows = [layer(ids[:, ::-1] if one else ids) for one in range(calls)]
        model = tf_keras.Model(
            ids, rows[0] if calls == 1 else tf_keras.layers.add(rows)
        )
        model.compile(tf_keras.optimizers.SGD(0.5), models.weighted_sum)
    return model


@program("`fit`, closed table")
def fit(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime)
    runtime.fit(model, *sharded_layer.data(), epochs=2)
    return sharded_layer.values_of(model)


@program("`fit`, open vocabulary")
def fit_open(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, is_open=True)
    runtime.fit(model, *sharded_layer.data(keys=20), epochs=2)
    return sharded_layer.values_of(model)


@program("`.keras` file")
def keras_file(runtime: Runtime) -> dict[str, Array]:
    """Loads the file with the default strategy, and continues."""
    model = model_of(runtime)
    runtime.fit(model, *sharded_layer.data())
    path = runtime.path("model.keras")
    model.save(path)
    return sharded_layer.continued(tf_keras.models.load_model(path))


@program("`.h5` file")
def legacy_file(runtime: Runtime) -> dict[str, Array]:
    """Saves weights to a legacy file, and continues on the host."""
    model = model_of(runtime)
    runtime.fit(model, *sharded_layer.data())
    path = runtime.path("model.h5")
    model.save_weights(path)
    host = model_of(None)
    host.load_weights(path)
    return sharded_layer.continued(host)


@program("several calls of the layer in a step")
def several_calls(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, calls=2)
    runtime.fit(model, *sharded_layer.data())
    return sharded_layer.values_of(model)


@program("`EarlyStopping(restore_best_weights=True)`, open vocabulary")
def early_stopping_open(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, is_open=True)
    runtime.fit(
        model,
        *sharded_layer.data(keys=20),
        epochs=4,
        callbacks=[
            tf_keras.callbacks.EarlyStopping(
                "loss", patience=2, mode="max", restore_best_weights=True
            )
        ],
    )
    return sharded_layer.values_of(model)
