"""Growth of the time and memory of a step with the size of its tables.

Each sweep changes one size of a workload: the rows of a table, the number of
tables, the ids of a sample or the columns. For each size and number of threads,
a new process creates a `tlm.TPUEmbedding` with Adagrad, and measures lookups
and training steps with packed batches and constant gradients:

* `lookup`, `step`: median of the calls, and the same for the plain C++ loop of
  `roof.py`, which reads and writes the same rows.
* `create`: duration of the creation of the tables and of their slot variables.
* `peak`: the peak memory of the process, without the memory before the creation
  of the tables.

A step or a peak grows faster than its bytes if its ratio to the roof, or to the
bytes of the tables, increases. `--growth` selects sweeps, and
`--growth_pictures` is a folder for one picture per sweep. The largest table
requires 10 GB of memory. A size is skipped if less memory is available.
"""

import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks import line_picture, workloads

THREADS = (1, 2)
NUM_BATCHES = 4
# A measurement ends after this number of seconds, but not before this number of
# calls.
SECONDS, FEWEST_CALLS, MOST_CALLS = 0.8, 15, 300
_MEMORY = pathlib.Path("/proc/meminfo")
_STATUS = pathlib.Path("/proc/self/status")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A series of workloads.

    Attributes:
      label: Name of the size that changes.
      sizes: Values of this size.
      workload: Function that returns the workload of a size and a distribution
        of ids.
    """

    label: str
    sizes: Sequence[int]
    workload: Callable[[int, str], workloads.Workload]


def _workload(
    num_rows: Sequence[int], dim: int, num_samples: int, ids: int, kind: str
) -> workloads.Workload:
    return workloads.Workload(
        "growth", tuple(num_rows), dim, num_samples, ids, ids, kind
    )


SWEEPS = {
    "rows": Sweep(
        "rows of the table",
        (10**5, 10**6, 10**7, 10**8),
        lambda size, kind: _workload([size], 8, 4096, 10, kind),
    ),
    "tables": Sweep(
        "tables",
        (1, 4, 16, 64, 256, 512),
        lambda size, kind: _workload([10_000] * size, 16, 1024, 1, kind),
    ),
    "ids": Sweep(
        "ids per sample",
        (1, 4, 16, 64, 256),
        lambda size, kind: _workload([1_000_000], 32, 1024, size, kind),
    ),
    "dim": Sweep(
        "columns",
        (8, 16, 32, 64, 128, 256, 512),
        lambda size, kind: _workload([200_000], size, 2048, 10, kind),
    ),
}

_SWEEPS = flags.DEFINE_multi_enum(
    "growth", list(SWEEPS), list(SWEEPS), "Sweeps of `growth`."
)
_PICTURES = flags.DEFINE_string(
    "growth_pictures", None, "Output folder for the pictures of `growth`."
)


def table_bytes(workload: workloads.Workload) -> int:
    """Returns the bytes of all tables and of their slot variables."""
    return 2 * sum(workload.num_rows) * workload.dim * np.float32().nbytes


def measure(sweep: str, size: int, distribution: str, threads: int) -> dict:
    """Measures a workload in this process.

    Returns:
      Milliseconds of `lookup`, `step`, `roof.lookup` and `roof.step`; seconds
      of `create`; bytes of `tables` and `peak`.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)

    from benchmarks import roof

    workload = SWEEPS[sweep].workload(size, distribution)
    batches = [workload.draw(seed) for seed in range(NUM_BATCHES)]
    figures = _ours(workload, batches)
    gc.collect()
    return {**figures, **_roof(roof, workload, batches, threads)}


def _ours(workload: workloads.Workload, batches: list) -> dict[str, float]:
    """Measures this package, and frees the tables."""
    import tf_layoutmap as tlm
    from benchmarks import step_contestants

    packed = [tlm.pack(step_contestants.ragged(batch)) for batch in batches]
    gradients = step_contestants.draw_gradients(workload)
    # This attribute imports the module that defines it.
    _ = tlm.TPUEmbedding
    before = _resident("VmRSS")
    start = time.perf_counter()
    ours = step_contestants.Ours(workload, gradients)
    figures = {"create": time.perf_counter() - start}
    for name, call in (("lookup", ours.lookup), ("step", ours.train)):
        figures[name] = _median(
            lambda i, call=call: _wait(call(packed[i % NUM_BATCHES]))
        )
    figures["peak"] = _resident("VmHWM") - before
    figures["tables"] = table_bytes(workload)
    return figures


def _wait(tensors):
    """Waits for the end of all operations."""
    import tensorflow as tf

    tf.test.experimental.sync_devices()
    return tensors


def _roof(roof, workload, batches, threads: int) -> dict[str, float]:
    from benchmarks import step_contestants

    machine = roof.load().Roof(
        workload.num_rows, workload.dim, workload.num_samples, threads
    )
    lists = [tuple(map(list, zip(*batch))) for batch in batches]
    groups = [step_contestants.grouped(batch) for batch in batches]
    lookup = _median(lambda i: machine.lookup(*lists[i % NUM_BATCHES]), True)
    update = _median(lambda i: machine.update(*groups[i % NUM_BATCHES]), True)
    return {"roof.lookup": lookup, "roof.step": lookup + update}


def _median(call: Callable[[int], object], is_timer: bool = False) -> float:
    """Returns the median of the milliseconds of calls.

    Args:
      call: Function of the index of the call.
      is_timer: Whether the function returns the milliseconds.
    """
    for i in range(3):
        call(i)
    times, begin = [], time.perf_counter()
    while len(times) < MOST_CALLS and (
        len(times) < FEWEST_CALLS or time.perf_counter() - begin < SECONDS
    ):
        start = time.perf_counter()
        result = call(len(times))
        passed = 1e3 * (time.perf_counter() - start)
        times.append(result if is_timer else passed)
        del result
    return float(np.median(times))


