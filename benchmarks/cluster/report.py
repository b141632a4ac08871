"""Training steps over parameter servers: how fast, and what they send.

26 tables x 16 with one id each and 4,096 samples, Adagrad: in one process, and
with 1 worker and 1 server, 1 and 2, 2 and 2, each process on this machine.

* `ours`: `tlm.TPUEmbedding`; `bfloat16`: with rows and gradients in 16 bits on
  the wire;
* `stock`: `tf.nn.embedding_lookup_sparse` under the same strategy and
  partitioner, and `ResourceSparseApplyAdagradV2` of each shard, where it is;
* `keras`: `keras.layers.Embedding` of a table of 1 M rows, and that update.

Bytes and calls are those of all servers and workers, counted by a proxy before
each; nothing is before those that are timed. Less what an empty step takes,
calls are those of tables.
"""

import contextlib
import time

import numpy as np
import rich.console
import rich.table

from benchmarks import timing
from benchmarks.cluster import contestants, processes, proxy

# Workers and servers.
SHAPES = {
    "1 process": (0, 0),
    "1 + 1": (1, 1),
    "1 + 2": (1, 2),
    "2 + 2": (2, 2),
}
NUM_STEPS = 10  # Of a contestant in each round.
# Until what belongs to a step has gone through a proxy.
_QUIET_SECONDS = 0.3

_TABLES = ("ours", "bfloat16", "stock")
_COUNTED = {
    (1, 2): {
        "26 tables": ("empty", *_TABLES),
        "8 tables": ("ours", "stock"),
        "64 tables": ("ours", "stock"),
    },
    (1, 1): {"1 M rows": (*_TABLES, "keras")},
}
# Where processor time is counted, and of how many steps.
_BUSY_SHAPE, _BUSY_STEPS = "1 + 2", 50


def measure_speed(
    distribution: str,
    rounds: int,
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, float]]]:
    """Milliseconds of `NUM_STEPS` steps, as `"1 + 2.ours"`, and of processors.

    The second: of a step in `_BUSY_SHAPE`, by contestant and job, of all its
    processes.
    """
    timed, busy = {}, {}
    with contextlib.ExitStack() as stack:
        clusters = {
            shape: stack.enter_context(processes.Cluster(*sizes))
            for shape, sizes in SHAPES.items()
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
    """Who is timed there: nothing travels in one process."""
    return ("ours", "stock") if shape == "1 process" else ("empty", *_TABLES)


def measure_traffic(distribution: str) -> dict[str, dict[str, float]]:
    """Bytes and calls of a step, as `"26 tables.ours"`."""
    found = {}
    for sizes, opened in _COUNTED.items():
        with processes.Cluster(*sizes, counts=True) as cluster:
            for workload, names in opened.items():
                cluster.open(workload, distribution, names)
                for name in names:
                    one = _count(cluster, name)
                    found[f"{workload}.{name}"] = {
                        "bytes": one.num_bytes / NUM_STEPS,
                        "calls": one.num_calls / NUM_STEPS,
                    }
    return found


def _count(cluster: processes.Cluster, name: str) -> proxy.Traffic:
    cluster.steps(name, 2)  # Traces, and connects the processes.
    time.sleep(_QUIET_SECONDS)
    before = cluster.traffic()
    cluster.steps(name, NUM_STEPS)
    time.sleep(_QUIET_SECONDS)
    return cluster.traffic() - before


def report(
    distribution: str,
    rounds: int,
) -> tuple[rich.console.Group, dict]:
    """Measures; puts speeds, processor times, and bytes and calls in tables."""
    times, busy = measure_speed(distribution, rounds)
    traffic = measure_traffic(distribution)
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
        ),
        {
            "examples_per_second": figures,
            "processor_ms_per_step": busy,
            "per_step": traffic,
            "empty_steps_per_second": {
                shape: 1e3
                * NUM_STEPS
                / float(np.median(times[f"{shape}.empty"]))
                for shape in SHAPES
                if f"{shape}.empty" in times
            },
        },
    )


def _speed_table(
    distribution: str, times: dict[str, np.ndarray], figures: dict[str, dict]
) -> rich.table.Table:
    table = rich.table.Table(
        title=f"26 tables, {distribution} ids: thousands of examples a second, "
        "quartiles in brackets"
    )
    for column in (
        "workers + servers",
        *_TABLES,
        "ours / stock",
        "bfloat16 / stock",
    ):
        table.add_column(column, justify="right")

    def cell(shape: str, name: str) -> str:
        found = figures.get(f"{shape}.{name}")
        if not found:
            return ""
        low, high = (one / 1e3 for one in found["quartiles"])
        return f"{found['median'] / 1e3:.0f} [{low:.0f}, {high:.0f}]"

    def ratio(shape: str, name: str) -> str:
        if f"{shape}.{name}" not in times:
            return ""
        # Of each round, so that what disturbed both is not in it.
        ratios = times[f"{shape}.stock"] / times[f"{shape}.{name}"]
        return f"{np.median(ratios):.2f}"

    for shape in SHAPES:
        table.add_row(
            shape,
            *(cell(shape, one) for one in _TABLES),
            ratio(shape, "ours"),
            ratio(shape, "bfloat16"),
        )
    return table


def _busy_table(
    distribution: str, busy: dict[str, dict[str, float]]
) -> rich.table.Table:
    table = rich.table.Table(
        title=f"{_BUSY_SHAPE}, 26 tables, {distribution} ids: milliseconds of "
        "processors in a step"
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
    table = rich.table.Table(title=f"A step on the wire, {distribution} ids")
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
                one = traffic[f"{workload}.{name}"]
                table.add_row(
                    f"{num_workers} + {num_servers}",
                    workload,
                    name,
                    f"{one['bytes'] / 1e6:.3f}",
                    f"{one['bytes'] / stock:.3f}",
                    f"{one['calls']:.1f}",
                )
    return table
