"""Selects one choice per item: the fastest plan within the memory budgets.

`solve` checks the pins, runs the search of `local_search.py`, and explains why
nothing fits. The result depends on sizes and times only, not on names.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tf_layoutmap.planning import local_search
from tf_layoutmap.planning.problem import (
    Choice,
    Item,
    Problem,
    devices_of,
    step_time,
)


class PlanDoesNotFitError(ValueError):
    """Raised if no selection of choices fits into the memory budgets.

    Attributes:
      missing_bytes: Bytes above the budget of one device, in the selection that
        exceeds the budgets least.
      device: Name of this device.
    """

    def __init__(self, message: str, missing_bytes: int, device: str):
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.device = device


@dataclasses.dataclass(frozen=True)
class Solution:
    """The selected choice of each item.

    Attributes:
      problem: The input of the search.
      selected: Name of the selected choice of each item, by item.
      pins: Choices that the user fixed, by item.
    """

    problem: Problem
    selected: Mapping[str, str]
    pins: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def choice_of(self, item: Item) -> Choice:
        """Returns the selected choice of an item."""
        return choice_named(item, self.selected[item.name])

    def memory(self) -> list[dict[str, int]]:
        """Returns the bytes on each device, by part."""
        return [dict(parts) for parts in self._memory]

    def seconds(self) -> list[dict[str, float]]:
        """Returns the predicted time per step on each device, by part."""
        return [dict(parts) for parts in self._seconds]

    @functools.cached_property
    def total_memory(self) -> tuple[int, ...]:
        """Bytes on each device."""
        return tuple(sum(parts.values()) for parts in self._memory)

    @functools.cached_property
    def total_seconds(self) -> tuple[float, ...]:
        """Predicted time per step on each device."""
        return tuple(math.fsum(parts.values()) for parts in self._seconds)

    @functools.cached_property
    def step_seconds(self) -> float:
        """Predicted time of a step.

        This is the time of the slowest device. If the devices share processors,
        a step takes at least the time of the work of all devices.
        """
        fixed = math.fsum(self.problem.fixed_seconds.values())
        times = np.asarray(self.total_seconds, np.float64)
        return float(step_time(times, fixed, self.problem.sum_share))

    @functools.cached_property
    def _memory(self) -> list[dict[str, int]]:
        return self._parts("memory", self.problem.fixed_memory)

    @functools.cached_property
    def _seconds(self) -> list[dict[str, float]]:
        seconds = self._parts("seconds", self.problem.fixed_seconds)
        for parts, count in zip(seconds, self.items_per_device):
            if count:
                _add(parts, self.problem.use_seconds)
        shared = self._shared_seconds()
        for parts in seconds:
            _add(parts, shared)
        return seconds

    @functools.cached_property
    def items_per_device(self) -> tuple[int, ...]:
        """Number of items that each device stores."""
        counts = [0] * len(self.problem.devices)
        for item in self.problem.items:
            for device in devices_of(self.choice_of(item), self.problem):
                counts[device] += 1
        return tuple(counts)

    def _shared_seconds(self) -> dict[str, float]:
        """Returns the time of the shared costs that occur, by part."""
        total: dict[str, float] = {}
        for seconds in self.shared_costs.values():
            _add(total, seconds)
        return total

    @functools.cached_property
    def shared_costs(self) -> dict[str, dict[str, float]]:
        """Times of the shared costs that occur, by name and by part."""
        if not self.problem.shared_costs:
            return {}
        choices = [self.choice_of(item) for item in self.problem.items]
        causes = {name for choice in choices for name in choice.causes}
        costs: dict[str, dict[str, float]] = {}
        for name, seconds in self.problem.shared_costs.items():
            if name not in causes:
                continue
            cost = dict(seconds)
            for choice in choices:
                _add(cost, choice.seconds_if.get(name, {}))
            if math.fsum(cost.values()) > 0:
                costs[name] = cost
        return costs

    def _parts(self, attribute: str, fixed: Mapping[str, Any]) -> list[Any]:
        by_device: list[dict[str, Any]] = [
            dict(fixed) for _ in self.problem.devices
        ]
        for item in self.problem.items:
            choice = self.choice_of(item)
            for device in devices_of(choice, self.problem):
                for part, value in getattr(choice, attribute).items():
                    by_device[device][part] = (
                        by_device[device].get(part, 0) + value
                    )
        return by_device


def _add(total: dict[str, float], parts: Mapping[str, float]) -> None:
    for part, value in parts.items():
        total[part] = total.get(part, 0.0) + value


def choice_named(item: Item, name: str) -> Choice:
    """Returns the choice of an item with this name."""
    return next(choice for choice in item.choices if choice.name == name)


def solve(
    problem: Problem,
    pins: Mapping[str, str] | None = None,
    *,
    suggest: Callable[[], Iterable[str]] | None = None,
) -> Solution:
    """Selects the choices with the shortest predicted step that fit.

    The predicted time of a step is the largest sum of times on a device. No
    device needs more bytes than its budget. Small problems are
    solved exactly.

    Args:
      problem: Items, choices and budgets.
      pins: Choices that must be selected. A key is the name of an item or of
        one of its weights. A value is the name of a choice, or the first word
        of the names of one or more choices, such as `"rows"`.
      suggest: Function that returns what would fit, as continuations of "What
        would fit: ...". It is called if nothing fits; `fits` and `fewest` help
        to write it.

    Raises:
      ValueError: If a pin is unknown, contradicts another pin, or fixes a
        choice that cannot be selected.
      PlanDoesNotFitError: If no selection fits. The message contains the
        missing bytes and the suggestions.
    """
    _check(problem)
    allowed, fixed = _allowed_choices(problem, pins or {})
    arrays = local_search.Search(problem, allowed)
    selected = arrays.search()
    if selected is None:
        raise _does_not_fit(problem, arrays, fixed, suggest)
    return Solution(
        problem,
        {
            item.name: item.choices[arrays.choice_of_column[column]].name
            for item, column in zip(problem.items, selected)
        },
        fixed,
    )


def _check(problem: Problem) -> None:
    counts = collections.Counter(item.name for item in problem.items)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"Items of a plan must have unique names. Received: {repeated[0]!r}"
            " several times."
        )
    if not problem.devices or len(problem.devices) != len(problem.budgets):
        raise ValueError(
            "A plan must have at least one device, and one budget per device. "
            f"Received: {len(problem.devices)} devices and "
            f"{len(problem.budgets)} budgets."
        )


def _allowed_choices(
    problem: Problem, pins: Mapping[str, str]
) -> tuple[list[list[int]], dict[str, str]]:
    """Returns the indices of the allowed choices, and the pins by item."""
    fixed = pins_of_items(problem, pins)
    return [
        _allowed(item, fixed.get(item.name)) for item in problem.items
    ], fixed


def pins_of_items(problem: Problem, pins: Mapping[str, str]) -> dict[str, str]:
    """Returns the pin of each pinned item, by the name of the item.

    Args:
      problem: Items and choices.
      pins: As for `solve`.

    Raises:
      ValueError: If a pin is unknown or contradicts another pin.
    """
    by_name = {item.name: item for item in problem.items}
    by_weight: dict[str, list[Item]] = {}
    for item in problem.items:
        for weight in item.weights:
            # A weight, its key in a layout map, or the layer of the weight.
            names = {weight, item.keys.get(weight, weight)}
            for name in {*names, weight.rpartition(".")[0]} - {""}:
                if item not in by_weight.get(name, []):
                    by_weight.setdefault(name, []).append(item)
    fixed: dict[str, str] = {}
    source: dict[str, str] = {}
    for key, pin in pins.items():
        items = [by_name[key]] if key in by_name else by_weight.get(key, [])
        if not items:
            near = difflib.get_close_matches(str(key), by_name, 3) or list(
                by_name
            )
            raise ValueError(
                "Argument `pins` must contain names of items of the plan, such "
                f"as {near[:3]}. Received: {key!r}."
            )
        for item in items:
            if fixed.get(item.name, pin) != pin:
                raise ValueError(
                    "Argument `pins` must contain one choice per item. "
                    f"Received: {source[item.name]!r}: "
                    f"{fixed[item.name]!r} and {key!r}: {pin!r}, which are "
                    f"both about {item.name!r}."
                )
            fixed[item.name], source[item.name] = pin, key
    return fixed


def _allowed(item: Item, pin: str | None) -> list[int]:
    matching = [
        index
        for index, choice in enumerate(item.choices)
        if pin is None or matches(choice, pin)
    ]
    if not matching:
        names = list(dict.fromkeys(choice.name for choice in item.choices))
        raise ValueError(
            f"Argument `pins` must contain a choice of {item.name!r}, one of "
            f"{names}, or the first word of its name. Received: {pin!r}."
        )
    allowed = [
        index for index in matching if item.choices[index].refused is None
    ]
    if not allowed:
        refused = item.choices[matching[0]]
        raise ValueError(
            (
                f"Argument `pins` must not contain {pin!r} for {item.name!r}: "
                if pin is not None
                else f"{item.name!r} cannot be stored: "
            )
            + f"{refused.name!r} is not possible: {refused.refused}."
        )
    return allowed


def matches(choice: Choice, pin: str) -> bool:
    """Returns whether a pin selects a choice, by its name or first word.

    >>> choice = Choice("rows over model", "", {}, {})
    >>> matches(choice, "rows"), matches(choice, "rows over batch")
    (True, False)
    """
    return pin in (choice.name, choice.name.split(" ")[0])


def _does_not_fit(
    problem: Problem,
    arrays: local_search.Search,
    pins: Mapping[str, str],
    suggest: Callable[[], Iterable[str]] | None,
) -> PlanDoesNotFitError:
    columns = arrays.least_excess
    assert columns is not None
    memory, _ = arrays.totals(columns)
    over = memory - arrays.budgets
    worst = int(np.argmax(over))
    device, missing = arrays.devices[worst], int(over[worst])
    sentences = [
        f"The plan with the smallest excess needs {int(memory[worst]):,} "
        f"bytes on {problem.devices[device]!r}, whose budget is "
        f"{problem.budgets[device]:,} bytes: {missing:,} bytes are missing."
    ]
    stored = [
        (sum(choice.memory.values()), item.name, choice.sentence)
        for item, column in zip(problem.items, columns)
        for choice in [item.choices[arrays.choice_of_column[column]]]
        if device in devices_of(choice, problem)
    ]
    if stored:
        size, name, sentence = max(stored, key=lambda entry: entry[0])
        sentences.append(
            f"The largest item there is {name!r}, which needs {size:,} bytes "
            f"{sentence}."
        )
    part, fixed = max(
        problem.fixed_memory.items(),
        key=lambda entry: entry[1],
        default=("", 0),
    )
    if fixed > max(stored, default=(0,))[0]:
        sentences.append(
            f"Each plan also needs {fixed:,} bytes of {part} on each device."
        )
    if pins and fits(problem):
        culprits = [
            name
            for name in pins
            if fits(
                problem,
                {key: pin for key, pin in pins.items() if key != name},
            )
        ]
        named = culprits or list(pins)
        pinned = ", ".join(f"{name!r}: {pins[name]!r}" for name in named)
        sentences.append(
            "A plan fits without the "
            f"{'pin' if len(named) == 1 else 'pins'} {pinned}"
            f"{', or without one of them' * (len(culprits) > 1)}."
        )
    suggestions = list(suggest()) if suggest is not None else []
    if len(set(problem.budgets)) == 1:
        suggestions.append(
            f"a budget of {problem.budgets[0] + missing:,} bytes per device"
        )
    if suggestions:
        sentences.append(f"What would fit: {'; '.join(suggestions)}.")
    return PlanDoesNotFitError(
        "No plan fits into the memory budgets. " + " ".join(sentences),
        missing,
        problem.devices[device],
    )


def fits(problem: Problem, pins: Mapping[str, str] | None = None) -> bool:
    """Returns whether a plan with these pins fits into the budgets.

    If a pin does not match a choice of the problem, the result is False.
    """
    try:
        solve(problem, pins)
    except ValueError:
        return False
    return True


def fewest(
    problem_of: Callable[[int], Problem],
    low: int,
    pins: Mapping[str, str] | None = None,
    *,
    highest: int = 4096,
) -> int | None:
    """Returns the smallest number of devices above `low` that is sufficient.

    Numbers are tried by doubling, and then by bisection.

    Args:
      problem_of: Function that returns the problem for a number of devices.
      low: Number of devices with which no plan fits.
      pins: As for `solve`.
      highest: Largest number to try.

    Returns:
      The number, or None if no plan fits on `highest` devices.
    """
    high = 2 * low
    while high <= highest and not fits(problem_of(high), pins):
        low, high = high, 2 * high
    if high > highest:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if fits(problem_of(middle), pins):
            high = middle
        else:
            low = middle
    return high