def _resident(name: str) -> int:
    """Returns the bytes of a line of `/proc/self/status`."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} must have a line {name!r}.")


def _available() -> int:
    """Returns the bytes of memory that new processes can use."""
    for line in _MEMORY.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_MEMORY} must have a line 'MemAvailable'.")


def needed_bytes(workload: workloads.Workload) -> int:
    """Returns the bytes that a process of a workload needs at most."""
    return int(1.2 * table_bytes(workload)) + 2**30


def in_process(
    sweep: str, size: int, distribution: str, threads: int
) -> dict | None:
    """Measures a workload in a new process.

    Returns:
      The result of `measure`, or None if too little memory is available.
    """
    if _available() < needed_bytes(SWEEPS[sweep].workload(size, distribution)):
        return None
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.growth",
            *map(str, (sweep, size, distribution, threads)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def run(sweep: str, distribution: str, measure_one=in_process) -> list[dict]:
    """Measures all sizes of a sweep.

    Returns:
      The results of `measure`, with `size` and `threads`.
    """
    points = []
    for size in SWEEPS[sweep].sizes:
        for threads in THREADS:
            figures = measure_one(sweep, size, distribution, threads)
            if figures is not None:
                points.append({"size": size, "threads": threads, **figures})
    return points


def excess(points: list[dict], value: str, bound: str) -> float:
    """Returns how much faster a value grows than its bound.

    >>> excess([{"step": 2, "roof": 1}, {"step": 3, "roof": 2},
    ...         {"step": 9, "roof": 4}], "step", "roof")
    1.5

    Args:
      points: Results in the order of their sizes.
      value: Name of the value.
      bound: Name of the bound.

    Returns:
      The largest quotient of the ratio `value / bound` at one size and the
      ratio at a smaller size; 1 if the ratio never increases.
    """
    largest, smallest = 1.0, np.inf
    for point in points:
        ratio = point[value] / point[bound]
        smallest = min(smallest, ratio)
        largest = max(largest, ratio / smallest)
    return largest


def charts(sweep: str, points: list[dict]) -> list[line_picture.Chart]:
    """Returns the chart of the times and the chart of the memory."""
    label = SWEEPS[sweep].label

    def line(name, value, threads, color, is_dashed=False, scale=1.0):
        return line_picture.Line(
            name,
            [
                (point["size"], point[value] * scale)
                for point in points
                if point["threads"] == threads
            ],
            color,
            is_dashed,
        )

    times, memory = [], []
    for i, threads in enumerate(THREADS):
        many = f"{threads} thread" + ("s" if threads > 1 else "")
        for name, color in (("step", i), ("lookup", i + 2)):
            times.append(line(f"{name}, {many}", name, threads, color))
            bound = f"roof of a {name}, {many}"
            times.append(line(bound, f"roof.{name}", threads, color, True))
        memory.append(line(f"peak, {many}", "peak", threads, i, False, 1e-6))
    memory.append(
        line("tables and slot variables", "tables", THREADS[0], 4, True, 1e-6)
    )
    return [
        line_picture.Chart("time, ms", label, times),
        line_picture.Chart("memory, MB", label, memory),
    ]


def _table(sweep: str, distribution: str, points: list[dict]):
    table = rich.table.Table(
        title=f"{sweep}: "
        f"{SWEEPS[sweep].workload(SWEEPS[sweep].sizes[-1], distribution)}"
    )
    for column in (
        SWEEPS[sweep].label,
        "threads",
        "lookup",
        "/ roof",
        "step",
        "/ roof",
        "create",
        "GB/s",
        "peak",
        "/ tables",
    ):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            f"{point['size']:,}",
            str(point["threads"]),
            f"{point['lookup']:.2f} ms",
            f"{point['lookup'] / point['roof.lookup']:.2f}",
            f"{point['step']:.2f} ms",
            f"{point['step'] / point['roof.step']:.2f}",
            f"{point['create']:.2f} s",
            f"{point['tables'] / point['create'] / 1e9:.2f}",
            f"{point['peak'] / 1e6:,.0f} MB",
            f"{point['peak'] / point['tables']:.2f}",
        )
    return table


def report(distribution: str, rounds: int):
    """Runs the benchmark and returns tables of times and memory."""
    del rounds
    tables, results = [], {}
    for sweep in _SWEEPS.value:
        points = run(sweep, distribution)
        results[sweep] = points
        tables.append(_table(sweep, distribution, points))
        if _PICTURES.value:
            write_picture(_PICTURES.value, sweep, points)
    return rich.console.Group(*tables), results


def write_picture(folder: str, sweep: str, points: list[dict]) -> None:
    """Writes the picture of a sweep to `growth_<sweep>.svg` in a folder."""
    workload = SWEEPS[sweep].workload
    sizes = SWEEPS[sweep].sizes
    title = f"Growth with the {sweep}: {workload(sizes[0], 'uniform')} at first"
    path = pathlib.Path(folder) / f"growth_{sweep}.svg"
    path.write_text(line_picture.svg(charts(sweep, points), title))


def main(sweep: str, size: str, distribution: str, threads: str) -> None:
    """Measures a workload and prints the result."""
    print(json.dumps(measure(sweep, int(size), distribution, int(threads))))


if __name__ == "__main__":
    main(*sys.argv[1:])
