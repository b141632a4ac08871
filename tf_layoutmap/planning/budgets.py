"""Reads the argument `memory` of `tlm.plan`, and computes its default."""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tf_layoutmap.planning import search
from tf_layoutmap.planning.problem import Item, Problem

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{k}b": 1000**i for i, k in enumerate("kmgt", 1)},
    **{f"{k}ib": 1024**i for i, k in enumerate("kmgt", 1)},
}


def read_bytes(size: Any) -> int:
    """Returns a number of bytes.

    >>> read_bytes("24GiB"), read_bytes("1.5 kB"), read_bytes(7)
    (25769803776, 1500, 7)

    Args:
      size: An integer, or a number with one of the units B, kB, MB, GB, TB,
        KiB, MiB, GiB and TiB.

    Raises:
      ValueError: If `size` is not such a size, or is negative.
    """
    if isinstance(size, numbers.Integral) and size is not True:
        number = int(size)
        if number >= 0:
            return number
    elif isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", size)
        if match and match[2].lower() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    raise ValueError(
        "Argument `memory` must hold numbers of bytes, or strings such as "
        f'"24GiB". Received: {size!r}.'
    )


def read_budgets(memory: Any, num_devices: int) -> tuple[int, ...]:
    """Returns the budget of each device in bytes.

    >>> read_budgets("1KiB", 2), read_budgets([5, "2B"], 2)
    ((1024, 1024), (5, 2))

    Args:
      memory: One size for all devices, or a list with one size per device. A
        size is an argument of `read_bytes`.
      num_devices: Number of devices.

    Raises:
      ValueError: If a size is invalid, or if the list has another length.
    """
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        sizes = cast("Sequence[Any]", memory)
        if len(sizes) != num_devices:
            raise ValueError(
                "Argument `memory` must be one size, or a list with one size "
                f"for each of the {num_devices} devices. Received: {memory!r}."
            )
        return tuple(read_bytes(size) for size in sizes)
    return (read_bytes(memory),) * num_devices


def default_memory(
    problem: Problem, pins: Mapping[str, str], small_share: float
) -> int:
    """Returns the bytes of the fastest plan in which large items are sharded.

    Args:
      problem: The items, whose first choice is the replicated one. The budgets
        have no effect.
      pins: Choices that the caller fixes.
      small_share: Items with at most this share of the bytes of all replicated
        items are replicated.

    Raises:
      ValueError: If a pin is invalid.
    """
    pinned = search.pins_of_items(problem, pins)
    small = small_share * sum(map(_replicated_bytes, problem.items))
    items = tuple(
        item if item.name in pinned else _with_default_choices(item, small)
        for item in problem.items
    )
    largest = sum(problem.fixed_memory.values()) + sum(
        max(sum(choice.memory.values()) for choice in item.choices)
        for item in items
    )
    solution = search.solve(
        dataclasses.replace(
            problem, items=items, budgets=(largest,) * len(problem.devices)
        ),
        pins,
    )
    return max(solution.total_memory)


def _replicated_bytes(item: Item) -> int:
    return sum(item.choices[0].memory.values())


def _with_default_choices(item: Item, small: float) -> Item:
    """Returns an item without sharded choices, or without the replicated one.

    Args:
      item: The item.
      small: Largest number of bytes of a replicated item.
    """
    replicated = item.choices[0]
    sharded = [choice for choice in item.choices[1:] if choice.refused is None]
    is_small = _replicated_bytes(item) <= small
    if replicated.refused is None and (is_small or not sharded):
        return dataclasses.replace(item, choices=(replicated,))
    return dataclasses.replace(item, choices=tuple(sharded) or item.choices)
