"""Training steps over parameter servers: how fast, and what they send.

26 tables x 16 with one id each and 4,096 samples, Adagrad: in one process, and
with 1 worker and 1 server, 1 and 2, 2 and 2, each process on this machine.

* `ours`: `tlm.TPUEmbedding`;
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
SHAPES = {"1 process": (0, 0), "1 + 1": (1, 1), "1 + 2": (1, 2),
          "2 + 2": (2, 2)}
NUM_STEPS = 10  # Of a contestant in each round.
# Until what belongs to a step has gone through a proxy.
_QUIET_SECONDS = 0.3

_TABLES = ("ours", "stock")
_COUNTED = {(1, 2): {"26 tables": ("empty", *_TABLES),
                     "8 tables": ("ours", "stock"),
                     "64 tables": ("ours", "stock")},
            (1, 1): {"1 M rows": ("ours", "stock", "keras")}}


def measure_speed(distribution: str, rounds: int) -> dict[str, np.ndarray]:
    """Milliseconds of `NUM_STEPS` steps, as `"1 + 2.ours"`."""
    timed = {}
    with contextlib.ExitStack() as stack:
        for shape, sizes in SHAPES.items():
            cluster = stack.enter_context(processes.Cluster(*sizes))
            cluster.open("26 tables", distribution, _TABLES)
            for name in _TABLES:
                timed[f"{shape}.{name}"] = (
                    lambda _, cluster=cluster, name=name:
                    timing.Milliseconds(cluster.steps(name, NUM_STEPS)))
        return timing.interleave(timed, rounds)


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
                        "calls": one.num_calls / NUM_STEPS}
    return found


def _count(cluster: processes.Cluster, name: str) -> proxy.Traffic:
    cluster.steps(name, 2)  # Traces, and connects the processes.
    time.sleep(_QUIET_SECONDS)
    before = cluster.traffic()
    cluster.steps(name, NUM_STEPS)
    time.sleep(_QUIET_SECONDS)
    return cluster.traffic() - before


def report(
    distribution: str, rounds: int,
) -> tuple[rich.console.Group, dict]:
    """Measures; puts speeds in one table, bytes and calls in another."""
    times = measure_speed(distribution, rounds)
    traffic = measure_traffic(distribution)
    examples = contestants.WORKLOADS["26 tables"].num_samples * NUM_STEPS
    figures = {}
    for name, values in times.items():
        low, middle, high = np.quantile(
            1e3 * examples / values, [0.25, 0.5, 0.75])
        figures[name] = {"median": middle, "quartiles": [low, high]}
    return (rich.console.Group(_speed_table(distribution, times, figures),
                               _traffic_table(distribution, traffic)),
            {"examples_per_second": figures, "per_step": traffic})


def _speed_table(distribution: str, times: dict[str, np.ndarray],
                 figures: dict[str, dict]) -> rich.table.Table:
    table = rich.table.Table(
        title=f"26 tables, {distribution} ids: thousands of examples a second, "
              "quartiles in brackets")
    for column in ("workers + servers", *_TABLES, "ours / stock"):
        table.add_column(column, justify="right")

    def cell(key: str) -> str:
        low, high = (one / 1e3 for one in figures[key]["quartiles"])
        return f"{figures[key]['median'] / 1e3:.0f} [{low:.0f}, {high:.0f}]"

    def ratio(shape: str, name: str) -> str:
        # Of each round, so that what disturbed both is not in it.
        ratios = times[f"{shape}.stock"] / times[f"{shape}.{name}"]
        return f"{np.median(ratios):.2f}"

    for shape in SHAPES:
        table.add_row(shape, *(cell(f"{shape}.{one}") for one in _TABLES),
                      ratio(shape, "ours"))
    return table


def _traffic_table(distribution: str,
                   traffic: dict[str, dict[str, float]]) -> rich.table.Table:
    table = rich.table.Table(title=f"A step on the wire, {distribution} ids")
    for column in ("workers + servers", "workload", "", "MB", "of stock",
                   "calls"):
        table.add_column(column, justify="right" if column in (
            "MB", "of stock", "calls") else "left")
    for (num_workers, num_servers), opened in _COUNTED.items():
        for workload, names in opened.items():
            stock = traffic[f"{workload}.stock"]["bytes"]
            for name in names:
                one = traffic[f"{workload}.{name}"]
                table.add_row(
                    f"{num_workers} + {num_servers}", workload, name,
                    f"{one['bytes'] / 1e6:.3f}",
                    f"{one['bytes'] / stock:.3f}", f"{one['calls']:.1f}")
    return table
