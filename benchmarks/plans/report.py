"""Random plans, interleaved measurements, and the comparison with predictions.

Each step is measured by its duration and by the processor time of the processes
of the benchmark. The processor time is less affected by other programs. The
devices of a mesh share the processors, so that a step with more work takes
longer. Servers work at the same time if there are enough idle processors, so
that a step takes the time of the worker and of the slowest server.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import random
import time
from collections.abc import Callable

import numpy as np

from tf_layoutmap.planning.plan import Plan
from tf_layoutmap.planning.search import Solution

# Attempts to find a random plan within the budgets.
_ATTEMPTS = 10_000


@dataclasses.dataclass
class Measured:
    """A plan and the shortest times of a step, in seconds.

    Attributes:
      plan: The plan.
      wall: Duration.
      cpu: Processor time of all processes.
      slowest: Processor time of all processes, except that only the slowest
        server counts.
    """

    plan: Plan
    wall: float = float("inf")
    cpu: float = float("inf")
    slowest: float = float("inf")


def parse_arguments(doc: str | None) -> argparse.Namespace:
    """Returns the options of a benchmark."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument(
        "--plans", type=int, default=50, help="Number of random plans."
    )
    parser.add_argument(
        "--ranked",
        type=int,
        default=20,
        help="Number of random plans whose rank correlation is computed.",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="Rounds over all plans."
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="Steps of a plan in a round."
    )
    parser.add_argument(
        "--only", default=None, help="Name of the only measured workload."
    )
    parser.add_argument(
        "--json", default=None, help="Output file for all measurements."
    )
    return parser.parse_args()


def random_plan(plan: Plan, rng: random.Random) -> Plan:
    """Returns a random plan within the budgets of a plan.

    With probabilities that are drawn once per plan, an item gets its first
    choice, the preferred device, or a uniformly drawn choice. Therefore plans
    with few and with many sharded items are drawn.
    """
    problem = plan.solution.problem
    for _ in range(_ATTEMPTS):
        first, preferred = rng.random(), rng.random()
        device = rng.randrange(len(problem.devices))
        selected: dict[str, str] = {}
        for item in problem.items:
            allowed = [
                choice for choice in item.choices if choice.refused is None
            ]
            alone = [
                choice for choice in allowed if choice.devices == (device,)
            ]
            if alone and rng.random() < preferred:
                choice = alone[0]
            elif not alone and rng.random() < first / 2:
                choice = allowed[0]
            else:
                choice = rng.choice(allowed)
            selected[item.name] = choice.name
        solution = Solution(problem, selected)
        if all(
            used <= budget
            for used, budget in zip(solution.total_memory, problem.budgets)
        ):
            return Plan(solution, plan.target)
    raise RuntimeError("No random plan fits into the budgets.")


def random_plans(plan: Plan, count: int, seed: int = 0) -> list[Plan]:
    """Returns different random plans, which can include `plan`."""
    rng = random.Random(seed)
    plans: dict[str, Plan] = {}
    for _ in range(_ATTEMPTS):
        drawn = random_plan(plan, rng)
        plans.setdefault(json.dumps(drawn.choices, sort_keys=True), drawn)
        if len(plans) == count:
            break
    return list(plans.values())


def processes() -> list[tuple[int, bool]]:
    """Returns the processes of the benchmark, and whether each is a server.

    The programs of a local cluster are children of one process. In a process
    that is not in a local cluster, the list has only this process.
    """
    if "TF_CONFIG" not in os.environ:
        return [(os.getpid(), False)]
    pids = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != os.getppid():
                continue
            environment = (folder / "environ").read_text().split("\0")
        except OSError:
            continue
        config = next(
            (entry for entry in environment if entry.startswith("TF_CONFIG=")),
            "={}",
        )
        job = json.loads(config.partition("=")[2]).get("task", {}).get("type")
        pids.append((int(folder.name), job == "ps"))
    return pids


