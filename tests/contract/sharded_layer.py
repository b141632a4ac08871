"""Programs that `fit` a Keras 3 model with a `tlm.layers.ShardedEmbedding`.

Each program runs one feature on any runtime and returns numbers by name.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.contract import steps
from tests.contract.runtimes import BATCH, Array, Runtime
from tests.layers import models

tpu = tf.tpu.experimental.embedding
PROGRAMS: dict[str, steps.Program] = {}

NUM_ROWS, DIM, LENGTH = 16, 4, 3
CAPACITY = 64


program = steps.registrar(PROGRAMS)


def model_of(
    runtime: Runtime | None,
    keys: dict[str, Any] | None = None,
    *,
    calls: int = 1,
    optimizer: Any = "adagrad",
    model_optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.5),
    **options: Any,
) -> Any:
    """Creates and compiles a model with one table.

    Args:
      runtime: The runtime, or None for the default strategy.
      keys: Settings of the vocabulary of the table, which is then open.
      calls: Number of calls of the layer in one step.
      optimizer: Optimizer of the table. "adagrad" is Adagrad with a start value
        and a learning rate that are exact in binary.
      model_optimizer: Function that creates the optimizer of the model.
      **options: Arguments of the layer.
    """
    if optimizer == "adagrad":
        optimizer = tpu.Adagrad(0.5, initial_accumulator_value=0.25)
    initializer = keras.initializers.RandomUniform(-1, 1, seed=3)
    if keys is not None:
        initializer = tf.random_uniform_initializer(-1.0, 1.0)
    # The model's optimizer trains a full table, whose columns can be sharded.
    with (runtime or Runtime()).scope(by_columns=optimizer is None):
        ids = keras.Input([LENGTH], dtype="int64")
        layer = tlm.layers.ShardedEmbedding(
            NUM_ROWS
            if keys is None
            else tlm.vocabulary.OpenVocabulary(CAPACITY, **keys),
            DIM,
            optimizer=optimizer,
            embeddings_initializer=initializer,
            name="words",
            **options,
        )
        rows = [layer(ids[:, ::-1] if one else ids) for one in range(calls)]
        model = keras.Model(
            ids, rows[0] if calls == 1 else keras.layers.add(rows)
        )
        model.compile(model_optimizer(), models.weighted_sum)
    return model


def data(num_batches: int = 4, seed: int = 0, keys: int | None = None) -> Any:
    """Returns ids with repetitions, and integer gradients of the rows."""
    random = np.random.default_rng(seed)
    size = num_batches * BATCH
    ids = random.integers(0, keys or NUM_ROWS, [size, LENGTH])
    ids[:, 1] = ids[:, 0]
    y = random.integers(-4, 5, [size, LENGTH, DIM]).astype(np.float32)
    return ids if keys is None else ids * 1_000_003 - 7, y


def values_of(model: Any) -> dict[str, Array]:
    """Returns the rows and slot variables of the layer, and its keys."""
    layer = model.get_layer("words")
    found = {"rows": layer.embeddings}
    if layer.optimizer is not None:
        found |= layer.optimizer.slots
        found["iterations"] = layer.optimizer.iterations
    arrays = {
        name: np.asarray(
            one.numpy() if hasattr(one, "numpy") else keras.ops.to_numpy(one)
        )
        for name, one in found.items()
    }
    if layer.vocabulary is not None:
        keys = np.sort(layer.vocabulary.keys().numpy())
        where = layer.vocabulary.lookup(keys).numpy()
        iterations = arrays.pop("iterations")
        arrays = {name: one[where] for name, one in arrays.items()}
        arrays |= {"keys": keys, "iterations": iterations}
    return arrays


@program("`fit`, closed table")
def fit(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime)
    runtime.fit(model, *data(), epochs=2)
    return values_of(model)


@program("`fit`, table that follows the model's optimizer")
def fit_following(runtime: Runtime) -> dict[str, Array]:
    model = model_of(
        runtime,
        optimizer="model",
        model_optimizer=lambda: keras.optimizers.SGD(
            0.5, momentum=0.5, clipvalue=2.0
        ),
    )
    runtime.fit(model, *data(), epochs=2)
    return values_of(model)


@program("`fit`, table without a separate optimizer")
def fit_with_model_optimizer(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, optimizer=None)
    runtime.fit(model, *data(), epochs=2)
    return values_of(model)


@program("`fit`, open vocabulary")
def fit_open(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, {})
    runtime.fit(model, *data(keys=20), epochs=2)
    return values_of(model)


@program("`evict`")
def evict(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, {})
    runtime.fit(model, *data(keys=20))
    vocabulary = model.get_layer("words").vocabulary
    gone = vocabulary.evict(np.sort(vocabulary.keys())[::3])
    runtime.fit(model, *data(2, seed=1, keys=20))
    return {**values_of(model), "evicted": np.sort(gone)}


@program("`resize`")
def resize(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, {})
    runtime.fit(model, *data(keys=20))
    model.get_layer("words").vocabulary.resize(4 * CAPACITY)
    model.compile(keras.optimizers.SGD(0.5), models.weighted_sum)
    runtime.fit(model, *data(2, seed=1, keys=90))
    return values_of(model)


@program("`on_evict`")
def on_evict(runtime: Runtime) -> dict[str, Array]:
    gone: list[tlm.EvictedKeys] = []
    model = model_of(runtime, {"on_evict": gone.append})
    runtime.fit(model, *data(keys=20))
    vocabulary = model.get_layer("words").vocabulary
    vocabulary.evict(np.sort(vocabulary.keys())[::3])
    values = values_of(model)
    if not runtime.is_first:  # Only the first process calls `on_evict`.
        return values
    keys = np.concatenate([one.keys for one in gone])
    order = np.argsort(keys)
    return {
        **values,
        "evicted": keys[order],
        "evicted rows": np.concatenate([one.rows for one in gone])[order],
    }


@program("`tlm.vocabulary.KeyExpiry`")
def key_expiry(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, {})
    runtime.fit(model, *data(1, keys=20))
    vocabulary = model.get_layer("words").vocabulary
    expiry = tlm.vocabulary.KeyExpiry(vocabulary, unused_for=steps.HOUR)
    expiry.evict(now=0)
    runtime.fit(model, *data(1, seed=1, keys=20))
    gone = expiry.evict(now=3600)
    runtime.fit(model, *data(1, seed=2, keys=20))
    return {**values_of(model), "evicted": np.sort(gone)}


@program("`tlm.export`")
def export(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime)
    runtime.fit(model, *data())
    return served(runtime, model, data(1, seed=1)[0])


@program("`tlm.export`, open vocabulary")
def export_open(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, {})
    runtime.fit(model, *data(keys=20))
    return served(runtime, model, data(1, seed=1, keys=40)[0])


def served(
    runtime: Runtime, model: Any, ids: Array, **options: Any
) -> dict[str, Array]:
    """Exports a model and returns the predictions of the export."""
    path = runtime.path("exported")
    tlm.export(model, path, **options)
    loaded = tf.saved_model.load(path)
    return {"served": loaded.serve(tf.constant(ids)).numpy()}


@program("`.keras` file")
def keras_file(runtime: Runtime) -> dict[str, Array]:
    """Loads the file with the default strategy, and continues."""
    model = model_of(runtime)
    runtime.fit(model, *data())
    path = runtime.path("model.keras")
    model.save(path)
    return continued(keras.models.load_model(path))


@program("`.keras` file, open vocabulary")
def keras_file_open(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, {})
    runtime.fit(model, *data(keys=20))
    path = runtime.path("model.keras")
    model.save(path)
    return continued(keras.models.load_model(path), keys=30)


def continued(model: Any, **options: Any) -> dict[str, Array]:
    """Trains a loaded model with the default strategy."""
    Runtime().fit(model, *data(2, seed=1, **options))
    return values_of(model)


@program("`.weights.h5` file")
def weight_file(runtime: Runtime) -> dict[str, Array]:
    """Loads the file on the same runtime and with the default strategy."""
    model = model_of(runtime)
    runtime.fit(model, *data())
    path = runtime.path("model.weights.h5")
    model.save_weights(path)
    host = model_of(None)
    host.load_weights(path)
    again = model_of(runtime)
    again.load_weights(path)
    runtime.fit(again, *data(2, seed=1))
    return {
        **{f"host {name}": one for name, one in values_of(host).items()},
        **values_of(again),
    }


@program("checkpoint")
def checkpoint(runtime: Runtime) -> dict[str, Array]:
    """Continues a checkpoint on the same runtime."""
    model = model_of(runtime)
    runtime.fit(model, *data())
    path = steps.shared_path(runtime, runtime.write(model))
    again = model_of(runtime)
    tf.train.Checkpoint(it=again).read(path).expect_partial()
    runtime.fit(again, *data(2, seed=1))
    return values_of(again)


@program("16-bit variables")
def variables_of_16_bits(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, optimizer=None, dtype="bfloat16")
    runtime.fit(model, *data())
    return {
        name: np.asarray(one, np.float32)
        for name, one in values_of(model).items()
    }


@program("optimizer with gradient accumulation")
def gradient_accumulation(runtime: Runtime) -> dict[str, Array]:
    model = model_of(
        runtime,
        model_optimizer=lambda: keras.optimizers.SGD(
            0.5, gradient_accumulation_steps=2
        ),
    )
    runtime.fit(model, *data())
    return values_of(model)


@program("constraint")
def constraint(runtime: Runtime) -> dict[str, Array]:
    model = model_of(
        runtime, embeddings_constraint=keras.constraints.MaxNorm(1.0, axis=1)
    )
    runtime.fit(model, *data())
    return values_of(model)


@program("regularizer")
def regularizer(runtime: Runtime) -> dict[str, Array]:
    model = model_of(
        runtime, embeddings_regularizer=keras.regularizers.L2(0.125)
    )
    runtime.fit(model, *data())
    return values_of(model)


@program("several calls of the layer in a step")
def several_calls(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime, calls=2)
    runtime.fit(model, *data())
    return values_of(model)


@program("several local replicas")
def several_replicas(runtime: Runtime) -> dict[str, Array]:
    steps.check_has_replicas(runtime)
    return fit(runtime)


@program("`EarlyStopping(restore_best_weights=True)`")
def early_stopping(runtime: Runtime) -> dict[str, Array]:
    return stopped(runtime, model_of(runtime), *data())


@program("`EarlyStopping(restore_best_weights=True)`, open vocabulary")
def early_stopping_open(runtime: Runtime) -> dict[str, Array]:
    return stopped(runtime, model_of(runtime, {}), *data(keys=20))


def stopped(runtime: Runtime, model: Any, x: Any, y: Any) -> dict[str, Array]:
    """Trains until the callback restores the weights of the first epoch."""
    runtime.fit(
        model,
        x,
        y,
        epochs=4,
        callbacks=[
            keras.callbacks.EarlyStopping(
                # The loss decreases, and this setting treats the first epoch as
                # the best epoch.
                "loss",
                patience=2,
                mode="max",
                restore_best_weights=True,
            )
        ],
    )
    return values_of(model)


@program("reading a table")
def reading(runtime: Runtime) -> dict[str, Array]:
    model = model_of(runtime)
    runtime.fit(model, *data())
    table = model.get_layer("words").embeddings
    return {"table": np.asarray(tf.convert_to_tensor(table.numpy()))}


@program("tied weights")
def tied_weights(runtime: Runtime) -> dict[str, Array]:
    """Also uses the table as the weight of the output."""
    with runtime.scope(by_columns=True):
        model = Tied()
        model.build((None, LENGTH))
        model.compile(keras.optimizers.SGD(0.5), models.weighted_sum)
    runtime.fit(model, data()[0], tied_labels())
    return values_of(model)


@program("tied weights in `tlm.export`")
def tied_export(runtime: Runtime) -> dict[str, Array]:
    with runtime.scope(by_columns=True):
        model = Tied()
        model.build((None, LENGTH))
        model.compile(keras.optimizers.SGD(0.5), models.weighted_sum)
    runtime.fit(model, data()[0], tied_labels())
    return served(
        runtime,
        model,
        data(1, seed=1)[0],
        input_signature=[tf.TensorSpec([None, LENGTH], tf.int64)],
    )


def tied_labels() -> Array:
    random = np.random.default_rng(9)
    return random.integers(-1, 2, [4 * BATCH, LENGTH, NUM_ROWS]).astype(
        np.float32
    )


@keras.saving.register_keras_serializable("tests")
class Tied(keras.Model):
    """Model whose output is the product of the rows with all rows."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.words = tlm.layers.ShardedEmbedding(
            NUM_ROWS,
            DIM,
            optimizer=None,
            embeddings_initializer=keras.initializers.RandomUniform(
                -0.5, 0.5, seed=3
            ),
            name="words",
        )
        # The table must exist when Keras traces the call to build the model.
        self.words.build()

    def call(self, ids: Any) -> Any:
        rows = self.words(ids)
        table = tf.convert_to_tensor(self.words.embeddings)
        return tf.linalg.matmul(
            rows,
            tf.broadcast_to(table, [tf.shape(rows)[0], NUM_ROWS, DIM]),
            transpose_b=True,
        )
