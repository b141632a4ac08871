"""Explains a solution: the other choices, their costs, and when they would win.

The functions compare choices of one item while all other items are unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from tf_layoutmap.planning.problem import Choice, Item, devices_of, step_time
from tf_layoutmap.planning.search import Solution, matches


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another choice of an item, with all other items unchanged.

    Attributes:
      name: Name of the choice.
      item_seconds: Time of the item on each of its devices.
      step_seconds: Predicted time of a step.
      missing_bytes: Bytes above the budget of `device`; 0 if the choice fits.
      needed_bytes: Budget of `device` with which the choice fits.
      device: Device with the most bytes above its budget, or with the fewest
        free bytes.
      refused: Reason why the choice cannot be selected, or None.
      threshold: Amount of `Item.quantity` from which the predicted step is
        shorter than with the selected choice; None if there is none.
      is_above: Whether the choice is faster above the threshold. If False, it
        is faster below the threshold.
      is_limited: Whether the caller set the budgets. If False, the budgets are
        the memory of the plan.
    """

    name: str
    item_seconds: float
    step_seconds: float
    missing_bytes: int
    needed_bytes: int
    device: str
    refused: str | None
    threshold: float | None = None
    is_above: bool = True
    is_limited: bool = True

    @property
    def fits(self) -> bool:
        """Whether the choice can be selected."""
        return not self.missing_bytes and self.refused is None


def alternatives_of(solution: Solution, item: Item) -> list[Alternative]:
    """Returns the other choices of an item, the runner-up first.

    Of several choices whose names start with the same word, such as the same
    table on different servers, only the best one is returned. Choices that fit
    are first, then choices with fewer missing bytes.
    """
    totals = _Totals(solution, item)
    selected = solution.choice_of(item)
    best: dict[str, tuple[tuple[bool, int, float], Choice]] = {}
    others = [choice for choice in item.choices if choice.name != selected.name]
    different = [
        other
        for other in others
        if not matches(other, selected.name.split(" ")[0])
    ]
    for choice in different or others:
        key = (
            choice.refused is not None,
            max(totals.missing(choice)[0], 0),
            totals.step_seconds(choice),
        )
        word = choice.name.split(" ")[0] if different else ""
        if word not in best or key < best[word][0]:
            best[word] = (key, choice)
    ordered = sorted(best.values(), key=lambda entry: entry[0])
    return [
        _alternative(solution, item, choice, totals) for _, choice in ordered
    ]


def _alternative(
    solution: Solution, item: Item, choice: Choice, totals: _Totals
) -> Alternative:
    missing, device = totals.missing(choice)
    threshold = totals.threshold(choice) if item.quantity else None
    return Alternative(
        choice.name,
        math.fsum(choice.seconds.values()),
        totals.step_seconds(choice),
        max(missing, 0),
        solution.problem.budgets[device] + missing,
        solution.problem.devices[device],
        choice.refused,
        threshold,
        threshold is None or threshold >= item.amount,
        solution.problem.is_limited,
    )