def cpu_seconds(pids: list[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the processor times of servers and of other processes."""
    times: tuple[list[float], list[float]] = ([], [])
    for process, is_server in pids:
        # See clock_getcpuclockid(3). The files in /proc have a resolution of
        # 10 ms.
        clock = (~process << 3) | 2
        times[not is_server].append(time.clock_gettime(clock))
    return np.asarray(times[0]), np.asarray(times[1])


def measure(
    plans: list[Plan],
    build: Callable[[Plan], Callable[[int], None]],
    options: argparse.Namespace,
) -> list[Measured]:
    """Returns the shortest times of steps in interleaved rounds.

    Args:
      plans: The plans.
      build: Returns a function that runs a number of steps with a plan.
      options: Options of the benchmark.
    """
    measured = [Measured(plan) for plan in plans]
    pids = processes()
    runs = []
    for plan in plans:
        run = build(plan)
        run(2)
        runs.append(run)
    for number in range(options.rounds):
        # The order changes, so that the state of the caches varies.
        order = list(zip(measured, runs))
        random.Random(number).shuffle(order)
        for result, run in order:
            run(1)
            before = cpu_seconds(pids)
            for _ in range(options.steps):
                start = time.perf_counter()
                run(1)
                result.wall = min(result.wall, time.perf_counter() - start)
            servers, others = (
                (now - then) / options.steps
                for now, then in zip(cpu_seconds(pids), before)
            )
            result.cpu = min(result.cpu, servers.sum() + others.sum())
            result.slowest = min(
                result.slowest, servers.max(initial=0.0) + others.sum()
            )
    return measured


def predicted(plan: Plan, kind: str) -> float:
    """Returns the predicted time of a step.

    Args:
      plan: The plan.
      kind: Name of a time of `Measured`. For `"slowest"`, the servers are
        assumed to have separate processors.
    """
    if kind != "slowest":
        return plan.step_seconds
    problem = dataclasses.replace(plan.solution.problem, sum_share=0.0)
    return Solution(problem, plan.choices).step_seconds


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Returns Kendall's rank correlation of pairs of numbers.

    >>> round(kendall([(1, 10), (2, 20), (3, 15)]), 3)
    0.333
    """
    signs = [
        np.sign(a[0] - b[0]) * np.sign(a[1] - b[1])
        for a, b in itertools.combinations(pairs, 2)
    ]
    return float(np.mean(signs))


def compare(
    name: str, chosen: Plan, others: list[Plan], build, options
) -> None:
    """Measures plans and prints the comparison with their predictions."""
    start = time.perf_counter()
    measured = measure([chosen, *others], build, options)
    rows = sorted(measured, key=lambda result: result.wall)
    scale = np.median(
        [result.wall / result.plan.step_seconds for result in measured]
    )
    print(f"\n{name}: {chosen}", flush=True)
    for result in rows:
        parts = result.plan.solution.seconds()
        slowest = max(parts, key=lambda part: sum(part.values()))
        print(
            f"{'chosen' if result is measured[0] else '':6} measured "
            f"{1e3 * result.wall:7.2f} ms, processor "
            f"{1e3 * result.cpu:7.2f} ms, with the slowest server "
            f"{1e3 * result.slowest:7.2f} ms, predicted "
            f"{1e3 * result.plan.step_seconds:7.2f} ms, measured / predicted "
            f"{result.wall / result.plan.step_seconds / scale:.2f} of the "
            "median "
            + str({k: round(1e3 * v, 2) for k, v in slowest.items()})
            + f" {[result.plan.choices[key] for key in sorted(chosen.choices)]}"
        )
    ranked = measured[1 : 1 + options.ranked]
    kinds = {"wall": "time", "cpu": "processor time"}
    if any(result.slowest != result.cpu for result in measured):
        kinds["slowest"] = "processor time with the slowest server"
    for kind, title in kinds.items():
        times = [getattr(result, kind) for result in measured]
        correlation = kendall(
            [
                (predicted(result.plan, kind), getattr(result, kind))
                for result in ranked
            ]
        )
        print(
            f"{name}, {title}: "
            f"Kendall {correlation:.2f} over {len(ranked)} plans; chosen / "
            f"best of {len(others)} random plans "
            f"{times[0] / min(times[1:]):.2f}; slowest / fastest random plan "
            f"{max(times[1:]) / min(times[1:]):.2f}"
        )
    print(
        f"{name}: {time.perf_counter() - start:.0f} s; load "
        f"{os.getloadavg()[0]:.1f}",
        flush=True,
    )
    if options.json:
        path = pathlib.Path(options.json)
        known = json.loads(path.read_text()) if path.exists() else {}
        known[name] = [
            {
                "choices": result.plan.choices,
                "predicted": result.plan.step_seconds,
                "measured": result.wall,
                "processor": result.cpu,
                "slowest": result.slowest,
            }
            for result in measured
        ]
        path.write_text(json.dumps(known, indent=1))
