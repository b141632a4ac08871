"""Time from the start of a program to the end of its first step of `fit`.

The program trains the DLRM of `criteo_dlrm`. Contestants:

* `tlm`: the model with `tlm.layers.TPUEmbedding` and tables of Criteo's sizes.
* `keras`: the same model with `keras.layers.Embedding` and small tables, which
  have at most 1,000 rows.
* `memory`: a program that only writes the bytes of the tables of `tlm` and of
  their slot variables, into new pages of 2 MiB with all cores.

Each contestant runs in a new process in each round. The parts of a time are the
import of the libraries, the creation of the tables, the creation of the rest of
the model, and the first call of `fit` with one batch. The creation of the batch
is not measured.
"""

import concurrent.futures
import dataclasses
import json
import mmap
import os
import subprocess
import sys
import time

import numpy as np
import rich.table

from benchmarks import workloads

MODELS = ("tlm", "keras")
PARTS = ("import", "tables", "model", "first step")
SMALL_ROWS = 1_000
# Number of processes of each contestant.
MOST_RUNS = 5


def small(size: workloads.Dlrm) -> workloads.Dlrm:
    """Returns the same model with at most `SMALL_ROWS` rows per table."""
    rows = tuple(min(num_rows, SMALL_ROWS) for num_rows in size.num_rows)
    return dataclasses.replace(size, num_rows=rows)


def table_bytes(size: workloads.Dlrm) -> int:
    """Returns the bytes of all tables and of one slot variable per table."""
    return 2 * sum(size.num_rows) * size.dim * np.float32().nbytes


def _start(kind: str, size: workloads.Dlrm, distribution: str) -> dict:
    """Runs the program of a model and returns the seconds of its parts."""
    seconds, start = {}, time.perf_counter()

    def finish(part: str) -> None:
        nonlocal start
        seconds[part] = time.perf_counter() - start
        start = time.perf_counter()

    import keras  # noqa: F401
    import tensorflow as tf

    if kind == "tlm":
        import tf_layoutmap as tlm

        # These attributes import the modules that define them.
        _ = tlm.pack, tlm.layers.TPUEmbedding
    finish("import")
    from benchmarks.whole_models import criteo_model

    size = dataclasses.replace(size, num_batches=1)
    if kind == "keras":
        size = small(size)
    (batch,) = criteo_model.batches(kind, size, distribution)
    data = tf.data.Dataset.from_tensors(batch)
    start = time.perf_counter()
    inputs, rows = criteo_model.look_up(kind, size)
    finish("tables")
    model = criteo_model.compiled(kind, inputs, rows, size)
    finish("model")
    model.fit(data, epochs=1, verbose=0)
    finish("first step")
    return seconds


def _write_memory(num_bytes: int) -> dict[str, float]:
    """Returns the seconds of the first and the second write of new memory."""
    seconds = {}
    with mmap.mmap(-1, num_bytes) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        values = np.frombuffer(memory, np.float32)
        blocks = np.array_split(values, 64)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            for part in ("first write", "second write"):
                start = time.perf_counter()
                list(threads.map(lambda block: block.fill(0.1), blocks))
                seconds[part] = time.perf_counter() - start
        # A memory map cannot be closed while an array refers to it.
        del values, blocks
    return seconds


def measure(
    name: str, distribution: str, runs: int
) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of each part in each run, by contestant."""
    seconds = {}
    for _ in range(runs):
        for kind in (*MODELS, "memory"):
            run = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.whole_models.start_up",
                    kind,
                    name,
                    distribution,
                ],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            parts = json.loads(run.stdout.splitlines()[-1])
            for part, value in parts.items():
                seconds.setdefault(kind, {}).setdefault(part, []).append(value)
    return seconds


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    # The size is not a flag of this module, because processes without absl also
    # import the module.
    from benchmarks.whole_models import criteo_dlrm

    table = rich.table.Table(
        title="Start of a program until the end of its first step, seconds"
    )
    for column in (
        "size",
        "contestant",
        *PARTS,
        "sum",
        "/ keras",
        "tables, GB/s",
    ):
        table.add_column(column, justify="right")
    results = {}
    for name in criteo_dlrm.SIZES.value:
        seconds = measure(name, distribution, min(rounds, MOST_RUNS))
        results[name] = {"seconds": seconds, **summary(name, seconds)}
        _add_rows(table, name, results[name])
    return table, results


def summary(name: str, seconds: dict[str, dict[str, list[float]]]) -> dict:
    """Returns sums, their ratio, and the speeds of writing tables in GB/s.

    Args:
      name: Name of the size, a key of `workloads.DLRMS`.
      seconds: Seconds of each part in each run, by contestant.
    """
    sums = {
        kind: np.sum([seconds[kind][part] for part in PARTS], axis=0)
        for kind in MODELS
    }
    gigabytes = table_bytes(workloads.DLRMS[name]) / 1e9
    speeds = {
        "tlm": seconds["tlm"]["tables"],
        **seconds["memory"],
    }
    return {
        "sum": {
            kind: float(np.median(values)) for kind, values in sums.items()
        },
        "tlm / keras": float(np.median(sums["tlm"] / sums["keras"])),
        "table GB": gigabytes,
        "GB/s": {
            part: gigabytes / float(np.median(values))
            for part, values in speeds.items()
        },
    }


def _add_rows(table: rich.table.Table, name: str, result: dict) -> None:
    for kind in MODELS:
        is_ours = kind == "tlm"
        table.add_row(
            name,
            kind,
            *(
                f"{np.median(result['seconds'][kind][part]):.2f}"
                for part in PARTS
            ),
            f"{result['sum'][kind]:.2f}",
            f"{result['tlm / keras']:.2f}" if is_ours else "1",
            f"{result['GB/s']['tlm']:.2f}" if is_ours else "",
        )
    for part in ("first write", "second write"):
        empty = [""] * (len(PARTS) + 2)
        table.add_row(name, part, *empty, f"{result['GB/s'][part]:.2f}")


def main(kind: str, name: str, distribution: str) -> None:
    """Runs one contestant and prints the seconds of its parts."""
    size = workloads.DLRMS[name]
    print(
        json.dumps(
            _write_memory(table_bytes(size))
            if kind == "memory"
            else _start(kind, size, distribution)
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
