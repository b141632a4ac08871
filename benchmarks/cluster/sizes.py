"""Step times for different numbers of tables and servers.

The benchmark measures packed batches of `tlm.TPUEmbedding`. It consists of two
parts:

* Steps with 16,384 ids in 8, 64 and 512 tables, with 1 worker and 2 servers.
  All tables together have the same number of rows.
* Steps with 64 ids in 8 tables, with 1 worker and 2 or 8 servers. Each server
  has shards of the tables, so each step calls all servers.
"""

import contextlib

import numpy as np
import rich.table

from benchmarks import timing
from benchmarks.cluster import processes

TABLES = (8, 64, 512)
SERVERS = (2, 8)
_CONTESTANT = "packed"
_NUM_STEPS = 20  # Number of steps in a round.


def measure(distribution: str, rounds: int) -> dict[str, np.ndarray]:
    """Returns the milliseconds of a step, `[rounds]`.

    The keys of the result are keys such as `"64 tables"` and `"8 servers"`.
    """
    # A cluster has the tables of one workload, so that each workload requires a
    # separate cluster.
    workloads = {
        f"{one} tables": (2, f"16,384 ids, {one} tables") for one in TABLES
    } | {f"{one} servers": (one, "tiny steps") for one in SERVERS}
    times = {}
    for keys in (
        [f"{one} tables" for one in TABLES],
        [f"{one} servers" for one in SERVERS],
    ):
        with contextlib.ExitStack() as stack:
            timed = {}
            for key in keys:
                num_servers, workload = workloads[key]
                cluster = stack.enter_context(processes.Cluster(1, num_servers))
                cluster.open(workload, distribution, [_CONTESTANT])
                timed[key] = lambda _, cluster=cluster: timing.Milliseconds(
                    cluster.steps(_CONTESTANT, _NUM_STEPS) / _NUM_STEPS
                )
            times |= timing.interleave(timed, rounds)
    return times


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns its table and results."""
    times = measure(distribution, rounds)
    medians = {key: float(np.median(values)) for key, values in times.items()}
    first, last = TABLES[0], TABLES[-1]
    few, many = SERVERS
    found = {
        "step_ms": medians,
        "tables_ratio": float(
            np.median(times[f"{last} tables"] / times[f"{first} tables"])
        ),
        "us_per_table": 1e3
        * (medians[f"{last} tables"] - medians[f"{first} tables"])
        / (last - first),
        "ms_per_server": float(
            np.median(times[f"{many} servers"] - times[f"{few} servers"])
        )
        / (many - few),
    }
    table = rich.table.Table(
        title=f"Milliseconds of a step, {distribution} ids: 16,384 ids with 1 "
        "worker and 2 servers, and 64 ids with 1 worker"
    )
    for key in medians:
        table.add_column(key, justify="right")
    table.add_column(f"{last} / {first} tables", justify="right")
    table.add_column("us per table", justify="right")
    table.add_column("ms per server", justify="right")
    table.add_row(
        *(f"{one:.1f}" for one in medians.values()),
        f"{found['tables_ratio']:.2f}",
        f"{found['us_per_table']:.1f}",
        f"{found['ms_per_server']:.2f}",
    )
    return table, found
