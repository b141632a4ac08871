"""Processor time of steps on parameter servers, summed over all processes.

All processes of a cluster share the processors of this machine, so that the
elapsed time of a step depends on which process waits for which. The processor
time shows what a step costs. The ratios are:

* 8 tables in clusters, relative to one process.
* A step with 64 ids on 8 servers, relative to 1 server.
* A step with 4,096 ids in 512 tables, relative to 8 tables.
* One layer per table, relative to one embedding, with 64 tables.

Each ratio is measured with 1 and with 16 steps per closure. A ratio is the
median of the ratios of the interleaved rounds.
"""

import contextlib
import dataclasses

import numpy as np
import rich.table
from absl import flags

from benchmarks import timing
from benchmarks.cluster import processes

_STEPS_PER_CLOSURE = (1, 16)
# Number of steps in a round, which is a multiple of the steps per closure.
_NUM_STEPS = 64


@dataclasses.dataclass(frozen=True)
class _Case:
    """Steps of one contestant in one cluster.

    Attributes:
      num_workers: Number of workers; 0 without a cluster.
      num_servers: Number of parameter servers.
      workload: Name of a workload in `contestants.WORKLOADS`.
      contestant: Name of a contestant in `contestants.CONTESTANTS`.
    """

    num_workers: int
    num_servers: int
    workload: str
    contestant: str


@dataclasses.dataclass(frozen=True)
class _Ratio:
    name: str
    case: _Case
    relative_to: _Case


_SAMPLES = "8 tables, 2,048 samples"
_LAYERS = "16,384 ids, 64 tables"
_RATIOS = {
    "shapes": [
        _Ratio(
            f"8 tables, {num_workers} + {num_servers} / one process",
            _Case(num_workers, num_servers, _SAMPLES, "ours"),
            _Case(0, 0, _SAMPLES, "ours"),
        )
        for num_workers, num_servers in [(1, 1), (1, 2), (2, 2)]
    ],
    "servers": [
        _Ratio(
            "64 ids, 1 + 8 / 1 + 1",
            _Case(1, 8, "tiny steps", "packed"),
            _Case(1, 1, "tiny steps", "packed"),
        )
    ],
    "tables": [
        _Ratio(
            "4,096 ids, 512 tables / 8 tables, 1 + 2",
            _Case(1, 2, "4,096 ids, 512 tables", "unpacked"),
            _Case(1, 2, "4,096 ids, 8 tables", "unpacked"),
        )
    ],
    "layers": [
        _Ratio(
            "64 tables, one layer per table / one embedding, 1 + 2",
            _Case(1, 2, _LAYERS, "layers"),
            _Case(1, 2, _LAYERS, "packed"),
        )
    ],
}
_ROWS = flags.DEFINE_multi_enum(
    "processor_time_rows",
    list(_RATIOS),
    list(_RATIOS),
    "Ratios that `cluster_processor_time` measures.",
)


def report(
    distribution: str, rounds: int
) -> tuple[rich.table.Table, dict[str, dict[str, float]]]:
    """Runs the benchmark and returns its table and results."""
    table = rich.table.Table(
        title=f"Milliseconds of processor time of a step, {distribution} ids, "
        "and ratios with quartiles"
    )
    for column in ("", "steps per closure", "ms", "relative to", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    results = {}
    for row in _ROWS.value:
        times = _measure(_RATIOS[row], distribution, rounds)
        for ratio in _RATIOS[row]:
            for steps_per_closure in _STEPS_PER_CLOSURE:
                own = times[_key(ratio.case, steps_per_closure)]
                other = times[_key(ratio.relative_to, steps_per_closure)]
                low, middle, high = np.quantile(own / other, [0.25, 0.5, 0.75])
                results[f"{ratio.name}, {steps_per_closure}"] = {
                    "milliseconds": float(np.median(own)),
                    "relative_to": float(np.median(other)),
                    "ratio": middle,
                    "quartiles": [low, high],
                }
                table.add_row(
                    ratio.name,
                    str(steps_per_closure),
                    f"{np.median(own):.2f}",
                    f"{np.median(other):.2f}",
                    f"{middle:.2f} [{low:.2f}, {high:.2f}]",
                )
    return table, results


def _measure(
    ratios: list[_Ratio], distribution: str, rounds: int
) -> dict[tuple[_Case, str], np.ndarray]:
    """Returns the milliseconds of a step of each case, `[rounds]`."""
    timed = {}
    with contextlib.ExitStack() as stack:
        cases = {
            case: None
            for ratio in ratios
            for case in (ratio.relative_to, ratio.case)
        }
        for case in cases:
            cluster = stack.enter_context(
                processes.Cluster(case.num_workers, case.num_servers)
            )
            keys = {_key(case, count): None for count in _STEPS_PER_CLOSURE}
            names = [name for _, name in keys]
            cluster.open(case.workload, distribution, names)
            for key in keys:
                timed[key] = lambda _, cluster=cluster, name=key[1]: (
                    _processor_milliseconds(cluster, name)
                )
        return timing.interleave(timed, rounds)


def _key(case: _Case, steps_per_closure: int) -> tuple[_Case, str]:
    """Returns the case and the name of its contestant; see `coordinator`."""
    if not case.num_workers:  # There are no closures in one process.
        return case, case.contestant
    return case, f"{case.contestant}:{steps_per_closure}:0"


def _processor_milliseconds(
    cluster: processes.Cluster, name: str
) -> timing.Milliseconds:
    before = sum(cluster.processor_milliseconds().values())
    cluster.steps(name, _NUM_STEPS)
    after = sum(cluster.processor_milliseconds().values())
    return timing.Milliseconds((after - before) / _NUM_STEPS)
