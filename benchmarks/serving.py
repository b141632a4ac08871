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

The benchmark measures the p50 and the p99 of single calls. The calls of all
contestants are interleaved. Ids are always uniform, so `--distributions` has no
effect.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import rich.table

NUM_TABLES, NUM_ROWS, DIM = 26, 50_000, 64
BIG_ROWS = 1_000_000
BATCH_SIZES = (1, 128)
FUSED = ("model.export", "float32", "int8", "int4")
BIG = ("keras int4", "tlm int4")
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
    found = tlm.layers.TPUEmbedding(
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
        keras.layers.Dense(1)(keras.layers.Concatenate()(list(found.values()))),
    )
    model.export(folder / "model.export", verbose=False)
    for kind in FUSED[1:]:
        tlm.export(model, folder / kind, kind)
    del model, found

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


def _ask(folder: pathlib.Path, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each call, by contestant and batch size."""
    # With this entry, an import of tf_layoutmap fails as if the package were
    # not installed.
    sys.modules["tf_layoutmap"] = None  # pyright: ignore[reportArgumentType]
    import tensorflow as tf

    from benchmarks import timing

    random = np.random.default_rng(0)
    # The loaded objects keep the variables of their signatures alive.
    loaded = {
        name: tf.saved_model.load(folder / name) for name in (*FUSED, *BIG)
    }
    served = {
        name: one.signatures["serving_default"] for name, one in loaded.items()
    }
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
        for names, calls in ((FUSED, rounds), (BIG, MOST_BIG_CALLS)):
            inputs = batches if names is FUSED else big_batches
            for name, values in timing.interleave(
                {name: _caller(served[name], inputs) for name in names},
                calls,
                warm_up=min(20, calls),
            ).items():
                times[f"{name}/{batch_size}"] = values.tolist()
    return times


def _caller(
    served: Callable[..., Any], batches: list[dict[str, Any]]
) -> Callable[[int], Any]:
    return lambda call: served(**batches[call % len(batches)])


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of percentiles and ratios."""
    del distribution
    with tempfile.TemporaryDirectory() as folder:
        sizes = json.loads(_in_process("export", folder, rounds))
        times = json.loads(_in_process("ask", folder, max(rounds, 500)))
    found = {
        key: {
            "p50": float(np.percentile(values, 50)),
            "p99": float(np.percentile(values, 99)),
        }
        for key, values in times.items()
    }
    table = rich.table.Table(
        title=f"Serving {NUM_TABLES} tables of {NUM_ROWS:,} x {DIM}, and one "
        f"of {BIG_ROWS:,} x {DIM}"
    )
    for column in (
        "contestant",
        "MB",
        *(
            f"{percentile}, batch {size}"
            for size in BATCH_SIZES
            for percentile in ("p50", "p99")
        ),
    ):
        table.add_column(column, justify="right")
    for names in (FUSED, BIG):
        for name in names:
            cells = []
            for size in BATCH_SIZES:
                for percentile in ("p50", "p99"):
                    own = found[f"{name}/{size}"][percentile]
                    ratio = own / found[f"{names[0]}/{size}"][percentile]
                    cells.append(f"{own:.2f} ms ({ratio:.3f})")
            table.add_row(name, f"{sizes[name] / 1e6:.1f}", *cells)
    return table, {**found, "bytes": sizes}


def _in_process(command: str, folder: str, rounds: int) -> str:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.serving",
            command,
            folder,
            str(rounds),
        ],
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
            else _ask(path, int(sys.argv[3]))
        )
    )
