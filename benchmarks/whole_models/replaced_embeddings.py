"""Training steps of DLRM with the tables of Criteo's advertising data.

The model has 26 tables with one id each; the numbers of rows are
`workloads.CRITEO_ROWS`. A step is one step of `fit`, trained with Adagrad.
Contestants, for 16 columns and 2,048 samples, or for 64 columns and 4,096
samples with `--wide`:

* `stock`: `keras.layers.Embedding`;
* `replaced`: the same model after `tlm.layers.shard_embeddings`;
* `by hand`: `tlm.layers.ShardedEmbedding` with its own Adagrad for the same
  tables.

`--min_rows` selects the tables of the last two contestants.
"""

import pathlib
import sys

import keras
import numpy as np
import rich.table
import tensorflow as tf
from absl import flags

import tf_layoutmap as tlm
from benchmarks import timing, workloads

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
from clicks.model import NUM_NUMBERS, logit_of

_WIDE = flags.DEFINE_bool(
    "wide", False, "Measures `replaced_embeddings` with 64 columns; 14 GB."
)
_MIN_ROWS = flags.DEFINE_integer(
    "min_rows", 1_000, "Rows of the smallest table that is replaced."
)
LEARNING_RATE = 0.05
CONTESTANTS = ("stock", "replaced", "by hand")


def _layer(kind: str, num_rows: int, dim: int) -> keras.layers.Layer:
    if kind != "by hand" or num_rows < _MIN_ROWS.value:
        return keras.layers.Embedding(num_rows, dim)
    return tlm.layers.ShardedEmbedding(
        num_rows,
        dim,
        optimizer=tf.tpu.experimental.embedding.Adagrad(LEARNING_RATE),
    )


def make_model(kind: str, dim: int) -> keras.Model:
    """Returns the compiled model of a contestant."""
    ids = keras.Input([len(workloads.CRITEO_ROWS)], dtype="int64")
    numbers = keras.Input([NUM_NUMBERS])
    rows = [
        _layer(kind, num_rows, dim)(ids[:, feature])
        for feature, num_rows in enumerate(workloads.CRITEO_ROWS)
    ]
    model = keras.Model((numbers, ids), logit_of(numbers, rows, dim))
    optimizer = keras.optimizers.Adagrad(LEARNING_RATE)
    if kind == "replaced":
        tlm.layers.shard_embeddings(
            model, min_rows=_MIN_ROWS.value, optimizer=optimizer
        )
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class _Contestant:
    """A model with its step of `fit`."""

    def __init__(self, kind: str, dim: int):
        self._model = make_model(kind, dim)
        self._model.make_train_function()

    def draw(self, distribution: str, num_samples: int) -> None:
        """Draws four batches."""
        rng = np.random.default_rng(7)
        self._batches = []
        for _ in range(4):
            ids = [
                workloads.draw_ids(rng, distribution, num_samples, num_rows)
                for num_rows in workloads.CRITEO_ROWS
            ]
            numbers = rng.random((num_samples, NUM_NUMBERS))
            batch = (
                (
                    tf.constant(numbers, tf.float32),
                    tf.constant(np.stack(ids, 1), tf.int64),
                ),
                tf.constant(rng.integers(0, 2, (num_samples, 1)), tf.float32),
            )
            self._batches.append(batch)

    def __call__(self, i: int) -> float:
        batch = self._batches[i % 4]
        # Copying the loss to the host waits for the end of the step.
        return float(self._model.train_function(iter([batch]))["loss"])


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    dim, num_samples = (64, 4096) if _WIDE.value else (16, 2048)
    contestants = {kind: _Contestant(kind, dim) for kind in CONTESTANTS}
    for contestant in contestants.values():
        contestant.draw(distribution, num_samples)
    times = timing.interleave(contestants, rounds)
    median = {name: float(np.median(values)) for name, values in times.items()}
    table = rich.table.Table(
        title=f"Training step of DLRM, 26 tables of Criteo, {dim} columns, "
        f"{num_samples:,} samples, {distribution} ids"
    )
    for column in ("embeddings", "step", "/ by hand"):
        table.add_column(column, justify="right")
    for name, value in median.items():
        ratio = np.median(times[name] / times["by hand"])
        table.add_row(name, f"{value:.1f} ms", f"{ratio:.2f}")
    return table, median
