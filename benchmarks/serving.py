"""Latency of exported models in a process without tf_layoutmap.

The model has 26 tables of 50,000 x 64, in which it looks up one id each, and a
Dense layer. Contestants:

* `model.export`: the model, exported by Keras.
* `float32`, `int8`, `int4`: the model, exported by `tlm.export`, which stores
  all tables in one variable.
* `keras int4`: one table of 1 M x 64 in a quantized `Embedding`, exported by
  Keras.
* `tlm int4`: one table of 1 M x 64 in a `ShardedEmbedding`, exported by
  `tlm.export`.
* `empty call`: a function of 26 inputs that returns one of its inputs, without
  a lookup. TensorFlow takes this time to call a function from Python.
* `fbgemm float32`, `fbgemm int8`, `fbgemm int4`: the same sizes in FBGEMM's
  tables for inference (`IntNBitTableBatchedEmbeddingBagsCodegen`) and a Dense
  layer, in a separate process, if `--torch_python` is set.

The benchmark measures the p50 and the p99 of single calls. The calls of all
contestants are interleaved. Ids are always uniform, so `--distributions` has no
effect.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import rich.console
import rich.table

NUM_TABLES, NUM_ROWS, DIM = 26, 50_000, 64
BIG_ROWS = 1_000_000
BATCH_SIZES = (1, 128)
FUSED = ("model.export", "float32", "int8", "int4")
BIG = ("keras int4", "tlm int4")
EMPTY = "empty call"
FBGEMM = {kind: f"fbgemm {kind}" for kind in FUSED[1:]}
PERCENTILES = ("p50", "p99")
# The number of calls is small, because each call of Keras' int4 model unpacks a
# million rows.
MOST_BIG_CALLS = 20


def _export_all(folder: pathlib.Path) -> dict[str, int]:
    """Exports all models and returns the size of each in bytes."""
    import keras
    import tensorflow as tf

    import tf_layoutmap as tlm

    tpu = tf.tpu.experimental.embedding
    inputs = {
        f"f{i:02}": keras.Input([1], dtype="int64", name=f"f{i:02}")
        for i in range(NUM_TABLES)
    }
    activations = tlm.layers.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    NUM_ROWS,
                    DIM,
                    tf.random_uniform_initializer(-0.1, 0.1, seed=i),
                    combiner="sum",
                    name=name,
                )
            )
            for i, name in enumerate(inputs)
        },
        tpu.SGD(0.1),
    )(inputs)
    model = keras.Model(
        inputs,
        keras.layers.Dense(1)(
            keras.layers.Concatenate()(list(activations.values()))
        ),
    )
    model.export(folder / "model.export", verbose=False)
    for kind in FUSED[1:]:
        tlm.export(model, folder / kind, kind)
    del model, activations

    ids = keras.Input([1], dtype="int64", name="ids")
    big = keras.Model(
        ids,
        tlm.layers.ShardedEmbedding(BIG_ROWS, DIM, optimizer="adagrad")(ids),
    )
    tlm.export(big, folder / "tlm int4", "int4")
    del big
    theirs = keras.Model(ids, keras.layers.Embedding(BIG_ROWS, DIM)(ids))
    theirs.quantize("int4")
    theirs.export(folder / "keras int4", verbose=False)
    return {
        name: sum(
            file.stat().st_size
            for file in (folder / name).rglob("*")
            if file.is_file()
        )
        for name in (*FUSED, *BIG)
    }


def _ask(
    folder: pathlib.Path, rounds: int, torch_python: str
) -> dict[str, list[float]]:
    """Returns the milliseconds of each call, by contestant and batch size.

    Args:
      folder: Folder of the exported models.
      rounds: Number of calls of each contestant.
      torch_python: Python interpreter with FBGEMM, or an empty string.
    """
    # With this entry, an import of tf_layoutmap fails as if the package were
    # not installed.
    sys.modules["tf_layoutmap"] = None  # pyright: ignore[reportArgumentType]
    import tensorflow as tf

    from benchmarks import timing
    from benchmarks.peers import process

    peer = None
    if torch_python:
        peer = process.Peer(torch_python, "benchmarks.peers.torch_serving")
        peer.ask("open", NUM_TABLES, NUM_ROWS, DIM)
    random = np.random.default_rng(0)
    # The loaded objects keep the variables of their signatures alive.
    loaded = {
        name: tf.saved_model.load(folder / name) for name in (*FUSED, *BIG)
    }
    served = {
        name: model.signatures["serving_default"]
        for name, model in loaded.items()
    }
    served[EMPTY] = tf.function(
        lambda **inputs: inputs["f00"]
    ).get_concrete_function(
        **{
            f"f{i:02}": tf.TensorSpec([None, 1], tf.int64)
            for i in range(NUM_TABLES)
        }
    )
    times = {}
    for batch_size in BATCH_SIZES:
        batches = [
            {
                f"f{i:02}": tf.constant(
                    random.integers(0, NUM_ROWS, [batch_size, 1])
                )
                for i in range(NUM_TABLES)
            }
            for _ in range(16)
        ]
        big_batches = [
            {"ids": tf.constant(random.integers(0, BIG_ROWS, [batch_size, 1]))}
            for _ in range(16)
        ]
        fused = {
            name: _caller(served[name], batches) for name in (*FUSED, EMPTY)
        }
        if peer is not None:
            for kind, name in FBGEMM.items():
                fused[name] = _peer_caller(peer, kind, batch_size)
        big = {name: _caller(served[name], big_batches) for name in BIG}
        for contestants, calls in ((fused, rounds), (big, MOST_BIG_CALLS)):
            for name, values in timing.interleave(
                contestants, calls, warm_up=min(20, calls)
            ).items():
                times[f"{name}/{batch_size}"] = values.tolist()
    if peer is not None:
        peer.close()
    return times


def _peer_caller(
    peer: Any, kind: str, batch_size: int
) -> Callable[[int], object]:
    from benchmarks import timing

    def call(number: int) -> timing.Milliseconds:
        passed = peer.ask("call", kind, batch_size, number)
        # The threads of the other process wait actively for a few milliseconds.
        # They must not slow down the next contestant.
        time.sleep(0.003)
        return timing.Milliseconds(passed)

    return call


def _caller(
    served: Callable[..., Any], batches: list[dict[str, Any]]
) -> Callable[[int], Any]:
    return lambda call: served(**batches[call % len(batches)])


def report(distribution: str, rounds: int) -> tuple[rich.console.Group, dict]:
    """Runs the benchmark and returns tables of percentiles and ratios."""
    del distribution
    # The processes that export and ask do not import embedding_step, which
    # imports tf_layoutmap.
    from benchmarks import embedding_step

    torch_python = embedding_step.TORCH_PYTHON.value or ""
    with tempfile.TemporaryDirectory() as folder:
        sizes = json.loads(_in_process("export", folder))
        times = json.loads(
            _in_process("ask", folder, str(max(rounds, 500)), torch_python)
        )
    figures = {
        key: {
            "p50": float(np.percentile(values, 50)),
            "p99": float(np.percentile(values, 99)),
        }
        for key, values in times.items()
    }
    ratios = fbgemm_ratios(figures)
    tables = [_table(figures, sizes)]
    if ratios:
        tables.append(_ratio_table(ratios))
    return rich.console.Group(*tables), {
        **figures,
        "bytes": sizes,
        "relative to fbgemm": ratios,
    }


def fbgemm_ratios(
    figures: dict[str, dict[str, float]],
) -> dict[str, dict[str, float]]:
    """Returns each percentile of an export, relative to FBGEMM's.

    Args:
      figures: Percentiles by contestant and batch size, such as "int8/128".

    Returns:
      Ratios by type of the rows and batch size. Empty if FBGEMM was not
      measured.
    """
    return {
        f"{kind}/{size}": {
            percentile: figures[f"{kind}/{size}"][percentile]
            / figures[f"{name}/{size}"][percentile]
            for percentile in PERCENTILES
        }
        for kind, name in FBGEMM.items()
        for size in BATCH_SIZES
        if f"{name}/{size}" in figures
    }


def _percentile_columns() -> list[str]:
    return [
        f"{percentile}, batch {size}"
        for size in BATCH_SIZES
        for percentile in PERCENTILES
    ]


def _table(
    figures: dict[str, dict[str, float]], sizes: dict[str, int]
) -> rich.table.Table:
    table = rich.table.Table(
        title=f"Serving {NUM_TABLES} tables of {NUM_ROWS:,} x {DIM}, and one "
        f"of {BIG_ROWS:,} x {DIM}"
    )
    for column in ("contestant", "MB", *_percentile_columns()):
        table.add_column(column, justify="right")
    for names in ((*FUSED, EMPTY, *FBGEMM.values()), BIG):
        for name in names:
            if f"{name}/{BATCH_SIZES[0]}" not in figures:
                continue
            cells = []
            for size in BATCH_SIZES:
                for percentile in PERCENTILES:
                    milliseconds = figures[f"{name}/{size}"][percentile]
                    ratio = (
                        milliseconds / figures[f"{names[0]}/{size}"][percentile]
                    )
                    cells.append(f"{milliseconds:.2f} ms ({ratio:.3f})")
            megabytes = f"{sizes[name] / 1e6:.1f}" if name in sizes else ""
            table.add_row(name, megabytes, *cells)
    return table


def _ratio_table(ratios: dict[str, dict[str, float]]) -> rich.table.Table:
    table = rich.table.Table(title="Exports, relative to FBGEMM")
    for column in ("rows", *_percentile_columns()):
        table.add_column(column, justify="right")
    for kind in FBGEMM:
        table.add_row(
            kind,
            *(
                f"{ratios[f'{kind}/{size}'][percentile]:.1f}"
                for size in BATCH_SIZES
                for percentile in PERCENTILES
            ),
        )
    return table


def _in_process(command: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving", command, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()[-1]


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[2])
    print(
        json.dumps(
            _export_all(path)
            if sys.argv[1] == "export"
            else _ask(path, int(sys.argv[3]), sys.argv[4])
        )
    )
