"""Training steps of DLRM, the model of `examples/dlrm.py`.

The model has 26 tables with 16 columns. A batch has 2,048 samples with one id
per table, and a step is a step of `fit`. Contestants:

* `tlm.100k`, `tlm.4m`: `tlm.layers.TPUEmbedding` with Adagrad, and batches that
  are packed by `tlm.pack`. The name contains the number of rows of each table.
  The tables of `tlm.4m` and their slot variables take 13.3 GB.
* `features.100k`: the model of `tlm.100k`, with batches of one tensor per
  feature instead of packed batches.
* `keras.100k`: one `keras.layers.Embedding` per table, and Keras' Adagrad for
  all weights of the model.
"""

import pathlib
import sys

import keras
import numpy as np
import rich.table
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import timing, workloads

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
from clicks.model import NUM_NUMBERS, logit_of

NUM_SAMPLES = 2048
DIM = 16
FEATURES = [f"C{number}" for number in range(1, 27)]
LEARNING_RATE = 0.05
SIZES = {"100k": 100_000, "4m": 4_000_000}
CONTESTANTS = ("tlm.100k", "tlm.4m", "features.100k", "keras.100k")


def _inputs() -> dict[str, keras.KerasTensor]:
    return {
        name: keras.Input([], dtype="int64", name=name) for name in FEATURES
    }


def _rows_of_ours(num_rows: int, packed: bool):
    tpu = tf.tpu.experimental.embedding
    layer = tlm.layers.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    num_rows,
                    DIM,
                    tf.random_uniform_initializer(-0.05, 0.05, seed=i),
                    combiner="sum",
                    name=name,
                )
            )
            for i, name in enumerate(FEATURES)
        },
        tpu.Adagrad(LEARNING_RATE),
    )
    inputs = (
        _inputs()
        if not packed
        else keras.Input([1 + 2 * len(FEATURES)], dtype="int64")
    )
    rows = layer(inputs)
    return inputs, [rows[name] for name in FEATURES]


def _rows_of_keras(num_rows: int):
    inputs = _inputs()
    return inputs, [
        keras.layers.Embedding(num_rows, DIM)(inputs[name]) for name in FEATURES
    ]


class _Contestant:
    """A model with its compiled training step."""

    def __init__(self, name: str, distribution: str):
        kind, size = name.split(".")
        num_rows = SIZES[size]
        packed = kind == "tlm"
        inputs, rows = (
            _rows_of_keras(num_rows)
            if kind == "keras"
            else _rows_of_ours(num_rows, packed)
        )
        numbers = keras.Input([NUM_NUMBERS])
        self._model = keras.Model(
            (numbers, inputs), logit_of(numbers, rows, DIM)
        )
        self._model.compile(
            keras.optimizers.Adagrad(LEARNING_RATE),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
        self._step = tf.function(lambda batch: self._model.train_step(batch))
        rng = np.random.default_rng(7)
        self._batches = []
        for _ in range(4):
            ids = {
                feature: tf.constant(
                    workloads.draw_ids(rng, distribution, NUM_SAMPLES, num_rows)
                )
                for feature in FEATURES
            }
            self._batches.append(
                (
                    (
                        tf.constant(
                            rng.random((NUM_SAMPLES, NUM_NUMBERS)), tf.float32
                        ),
                        tlm.pack(ids) if packed else ids,
                    ),
                    tf.constant(
                        rng.integers(0, 2, (NUM_SAMPLES, 1)), tf.float32
                    ),
                )
            )

    def __call__(self, i: int) -> float:
        # Copying the loss to the host waits for the end of the step.
        return float(self._step(self._batches[i % 4])["loss"])


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    contestants = {
        name: _Contestant(name, distribution) for name in CONTESTANTS
    }
    times = timing.interleave(contestants, rounds)
    median = {name: float(np.median(values)) for name, values in times.items()}
    table = rich.table.Table(
        title=f"Training step of DLRM, {NUM_SAMPLES:,} samples, "
        f"{distribution} ids"
    )
    for column in ("contestant", "step", "samples/s", "/ tlm.100k"):
        table.add_column(column, justify="right")
    for name, value in median.items():
        table.add_row(
            name,
            f"{value:.1f} ms",
            f"{1e3 * NUM_SAMPLES / value:,.0f}",
            f"{value / median['tlm.100k']:.2f}",
        )
    return table, median
