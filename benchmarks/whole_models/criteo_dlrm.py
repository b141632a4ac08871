"""Training of a complete DLRM with Criteo's tables, compared with torch.

The sizes of the model are `benchmarks/workloads.py:DLRMS`. All weights are
trained with Adagrad. Each contestant trains with the same batches:

* `tlm`: `fit` of a Keras model with `tlm.layers.TPUEmbedding` and
  `tlm.layers.DotInteraction`, whose batches are packed by `tlm.pack`.
* `several`: the same, compiled with `steps_per_execution=8`.
* `features`: as `tlm`, with one tensor of ids per table.
* `keras`: `fit` with one `keras.layers.Embedding` per table and stock
  operations for the interaction. Keras' Adagrad updates all rows of all tables
  in each step.
* `fbgemm`, `bag`: a loop in torch with FBGEMM's tables, or with one
  `torch.nn.EmbeddingBag` per table, if `--torch_python` is set.

A time is the duration of one call of `fit` or of the loop, divided by the
number of its batches. The batches are created before the measurement.
"""

import time
from collections.abc import Callable

import numpy as np
import rich.table
import tensorflow as tf
from absl import flags

from benchmarks import embedding_step, timing, workloads
from benchmarks.peers import process as peers
from benchmarks.whole_models import criteo_model

SIZES = flags.DEFINE_multi_enum(
    "dlrm_sizes",
    list(workloads.DLRMS),
    list(workloads.DLRMS),
    "Sizes of `criteo_dlrm`.",
)
_NUM_BATCHES = flags.DEFINE_integer(
    "dlrm_batches",
    40,
    "Number of batches of each measured call of `criteo_dlrm`.",
    lower_bound=1,
)

PEERS = ("fbgemm", "bag")
# Kind of model and number of steps per execution of each contestant in Keras.
_KERAS = {
    "tlm": ("tlm", 1),
    "several": ("tlm", 8),
    "features": ("features", 1),
    "keras": ("keras", 1),
}
# Number of batches per call of the contestant that updates all rows.
_FEW_BATCHES = 4
# Deleting an iterator can wait for the thread that tunes the dataset, 0.3 to
# 0.6 s after a second of training. With long epochs, this time is negligible.
_OPTIONS = tf.data.Options()
_OPTIONS.autotune.enabled = False


def contestant(
    name: str, size: workloads.Dlrm, distribution: str
) -> Callable[[int], timing.Milliseconds]:
    """Returns a function that trains and returns the time per batch."""
    kind, steps = _KERAS[name]
    inputs, rows = criteo_model.look_up(kind, size)
    model = criteo_model.compiled(kind, inputs, rows, size, steps)
    batches = criteo_model.batches(kind, size, distribution)
    data = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        data = data.concatenate(tf.data.Dataset.from_tensors(batch))
    count = _FEW_BATCHES if kind == "keras" else _NUM_BATCHES.value
    data = data.repeat().take(count).prefetch(2).with_options(_OPTIONS)

    def train(round_number: int) -> timing.Milliseconds:
        del round_number
        start = time.perf_counter()
        model.fit(data, epochs=1, verbose=0)
        passed = 1e3 * (time.perf_counter() - start)
        return timing.Milliseconds(passed / count)

    return train


def _peer(process: peers.Peer, name: str, size: str, distribution: str):
    process.ask("open_dlrm", name, size, distribution)
    count = _NUM_BATCHES.value
    return lambda i: timing.Milliseconds(
        process.ask("train_dlrm", name, size, count) / count
    )


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    table = rich.table.Table(
        title=f"Training of a complete DLRM, {distribution} ids"
    )
    for column in ("size", "contestant", "step", "samples/s", "/ tlm"):
        table.add_column(column, justify="right")
    medians = {}
    for name in SIZES.value:
        size = workloads.DLRMS[name]
        calls = {kind: contestant(kind, size, distribution) for kind in _KERAS}
        process = None
        if embedding_step.TORCH_PYTHON.value:
            process = peers.Peer(
                embedding_step.TORCH_PYTHON.value,
                "benchmarks.peers.torch_tables",
            )
            for peer in PEERS:
                calls[peer] = _peer(process, peer, name, distribution)
        times = timing.interleave(calls, rounds)
        if process is not None:
            process.close()
        medians[name] = {
            figure: float(np.median(values)) for figure, values in times.items()
        }
        for figure, value in medians[name].items():
            ratios = times[figure] / times["tlm"]
            table.add_row(
                name,
                figure,
                f"{value:.1f} ms",
                f"{1e3 * size.num_samples / value:,.0f}",
                f"{np.median(ratios):.2f}",
            )
    return table, medians
