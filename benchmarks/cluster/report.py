"""Training steps on parameter servers: speed and network traffic.

The model has 26 tables with 16 columns and Adagrad, and a batch has 4,096
samples with one id per table. The model is trained in one process, and in
clusters of 1 worker and 1 server, 1 worker and 2 servers, and 2 workers and 2
servers. All processes run on the local machine. Contestants:

* `ours`: `tlm.TPUEmbedding`.
* `bfloat16`: `tlm.TPUEmbedding` that sends rows and gradients in 16 bits.
* `stock`: `tf.nn.embedding_lookup_sparse` under the same strategy and
  partitioner, and `ResourceSparseApplyAdagradV2` on the device of each shard.
* `keras`: `keras.layers.Embedding` with a table of 1 M rows and Adagrad.
* `ours:16:0`: `ours` with 16 steps per closure.
* `empty`: a step without tables. The calls of all other contestants include
  the calls of an empty step.

In separate runs, proxies in front of all servers and workers count bytes and
calls. The runs that measure time do not use proxies.

`sizes.py` measures how the time of a step depends on the number of tables,
servers, and steps per closure.
"""

import contextlib
import time

import numpy as np
import rich.console
import rich.table

from benchmarks import timing
from benchmarks.cluster import contestants, processes, proxy
from benchmarks.cluster import sizes as step_sizes

NUM_STEPS = 10  # Number of steps of each contestant in a round.
# Waiting time before traffic is read, so that all bytes of a step have passed
# the proxies.
_QUIET_SECONDS = 0.3

_TABLES = ("ours", "bfloat16", "stock")
_COUNTED = {
    (1, 2): {
        "26 tables": ("empty", *_TABLES),
        "8 tables": ("ours", "ours:16:0", "stock"),
        "64 tables": ("ours", "ours:16:0", "stock"),
    },
    (1, 1): {"1 M rows": (*_TABLES, "keras")},
}
# Number of steps whose traffic is counted, a multiple of the steps per closure.
_COUNTED_STEPS = 32
# The cluster in which processor time is measured, and the number of steps.
_BUSY_SHAPE, _BUSY_STEPS = "1 + 2", 50


def measure_speed(
    distribution: str,
    rounds: int,
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, float]]]:
    """Measures elapsed time and processor time of steps.

    Returns:
      Two dictionaries. The first dictionary maps keys such as `"1 + 2.ours"` to
      the milliseconds of `NUM_STEPS` steps, `[rounds]`. The second dictionary
      maps contestants and jobs to the milliseconds of processor time of one
      step in the cluster `_BUSY_SHAPE`, summed over the processes of the job.
    """
    timed, busy = {}, {}
    with contextlib.ExitStack() as stack:
        clusters = {
            shape: stack.enter_context(processes.Cluster(*sizes))
            for shape, sizes in step_sizes.SHAPES.items()
        }
        for shape, cluster in clusters.items():
            names = contestants_of(shape)
            cluster.open("26 tables", distribution, names)
            for name in names:
                timed[f"{shape}.{name}"] = (
                    lambda _, cluster=cluster, name=name: timing.Milliseconds(
                        cluster.steps(name, NUM_STEPS)
                    )
                )
        times = timing.interleave(timed, rounds)
        cluster = clusters[_BUSY_SHAPE]
        for name in contestants_of(_BUSY_SHAPE):
            before = cluster.processor_milliseconds()
            cluster.steps(name, _BUSY_STEPS)
            after = cluster.processor_milliseconds()
            busy[name] = {
                job: (after[job] - before[job]) / _BUSY_STEPS for job in after
            }
        return times, busy


def contestants_of(shape: str) -> tuple[str, ...]:
    """Returns the contestants whose time is measured in the given cluster.

    Contestants that measure the network are omitted if `shape` is a single
    process.
    """
    return ("ours", "stock") if shape == "1 process" else ("empty", *_TABLES)


def measure_traffic(distribution: str) -> dict[str, dict[str, float]]:
    """Returns bytes and calls per step, with keys such as `"1 M rows.ours"`."""
    traffic = {}
    for sizes, opened in _COUNTED.items():
        with processes.Cluster(*sizes, counts=True) as cluster:
            for workload, names in opened.items():
                cluster.open(workload, distribution, names)
                for name in names:
                    counts = _count(cluster, name)
                    traffic[f"{workload}.{name}"] = {
                        "bytes": counts.num_bytes / _COUNTED_STEPS,
                        "calls": counts.num_calls / _COUNTED_STEPS,
                    }
    return traffic


