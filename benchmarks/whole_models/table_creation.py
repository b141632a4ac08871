"""Measures the creation and the checkpoint of a table of 8 M x 64.

The table has one slot variable. Each contestant creates the table, writes a
`tf.train.Checkpoint` and reads it:

* `tf.Variable`: two variables for the rows and the slot variable, with initial
  values that are computed in eager mode.
* `tlm`: a `tlm.TPUEmbedding` with the same table, which the method `build`
  creates.

Times are in seconds. Each contestant runs in a separate process, so that no
contestant reuses memory that another contestant has freed. The benchmark uses
no ids, so `--distributions` has no effect.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import rich.table

ROWS, DIM = 8_000_000, 64
CONTESTANTS = ("tf.Variable", "tlm")
FIGURES = ("making", "writing", "reading")


def _make(contestant: str) -> object:
    import tensorflow as tf

    import tf_layoutmap as tlm

    rows = tf.random_uniform_initializer(seed=1)
    if contestant == "tf.Variable":
        return [
            tf.Variable(rows([ROWS, DIM])),
            tf.Variable(tf.fill([ROWS, DIM], 0.1)),
        ]
    tpu = tf.tpu.experimental.embedding
    embedding = tlm.TPUEmbedding(
        [tpu.FeatureConfig(tpu.TableConfig(ROWS, DIM, rows))],
        tpu.Adagrad(0.1, initial_accumulator_value=0.1),
    )
    embedding.build(per_replica_batch_size=1)
    return embedding


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measure(contestant: str) -> dict[str, float]:
    import tensorflow as tf

    made = []
    seconds = {"making": _seconds(lambda: made.append(_make(contestant)))}
    checkpoint = tf.train.Checkpoint(made=made[0])
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "checkpoint")
        seconds["writing"] = _seconds(lambda: checkpoint.write(path))
        seconds["reading"] = _seconds(
            lambda: checkpoint.read(path).assert_consumed()
        )
    return seconds


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    del distribution
    runs: dict[str, list[dict[str, float]]] = {
        contestant: [] for contestant in CONTESTANTS
    }
    for _ in range(min(rounds, 3)):
        for contestant in CONTESTANTS:
            run = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.whole_models.table_creation",
                    contestant,
                ],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            runs[contestant].append(json.loads(run.stdout.splitlines()[-1]))
    median = {
        contestant: {
            figure: statistics.median(run[figure] for run in contestant_runs)
            for figure in FIGURES
        }
        for contestant, contestant_runs in runs.items()
    }
    table = rich.table.Table(
        title=f"A table of {ROWS:,} x {DIM} with a slot variable"
    )
    for column in ("", *CONTESTANTS, "ratio"):
        table.add_column(column, justify="right")
    for figure in FIGURES:
        stock, ours = (median[contestant][figure] for contestant in CONTESTANTS)
        table.add_row(
            figure, f"{stock:.1f} s", f"{ours:.1f} s", f"{ours / stock:.2f}"
        )
    return table, median


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