class _Totals:
    """Bytes and times of all devices without one item."""

    def __init__(self, solution: Solution, item: Item):
        self._problem = solution.problem
        self._item = item
        self._selected = solution.choice_of(item)
        self._solution = solution
        self._budgets = np.asarray(self._problem.budgets, np.int64)
        self._memory = np.asarray(solution.total_memory, np.int64)
        self._seconds = np.asarray(solution.total_seconds, np.float64)
        self._fixed = math.fsum(self._problem.fixed_seconds.values())
        devices = list(devices_of(self._selected, self._problem))
        self._use = math.fsum(self._problem.use_seconds.values())
        self._counts = np.asarray(solution.items_per_device, np.int64)
        self._seconds -= self._use * (self._counts > 0)
        self._counts[devices] -= 1
        self._memory[devices] -= sum(self._selected.memory.values())
        self._seconds[devices] -= math.fsum(self._selected.seconds.values())

    def missing(self, choice: Choice) -> tuple[int, int]:
        """Returns the bytes above the budget, and the index of the device.

        The bytes are negative if the choice fits.
        """
        memory = self._memory.copy()
        devices = list(devices_of(choice, self._problem))
        memory[devices] += sum(choice.memory.values())
        over = (memory - self._budgets)[devices]
        worst = int(np.argmax(over))
        return int(over[worst]), devices[worst]

    def step_seconds(self, choice: Choice) -> float:
        """Returns the predicted time of a step with a choice."""
        return self._step(self._lines(choice)[0])

    def _step(self, seconds: np.ndarray) -> float:
        return float(step_time(seconds, self._fixed, self._problem.sum_share))

    def threshold(self, choice: Choice) -> float | None:
        """Returns the amount nearest to the item's from which `choice` wins."""
        ours, our_slopes = self._lines(self._selected)
        theirs, their_slopes = self._lines(choice)

        def difference(amount: float) -> float:
            delta = amount - self._item.amount
            return self._step(theirs + their_slopes * delta) - self._step(
                ours + our_slopes * delta
            )

        # The lines of two devices cross where the order of the choices may
        # change.
        slopes = our_slopes[:, None] - their_slopes[None]
        with np.errstate(divide="ignore", invalid="ignore"):
            deltas = (theirs[None] - ours[:, None]) / slopes
        amounts = self._item.amount + deltas[np.isfinite(deltas)]
        # Smaller amounts are 0 up to rounding.
        amounts = amounts[amounts > 1e-6 * max(self._item.amount, 1.0)]
        order = np.argsort(np.abs(amounts - self._item.amount), kind="stable")
        scale = max(float(ours.max()), 1e-12)
        for amount in amounts[order].tolist():
            further = amount + (
                1e-3
                * max(amount, 1.0)
                * (1 if amount >= self._item.amount else -1)
            )
            if (
                abs(difference(amount)) < 1e-9 * scale
                and difference(further) < -1e-9 * scale
            ):
                return amount
        return None

    def _lines(self, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times and their change per unit, by device."""
        devices = list(devices_of(choice, self._problem))
        if not self._problem.shared_costs:
            seconds = self._seconds.copy()
            seconds[devices] += math.fsum(choice.seconds.values())
            counts = self._counts.copy()
            counts[devices] += 1
            seconds += self._use * (counts > 0)
        else:
            selected = {
                **self._solution.selected,
                self._item.name: choice.name,
            }
            other = dataclasses.replace(self._solution, selected=selected)
            seconds = np.asarray(other.total_seconds, np.float64)
        slopes = np.zeros_like(seconds)
        slopes[devices] = choice.seconds_per_unit
        return seconds, slopes


def sentences(solution: Solution, item: Item) -> list[str]:
    """Returns why the choice of an item was selected, in complete sentences."""
    choice = solution.choice_of(item)
    shapes = " and ".join(
        " x ".join(f"{size:,}" for size in shape)
        for shape in list(item.weights.values())[:3]
    ) + ", ..." * (len(item.weights) > 3)
    seconds = math.fsum(choice.seconds.values())
    explanation = [
        f"The planner stores {item.name!r} ({item.kind}, {shapes}) "
        f"{choice.sentence}.",
        f"It needs {_parts(choice.memory, format_bytes)} on "
        f"{_place(choice, solution)}, and {_parts(choice.seconds, format_time)}"
        f" of the {format_time(solution.step_seconds)} of a step"
        f"{_assumed(item)}.",
    ]
    shared = [solution.shared_costs.get(name, {}) for name in choice.causes]
    more = math.fsum(value for costs in shared for value in costs.values())
    if more:
        explanation.append(
            "Activations remain sharded after the item, so that other items "
            f"exchange data for {format_time(more)} of a step."
        )
    if item.name in solution.pins:
        explanation.append(
            f"The choice was fixed by `pins`: {solution.pins[item.name]!r}."
        )
    others = alternatives_of(solution, item)
    if not others:
        explanation.append("This is the only choice.")
    for number, other in enumerate(others):
        explanation += _about(other, solution, item, seconds, number)
    return explanation


def reason(solution: Solution, item: Item) -> str:
    """Returns one sentence that compares a choice with the runner-up."""
    if item.name in solution.pins:
        return f"Fixed by `pins`: {solution.pins[item.name]!r}."
    others = alternatives_of(solution, item)
    if not others:
        return "This is the only choice."
    seconds = math.fsum(solution.choice_of(item).seconds.values())
    return " ".join(_about(others[0], solution, item, seconds, 0))


def _about(
    other: Alternative,
    solution: Solution,
    item: Item,
    seconds: float,
    number: int,
) -> list[str]:
    step = solution.step_seconds
    title = f"{'The runner-up' if number == 0 else 'Another choice'} is "
    title += repr(other.name)
    if other.refused is not None:
        return [f"The choice {other.name!r} is not possible: {other.refused}."]
    explanation: list[str] = []
    if other.missing_bytes:
        faster = (
            f"; a step would take {format_time(other.step_seconds)} instead of "
            f"{format_time(step)}"
        )
        if other.is_limited:
            explanation.append(
                f"{title}, which does not fit: {other.missing_bytes:,} bytes "
                f"are missing on {other.device!r}{faster}. It would fit with a "
                f"budget of {other.needed_bytes:,} bytes."
            )
        else:
            explanation.append(
                f"{title}, which needs {other.missing_bytes:,} bytes more on "
                f"{other.device!r} than this plan{faster}. To allow it, pass "
                f"`memory` of at least {other.needed_bytes:,} bytes."
            )
    elif math.isclose(other.step_seconds, step, rel_tol=1e-6):
        explanation.append(
            f"{title}, which takes {format_time(other.item_seconds)} instead of"
            f" {format_time(seconds)} on its devices. The step would take the "
            "same time, because another device is slower."
        )
    else:
        explanation.append(
            f"{title}, which takes {format_time(other.item_seconds)} instead of"
            f" {format_time(seconds)} on its devices. A step would take "
            f"{format_time(other.step_seconds)} instead of {format_time(step)}."
        )
    name = other.name[0].upper() + other.name[1:]
    if other.threshold is not None:
        explanation.append(
            f"{name} would be faster {'above' if other.is_above else 'below'} "
            f"{format_amount(other.threshold)} {item.quantity}."
        )
    elif item.quantity and other.step_seconds >= step:
        explanation.append(
            f"{name} would not be faster with any number of {item.quantity}."
        )
    return explanation


def _assumed(item: Item) -> str:
    if not item.quantity:
        return ""
    amount = (
        f"{item.amount:,.0f}"
        if float(item.amount).is_integer()
        else format_amount(item.amount)
    )
    return f", with {amount} {item.quantity}"


def _place(choice: Choice, solution: Solution) -> str:
    devices = devices_of(choice, solution.problem)
    if len(devices) == 1:
        return repr(solution.problem.devices[devices[0]])
    if len(devices) == len(solution.problem.devices):
        return "each device"
    return "each of " + ", ".join(
        repr(solution.problem.devices[device]) for device in devices
    )


def _parts(values: Mapping[str, float], form: Callable[[float], str]) -> str:
    """Returns a sum and its parts.

    >>> _parts({"weights": 10, "gradients": 2}, str)
    '12 (10 of weights, 2 of gradients)'
    """
    total = form(sum(values.values()))
    used = {part: value for part, value in values.items() if value}
    if len(used) < 2:
        return total + "".join(f" of {part}" for part in used)
    inner = ", ".join(
        f"{form(value)} of {part}" for part, value in used.items()
    )
    return f"{total} ({inner})"


def format_bytes(count: float) -> str:
    """Formats a number of bytes.

    >>> format_bytes(512), format_bytes(3 << 19)
    ('512 B', '1.5 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return (
                f"{count:.0f} {unit}"
                if unit == "B"
                else (f"{count:.1f} {unit}")
            )
        count /= 1024
    return f"{count:.1f} TiB"


def format_time(seconds: float) -> str:
    """Formats a time.

    >>> format_time(2.5e-6), format_time(0.0123), format_time(3.0)
    ('2.5 us', '12.3 ms', '3.00 s')
    """
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.2f} s"


def format_amount(amount: float) -> str:
    """Formats a number with at most three significant digits.

    >>> format_amount(41234.5), format_amount(7.0), format_amount(1.25)
    ('41,200', '7', '1.25')
    """
    if amount == 0 or not math.isfinite(amount):
        return f"{amount:g}"
    digits = 2 - math.floor(math.log10(abs(amount)))
    rounded = round(amount, digits)
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"
