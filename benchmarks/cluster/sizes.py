"""Step times for different numbers of tables, servers and steps per closure.

The benchmark consists of four parts:

* Steps with 16,384 ids in 8, 64 and 512 tables, with 1 worker and 2 servers.
  All tables together have the same number of rows. Each step is a function of
  the coordinator, or a step of a closure with 16 steps.
* Steps with 64 ids in 8 tables, with 1 worker and 2, 8 or 24 servers. Each
  server has shards of the tables, so each step calls all servers.
* Steps of a model with 8 tables and 2,048 samples, in one process and in
  clusters.
* Steps with 16,384 ids in 8 or 64 tables, with 1 worker and 2 servers. Each
  table is a separate layer, or all tables belong to one `TPUEmbedding`.

The second and third part are measured with one step per closure, with 16 steps
per closure, and with 16 steps per closure and one prefetched step. With the
flag `--cluster_before`, an earlier version is measured in the same rounds.
"""

import contextlib
import pathlib
from collections.abc import Iterable

import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks import timing
from benchmarks.cluster import contestants, processes

_BEFORE = flags.DEFINE_string(
    "cluster_before",
    None,
    "Folder of an earlier version with built ops, which the benchmark `cluster`"
    " compares with this version.",
)

TABLES = (8, 64, 512)
SERVERS = (2, 8, 24)
LAYERS = (8, 64)
# Number of workers and number of servers of each cluster.
SHAPES = {
    "1 process": (0, 0),
    "1 + 1": (1, 1),
    "1 + 2": (1, 2),
    "2 + 2": (2, 2),
}
_SPEED = "8 tables, 2,048 samples"
# Number of steps in a round, which is a multiple of the steps per closure.
_NUM_STEPS = 64
# The same for steps without tables. A run waits for its closures after at most
# 512 steps.
_NUM_EMPTY_STEPS = 512
# Number of steps in which processor time is measured, in units of 10 ms.
_BUSY_STEPS = 256
# Suffixes of contestants; see coordinator.py.
_CLOSURES = {
    "1 step per closure": ":1:0",
    "16 steps per closure": ":16:0",
    "16 steps, 1 prefetched": ":16:1",
}
# Time of closures without tables, from which the limit of the coordinator
# follows.
_EMPTY = "empty"
# Contestants of the part with layers.
_PER_LAYER = {
    "one layer per table": "layers:16:0",
    "one embedding": "packed:16:0",
}
_PER_TABLE = {"a function per step": "", "16 steps per closure": ":16:0"}


def _num_steps(contestant: str) -> int:
    is_empty = contestant.startswith(_EMPTY)
    return _NUM_EMPTY_STEPS if is_empty else _NUM_STEPS


class _Clusters:
    """Clusters of this version and of an earlier version."""

    def __init__(self, distribution: str):
        self._distribution = distribution
        # Processor time of the workers in the measured steps; see `measure`.
        self.worker_milliseconds: dict[str, float] = {}
        self._versions: dict[str, pathlib.Path | None] = {"": None}
        if _BEFORE.value:
            self._versions["before, "] = pathlib.Path(_BEFORE.value)

    def measure(
        self,
        cases: dict[str, tuple[tuple[int, int], str, Iterable[str]]],
        rounds: int,
    ) -> dict[str, np.ndarray]:
        """Measures contestants of several clusters in the same rounds.

        Args:
          cases: Maps the name of each cluster to its number of workers and
            servers, its workload, and its contestants.
          rounds: Number of rounds.

        Returns:
          Maps names such as `"8 servers.packed:16:0"` to the milliseconds of a
          step, `[rounds]`. The names of the earlier version start with
          `"before, "`. `worker_milliseconds` contains the processor time of
          the worker per step under the same names.
        """
        timed, opened = {}, {}
        with contextlib.ExitStack() as stack:
            for name, (sizes, workload, names) in cases.items():
                for prefix, package in self._versions.items():
                    known = [
                        contestant
                        for contestant in names
                        if not (package and contestant.endswith(":1"))
                    ]
                    cluster = stack.enter_context(
                        processes.Cluster(*sizes, package=package)
                    )
                    cluster.open(workload, self._distribution, known)
                    for contestant in known:
                        opened[f"{prefix}{name}.{contestant}"] = (
                            cluster,
                            contestant,
                        )
            for key, (cluster, contestant) in opened.items():
                timed[key] = lambda _, cluster=cluster, contestant=contestant: (
                    timing.Milliseconds(
                        cluster.steps(contestant, _num_steps(contestant))
                        / _num_steps(contestant)
                    )
                )
            times = timing.interleave(timed, rounds)
            for key, (cluster, contestant) in opened.items():
                before = cluster.processor_milliseconds()
                cluster.steps(contestant, _BUSY_STEPS)
                after = cluster.processor_milliseconds()
                if "worker" in after:
                    self.worker_milliseconds[key] = (
                        after["worker"] - before["worker"]
                    ) / _BUSY_STEPS
            return times


