"""Problems of the planner for tests."""

import itertools
import math

from tf_layoutmap.planning.problem import Choice, Item, Problem, devices_of


def table_item(name, num_bytes, seconds, num_devices, shard_seconds=0.0):
    """Returns a table on one device, or with its rows over all devices."""
    alone = [
        Choice(
            f"table on {device}",
            f"on device {device}",
            {"weights": num_bytes},
            {"rows": seconds},
            devices=(device,),
        )
        for device in range(num_devices)
    ]
    rows = Choice(
        "rows over all",
        "with its rows over all devices",
        {"weights": -(-num_bytes // num_devices)},
        {"rows": seconds / num_devices, "network": shard_seconds},
        num_shards=num_devices,
    )
    return Item(name, "table", {name: (num_bytes, 1)}, (*alone, rows))


def problem_of(items, num_devices, budget, **fixed):
    """Returns a problem with equal budgets."""
    return Problem(
        tuple(f"server {one}" for one in range(num_devices)),
        (budget,) * num_devices,
        tuple(items),
        **fixed,
    )


def brute_force(problem):
    """Returns the shortest step of all selections that fit; inf if none."""
    best = math.inf
    fixed = sum(problem.fixed_seconds.values())
    for selection in itertools.product(*(one.choices for one in problem.items)):
        memory = [sum(problem.fixed_memory.values())] * len(problem.devices)
        seconds = [0.0] * len(problem.devices)
        used = set()
        for choice in selection:
            for device in devices_of(choice, problem):
                memory[device] += sum(choice.memory.values())
                seconds[device] += sum(choice.seconds.values())
                used.add(device)
        for device in used:
            seconds[device] += sum(problem.use_seconds.values())
        for name, parts in problem.shared_costs.items():
            if any(name in choice.causes for choice in selection):
                cost = sum(parts.values()) + sum(
                    sum(choice.seconds_if.get(name, {}).values())
                    for choice in selection
                )
                seconds = [one + max(cost, 0.0) for one in seconds]
        if all(m <= b for m, b in zip(memory, problem.budgets)):
            step = max(max(seconds), problem.sum_share * sum(seconds))
            best = min(best, fixed + step)
    return best