def _count(cluster: processes.Cluster, name: str) -> proxy.Traffic:
    # The first steps trace the function and connect the processes.
    cluster.steps(name, _COUNTED_STEPS)
    time.sleep(_QUIET_SECONDS)
    before = cluster.traffic()
    cluster.steps(name, _COUNTED_STEPS)
    time.sleep(_QUIET_SECONDS)
    return cluster.traffic() - before


def report(
    distribution: str,
    rounds: int,
) -> tuple[rich.console.Group, dict]:
    """Runs the benchmark and returns its tables and results."""
    times, busy = measure_speed(distribution, rounds)
    traffic = measure_traffic(distribution)
    sizes_table, by_size = step_sizes.report(distribution, rounds)
    examples = contestants.WORKLOADS["26 tables"].num_samples * NUM_STEPS
    figures = {}
    for name, values in times.items():
        low, middle, high = np.quantile(
            1e3 * examples / values, [0.25, 0.5, 0.75]
        )
        figures[name] = {"median": middle, "quartiles": [low, high]}
    return (
        rich.console.Group(
            _speed_table(distribution, times, figures),
            _busy_table(distribution, busy),
            _traffic_table(distribution, traffic),
            sizes_table,
        ),
        {
            "examples_per_second": figures,
            "processor_ms_per_step": busy,
            "per_step": traffic,
            "by_size": by_size,
            "empty_steps_per_second": {
                shape: 1e3
                * NUM_STEPS
                / float(np.median(times[f"{shape}.empty"]))
                for shape in step_sizes.SHAPES
                if f"{shape}.empty" in times
            },
        },
    )


def _speed_table(
    distribution: str, times: dict[str, np.ndarray], figures: dict[str, dict]
) -> rich.table.Table:
    table = rich.table.Table(
        title=f"26 tables, {distribution} ids: thousands of examples per "
        "second, quartiles in brackets"
    )
    for column in (
        "workers + servers",
        *_TABLES,
        "ours / stock",
        "bfloat16 / stock",
    ):
        table.add_column(column, justify="right")

    def cell(shape: str, name: str) -> str:
        figure = figures.get(f"{shape}.{name}")
        if not figure:
            return ""
        low, high = (quartile / 1e3 for quartile in figure["quartiles"])
        return f"{figure['median'] / 1e3:.0f} [{low:.0f}, {high:.0f}]"

    def ratio(shape: str, name: str) -> str:
        if f"{shape}.{name}" not in times:
            return ""
        # Ratios are computed per round, because other load on the machine
        # affects both contestants of a round equally.
        ratios = times[f"{shape}.stock"] / times[f"{shape}.{name}"]
        return f"{np.median(ratios):.2f}"

    for shape in step_sizes.SHAPES:
        table.add_row(
            shape,
            *(cell(shape, name) for name in _TABLES),
            ratio(shape, "ours"),
            ratio(shape, "bfloat16"),
        )
    return table


def _busy_table(
    distribution: str, busy: dict[str, dict[str, float]]
) -> rich.table.Table:
    table = rich.table.Table(
        title=f"{_BUSY_SHAPE}, 26 tables, {distribution} ids: milliseconds of "
        "processor time per step"
    )
    jobs = list(next(iter(busy.values())))
    for column in ("", *jobs):
        table.add_column(column, justify="right" if column else "left")
    for name, by_job in busy.items():
        table.add_row(name, *(f"{by_job[job]:.1f}" for job in jobs))
    return table


def _traffic_table(
    distribution: str, traffic: dict[str, dict[str, float]]
) -> rich.table.Table:
    table = rich.table.Table(
        title=f"Network traffic of a step, {distribution} ids"
    )
    for column in (
        "workers + servers",
        "workload",
        "",
        "MB",
        "of stock",
        "calls",
    ):
        table.add_column(
            column,
            justify="right"
            if column in ("MB", "of stock", "calls")
            else "left",
        )
    for (num_workers, num_servers), opened in _COUNTED.items():
        for workload, names in opened.items():
            stock = traffic[f"{workload}.stock"]["bytes"]
            for name in names:
                counts = traffic[f"{workload}.{name}"]
                table.add_row(
                    f"{num_workers} + {num_servers}",
                    workload,
                    name,
                    f"{counts['bytes'] / 1e6:.3f}",
                    f"{counts['bytes'] / stock:.3f}",
                    f"{counts['calls']:.1f}",
                )
    return table