def report(
    distribution: str, rounds: int
) -> tuple[rich.console.Group, dict[str, dict[str, float]]]:
    """Runs the benchmark and returns its tables and medians."""
    clusters = _Clusters(distribution)
    by_tables = clusters.measure(
        {
            f"{count} tables": (
                (1, 2),
                f"16,384 ids, {count} tables",
                [f"packed{suffix}" for suffix in _PER_TABLE.values()],
            )
            for count in TABLES
        },
        rounds,
    )
    by_servers: dict[str, np.ndarray] = {}
    closures = [f"packed{suffix}" for suffix in _CLOSURES.values()]
    for group in (SERVERS[:2], SERVERS[2:]):  # Limits the memory.
        by_servers |= clusters.measure(
            {
                f"{count} servers": ((1, count), "tiny steps", closures)
                for count in group
            },
            rounds,
        )
    by_shape = clusters.measure(
        {
            name: (
                sizes,
                _SPEED,
                [
                    *(f"ours{suffix}" for suffix in _CLOSURES.values()),
                    *(f"{_EMPTY}{suffix}" for suffix in _CLOSURES.values()),
                ]
                if sizes[0]
                else ["ours"],
            )
            for name, sizes in SHAPES.items()
        },
        rounds,
    )
    by_layers = clusters.measure(
        {
            f"{count} tables": (
                (1, 2),
                f"16,384 ids, {count} tables",
                list(_PER_LAYER.values()),
            )
            for count in LAYERS
        },
        rounds,
    )
    return rich.console.Group(
        _tables_table(distribution, by_tables),
        _servers_table(distribution, by_servers, clusters.worker_milliseconds),
        _shapes_table(distribution, by_shape),
        _layers_table(distribution, by_layers),
    ), {
        part: {name: float(np.median(values)) for name, values in times.items()}
        for part, times in [
            ("tables", by_tables),
            ("servers", by_servers),
            ("shapes", by_shape),
            ("layers", by_layers),
        ]
    } | {"worker": clusters.worker_milliseconds}


def _prefixes(times: dict[str, np.ndarray]) -> list[str]:
    return [
        prefix
        for prefix in ("before, ", "")
        if any(name.startswith(prefix) for name in times)
    ]


def _table(title: str, first: str, columns: Iterable[str]) -> rich.table.Table:
    table = rich.table.Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _tables_table(
    distribution: str, times: dict[str, np.ndarray]
) -> rich.table.Table:
    low, high = TABLES[0], TABLES[-1]
    table = _table(
        f"Milliseconds of a step with 16,384 {distribution} ids, 1 worker and "
        "2 servers",
        "steps",
        [
            *(f"{count} tables" for count in TABLES),
            f"{high} / {low}",
            "us per table",
        ],
    )
    for prefix in _prefixes(times):
        for name, suffix in _PER_TABLE.items():
            of = {
                count: times[f"{prefix}{count} tables.packed{suffix}"]
                for count in TABLES
            }
            table.add_row(
                prefix + name,
                *(f"{np.median(values):.2f}" for values in of.values()),
                f"{np.median(of[high] / of[low]):.2f}",
                f"{1e3 * np.median(of[high] - of[low]) / (high - low):.1f}",
            )
    return table


def _servers_table(
    distribution: str, times: dict[str, np.ndarray], busy: dict[str, float]
) -> rich.table.Table:
    few, *more = SERVERS
    table = _table(
        f"Milliseconds of a step with 64 {distribution} ids and 1 worker, and "
        "processor time of the worker in brackets",
        "closures",
        [
            *(f"{count} servers" for count in SERVERS),
            *(f"ms per server, {few} to {count}" for count in more),
        ],
    )
    for prefix in _prefixes(times):
        for name, suffix in _CLOSURES.items():
            keys = [
                f"{prefix}{count} servers.packed{suffix}" for count in SERVERS
            ]
            if keys[0] not in times:
                continue
            columns = [
                (float(np.median(times[key])), busy[key]) for key in keys
            ]
            first, *others = columns
            table.add_row(
                prefix + name,
                *(f"{median:.2f} ({used:.2f})" for median, used in columns),
                *(
                    f"{(median - first[0]) / (size - few):.2f} "
                    f"({(used - first[1]) / (size - few):.2f})"
                    for (median, used), size in zip(others, more)
                ),
            )
    return table


def _shapes_table(
    distribution: str, times: dict[str, np.ndarray]
) -> rich.table.Table:
    samples = contestants.WORKLOADS[_SPEED].num_samples
    single = times["1 process.ours"]
    table = _table(
        f"{_SPEED}, {distribution} ids: thousands of examples per second (and "
        f"relative to one process, {samples / np.median(single):.0f}), and "
        "thousands of empty steps per second",
        "closures",
        [shape for shape in SHAPES if SHAPES[shape][0]]
        + [f"empty, {shape}" for shape in SHAPES if SHAPES[shape][0]],
    )
    for prefix in _prefixes(times):
        for name, suffix in _CLOSURES.items():
            keys = [
                f"{prefix}{shape}.ours{suffix}"
                for shape in SHAPES
                if SHAPES[shape][0]
            ]
            if keys[0] not in times:
                continue
            table.add_row(
                prefix + name,
                *(
                    f"{samples / np.median(times[key]):.0f} "
                    f"({np.median(single / times[key]):.2f})"
                    for key in keys
                ),
                *(
                    f"{1 / np.median(times[key]):.1f}"
                    for key in (
                        own_key.replace("ours", _EMPTY) for own_key in keys
                    )
                ),
            )
    return table


def _layers_table(
    distribution: str, times: dict[str, np.ndarray]
) -> rich.table.Table:
    few, many = LAYERS
    table = _table(
        f"Milliseconds of a step with 16,384 {distribution} ids, 1 worker and "
        "2 servers, with 16 steps per closure",
        "tables",
        [*(f"{count} tables" for count in LAYERS), "us per table"],
    )
    for prefix in _prefixes(times):
        for name, contestant in _PER_LAYER.items():
            of = [
                times[f"{prefix}{count} tables.{contestant}"]
                for count in LAYERS
            ]
            table.add_row(
                prefix + name,
                *(f"{np.median(values):.2f}" for values in of),
                f"{1e3 * np.median(of[1] - of[0]) / (many - few):.0f}",
            )
    return table
