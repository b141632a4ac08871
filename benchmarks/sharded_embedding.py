"""One training step of a Keras model with tables of several sizes.

The model is one embedding layer with 64 columns. A step is the step of `fit`
(`model.train_step`) with Adagrad and a batch of 10,000 ids. Contestants:

* `tlm.10k`, `tlm.1m`, `tlm.4m`: `tlm.layers.ShardedEmbedding` in 4 shards. The
  name contains the number of rows.
* `keras.1m`: `keras.layers.Embedding` and Keras' Adagrad.

The ids of all contestants refer to the same number of distinct rows, which is
the size of the smallest table. In larger tables, these rows are evenly spaced.
Batches of all contestants therefore have the same number of distinct rows, and
only the size of the table and the use of the processor caches differ.
"""

import keras
import numpy as np
import rich.table
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import timing, workloads

NUM_IDS = 10_000
DIM = 64
NUM_SHARDS = 4
LEARNING_RATE = 0.05
SIZES = {"10k": 10_000, "1m": 1_000_000, "4m": 4_000_000}


def _ours(num_rows: int) -> keras.layers.Layer:
    return tlm.layers.ShardedEmbedding(
        num_rows,
        DIM,
        num_shards=NUM_SHARDS,
        optimizer=tf.tpu.experimental.embedding.Adagrad(LEARNING_RATE),
    )


class _Contestant:
    """A model of one layer with its compiled training step."""

    def __init__(self, layer: keras.layers.Layer, num_rows: int):
        self._num_rows = num_rows
        self._model = keras.Sequential([keras.Input((), dtype="int64"), layer])
        self._model.compile(
            keras.optimizers.Adagrad(LEARNING_RATE),
            loss=lambda y, rows: keras.ops.sum(y * rows, axis=1),
        )
        self._step = tf.function(lambda batch: self._model.train_step(batch))

    def draw(self, distribution: str, y: tf.Tensor) -> None:
        """Draws the batches of ids.

        Args:
          distribution: Distribution of the ids.
          y: Targets of all batches. The loss multiplies the rows by `y`.
        """
        rng = np.random.default_rng(7)
        num_drawn = min(SIZES.values())
        spread = self._num_rows // num_drawn
        ids = [
            workloads.draw_ids(rng, distribution, NUM_IDS, num_drawn)
            for _ in range(4)
        ]
        self.num_distinct = len(np.unique(ids[0]))
        self._batches = [(tf.constant(batch * spread), y) for batch in ids]

    def __call__(self, i: int) -> float:
        # Copying the loss to the host waits for the end of the step.
        return float(self._step(self._batches[i % 4])["loss"])


def _contestants(distribution: str) -> dict[str, _Contestant]:
    contestants = {
        f"tlm.{size}": _Contestant(_ours(num_rows), num_rows)
        for size, num_rows in SIZES.items()
    }
    contestants["keras.1m"] = _Contestant(
        keras.layers.Embedding(SIZES["1m"], DIM), SIZES["1m"]
    )
    y = tf.constant(
        np.random.default_rng(8).standard_normal((NUM_IDS, DIM)), tf.float32
    )
    for contestant in contestants.values():
        contestant.draw(distribution, y)
    return contestants


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    contestants = _contestants(distribution)
    times = timing.interleave(contestants, rounds)
    median = {name: float(np.median(values)) for name, values in times.items()}
    table = rich.table.Table(
        title=f"Training step of a Keras model, {NUM_IDS} ids, {distribution}, "
        f"{DIM} columns, Adagrad"
    )
    for column in (
        "layer",
        "rows",
        "distinct",
        "step",
        "/ small table",
        "/ same rows",
    ):
        table.add_column(column, justify="right")
    for name, value in median.items():
        owner, size = name.split(".")
        table.add_row(
            {"tlm": "ShardedEmbedding", "keras": "Embedding"}[owner],
            f"{SIZES[size]:,}",
            f"{contestants[name].num_distinct:,}",
            f"{value:.2f} ms",
            f"{value / median['tlm.10k']:.2f}",
            f"{value / median[f'tlm.{size}']:.1f}",
        )
    return table, median
