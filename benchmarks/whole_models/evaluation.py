"""Steps of `fit`, `evaluate` and `predict` of a model with tables.

The model has 8 tables of 100,000 x 32, whose combiner is "sum", and a dense
layer. A batch has 2,048 samples with 1 or 20 ids per table. Contestants:

* `fit`, `evaluate`, `predict`: `tlm.layers.TPUEmbedding` with Adagrad;
* `packed`: `evaluate` with batches that `tlm.pack` has packed before;
* `function`: a `tf.function` that calls the same model, which uses TensorFlow's
  ops, as in an exported model;
* `keys fit`, `keys evaluate`, `keys function`: the same with open vocabularies;
* `stock fit`, `stock predict`: the same model with `keras.layers.Embedding`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import rich.table
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import timing, workloads

NUM_TABLES, NUM_ROWS, DIM, NUM_SAMPLES = 8, 100_000, 32, 2048
NUM_IDS = (1, 20)
LEARNING_RATE = 0.05


def _model_of(inputs: Any, rows: Sequence[Any]) -> keras.Model:
    flat = [keras.layers.Reshape([DIM])(of_table) for of_table in rows]
    logits = keras.layers.Dense(1)(keras.layers.Concatenate()(flat))
    model = keras.Model(inputs, logits)
    model.compile(keras.optimizers.Adagrad(LEARNING_RATE), "mse")
    model.make_train_function()
    model.make_test_function()
    model.make_predict_function()
    return model


def make_model(
    num_ids: int, packed: bool = False, vocabularies: Any = None
) -> keras.Model:
    """Returns a model with a `tlm.layers.TPUEmbedding`."""
    tpu = tf.tpu.experimental.embedding
    layer = tlm.layers.TPUEmbedding(
        [
            tpu.FeatureConfig(
                tpu.TableConfig(
                    NUM_ROWS, DIM, combiner="sum", name=f"table_{i}"
                )
            )
            for i in range(NUM_TABLES)
        ],
        tpu.Adagrad(LEARNING_RATE),
        vocabularies=vocabularies,
    )
    inputs = (
        keras.Input([None], dtype="int64")
        if packed
        else [keras.Input([num_ids], dtype="int64") for _ in range(NUM_TABLES)]
    )
    return _model_of(inputs, layer(inputs))


def make_stock_model(num_ids: int) -> keras.Model:
    """Returns the same model with `keras.layers.Embedding`."""
    inputs = [keras.Input([num_ids], dtype="int64") for _ in range(NUM_TABLES)]
    return _model_of(
        inputs,
        [
            keras.ops.sum(keras.layers.Embedding(NUM_ROWS, DIM)(ids), axis=1)
            for ids in inputs
        ],
    )


def _contestants(
    distribution: str, num_ids: int
) -> dict[str, Callable[[int], object]]:
    rng = np.random.default_rng(7)
    batches = [
        [
            tf.constant(
                workloads.draw_ids(
                    rng, distribution, NUM_SAMPLES * num_ids, NUM_ROWS
                ).reshape(NUM_SAMPLES, num_ids),
                tf.int64,
            )
            for _ in range(NUM_TABLES)
        ]
        for _ in range(4)
    ]
    targets = tf.constant(rng.random((NUM_SAMPLES, 1)), tf.float32)
    packed = [tlm.pack(batch) for batch in batches]
    ours, stock = make_model(num_ids), make_stock_model(num_ids)
    of_packed = make_model(num_ids, packed=True)
    of_keys = make_model(
        num_ids,
        vocabularies={
            f"table_{i}": tlm.vocabulary.OpenVocabulary(NUM_ROWS)
            for i in range(NUM_TABLES)
        },
    )

    def step(name, model, inputs=batches):
        # Copying the loss to the host waits for the end of the step.
        return lambda i: float(
            getattr(model, name)(iter([(inputs[i % 4], targets)]))["loss"]
        )

    def function(model):
        call = tf.function(lambda ids: model(ids, training=False))
        return lambda i: call(batches[i % 4]).numpy()

    def prediction(model):
        return lambda i: model.predict_function([(batches[i % 4],)]).numpy()

    return {
        "fit": step("train_function", ours),
        "evaluate": step("test_function", ours),
        "packed": step("test_function", of_packed, packed),
        "predict": prediction(ours),
        "function": function(ours),
        "keys fit": step("train_function", of_keys),
        "keys evaluate": step("test_function", of_keys),
        "keys function": function(of_keys),
        "stock fit": step("train_function", stock),
        "stock predict": prediction(stock),
    }


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    table = rich.table.Table(
        title=f"Steps with {NUM_TABLES} tables of {NUM_ROWS:,} x {DIM}, "
        f"{NUM_SAMPLES:,} samples, {distribution} ids"
    )
    for column in ("ids per table", "step", "ms", "/ fit [quartiles]"):
        table.add_column(column, justify="right")
    results = {}
    for num_ids in NUM_IDS:
        times = timing.interleave(_contestants(distribution, num_ids), rounds)
        for name, values in times.items():
            low, middle, high = np.quantile(
                values / times["fit"], [0.25, 0.5, 0.75]
            )
            results[f"{name}, {num_ids}"] = float(np.median(values))
            table.add_row(
                str(num_ids),
                name,
                f"{np.median(values):.2f}",
                f"{middle:.2f} [{low:.2f}, {high:.2f}]",
            )
    return table, results
