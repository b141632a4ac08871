"""The search: starts with the largest items, then changes one or two choices.

`Search` converts a problem to integer arrays with one column per choice. Small
problems are solved by comparing all combinations of choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_layoutmap.planning.problem import Problem, devices_of, step_time

# Times are compared as integers, so that sums do not depend on rounding.
_UNITS_PER_SECOND = 10**12
# Problems with at most this number of combinations of choices are solved
# exactly. With 1,000 items, the other limits keep the search below 2 s.
EXACT_COMBINATIONS = 20_000
# Number of devices above which no problem is solved exactly.
_MAX_EXACT_DEVICES = 64
_MAX_STEPS = 4_000
_MAX_PAIR_TRIALS = 600
# The search stops if the time exceeds a lower bound by less than this share.
_TOLERANCE = 1e-3
# Weights of memory against time in the first pass over the items.
_MEMORY_WEIGHTS = (0.0, 0.3, 3.0)

# Returns the value of each of the elements with the given indices.
Key = Callable[[np.ndarray], np.ndarray]

# Bytes, time, devices and index of a choice.
_Column = tuple[int, int, tuple[int, ...], int]


def _distinct_devices(problem: Problem, allowed: list[list[int]]) -> list[int]:
    """Returns the devices that the search must distinguish.

    If each choice occupies all devices, this is the device with the smallest
    budget.
    """
    devices = range(len(problem.devices))
    if all(
        len(set(devices_of(item.choices[choice], problem))) == len(devices)
        for item, choices in zip(problem.items, allowed)
        for choice in choices
    ):
        return [min(devices, key=lambda device: problem.budgets[device])]
    return list(devices)


class Search:
    """A problem as integer arrays, with one column per allowed choice.

    Items are sorted by their sizes and times. Therefore the search does not
    depend on names, or on the order of different items.
    """

    def __init__(self, problem: Problem, allowed: list[list[int]]):
        self.devices = _distinct_devices(problem, allowed)
        self.num_devices = len(self.devices)
        index_of = {device: index for index, device in enumerate(self.devices)}
        self.budgets = np.asarray(
            [problem.budgets[device] for device in self.devices], np.int64
        )
        rows: list[tuple[list[_Column], int]] = []
        for index, (item, choices) in enumerate(zip(problem.items, allowed)):
            table: list[_Column] = []
            for choice in choices:
                item_choice = item.choices[choice]
                table.append(
                    (
                        sum(item_choice.memory.values()),
                        _units(math.fsum(item_choice.seconds.values())),
                        tuple(
                            index_of[device]
                            for device in devices_of(item_choice, problem)
                            if device in index_of
                        ),
                        choice,
                    )
                )
            rows.append((table, index))

        def size(row: tuple[list[_Column], int]) -> Any:
            table = [entry[:3] for entry in row[0]]
            return (
                max(entry[0] for entry in table),
                max(entry[1] for entry in table),
                table,
            )

        rows.sort(key=size, reverse=True)
        self.order = [index for _, index in rows]
        count = sum(len(table) for table, _ in rows)
        self.memory = np.zeros([count, self.num_devices], np.int64)
        # The columns of `load` are: the time of each device, the number of
        # choices that cause each shared cost, and the additional time if the
        # shared cost occurs.
        shared = sorted(problem.shared_costs)
        width = self.num_devices + 2 * len(shared)
        self.load = np.zeros([count, width], np.int64)
        self.item_of = np.zeros([count], np.int64)
        self.choice_of_column = [0] * count
        self.columns: list[range] = []
        column = 0
        for position, (table, _) in enumerate(rows):
            self.columns.append(range(column, column + len(table)))
            for memory, load, devices, choice in table:
                self.memory[column, list(devices)] = memory
                self.load[column, list(devices)] = load
                item_choice = problem.items[self.order[position]].choices[
                    choice
                ]
                for number, name in enumerate(shared, self.num_devices):
                    self.load[column, number] = name in item_choice.causes
                    self.load[column, number + len(shared)] = _units(
                        math.fsum(item_choice.seconds_if.get(name, {}).values())
                    )
                self.item_of[column] = position
                self.choice_of_column[column] = choice
                column += 1
        self.first_memory = np.full(
            self.num_devices, sum(problem.fixed_memory.values()), np.int64
        )
        self.first_load = np.zeros([width], np.int64)
        self._fixed = _units(math.fsum(problem.fixed_seconds.values()))
        self.first_load[: self.num_devices] = self._fixed
        self._shared = np.asarray(
            [
                _units(math.fsum(problem.shared_costs[name].values()))
                for name in shared
            ],
            np.int64,
        )
        self._use = _units(math.fsum(problem.use_seconds.values()))
        self._sum_share = (
            problem.sum_share * len(problem.devices) / self.num_devices
        )
        self.trials = 0
        self.good_load = (1 + _TOLERANCE) * self._least_load()
        self.least_bytes_over = self._least_excess()
        self.least_excess: list[int] | None = None

    def search(self) -> list[int] | None:
        """Returns one column per item of the problem; None if nothing fits.

        If nothing fits, `least_excess` has the best columns.
        """
        if (
            self.num_devices <= _MAX_EXACT_DEVICES
            and math.prod(map(len, self.columns)) <= EXACT_COMBINATIONS
        ):
            best, fits = self._enumerated()
        else:
            best, fits = self._searched()
        selected = [0] * len(self.order)
        for position, column in zip(self.order, best):
            selected[position] = column
        if not fits:
            self.least_excess = selected
            return None
        return selected

    def _least_load(self) -> float:
        """Returns a lower bound of the time of the slowest device."""
        devices = slice(self.num_devices)
        return self._bound(self.load[:, devices], self.first_load[devices])

    def _least_excess(self) -> float:
        """Returns a lower bound of the bytes above a budget."""
        return self._bound(self.memory, self.first_memory - self.budgets)

    def _bound(self, values: np.ndarray, first: np.ndarray) -> float:
        mean = first.mean() + sum(self._least_sums(values)) / self.num_devices
        largest = max(
            (
                float((values[_part(column_range)] + first).max(-1).min())
                for column_range in self.columns
            ),
            default=0.0,
        )
        return max(float(mean), largest, 0.0)

    def _is_good(self, key: Sequence[float]) -> bool:
        """Returns whether a plan is close to a lower bound."""
        if key[0]:
            return key[0] <= self.least_bytes_over + self.num_devices
        return key[1] <= self.good_load

    def _times(self, memory: np.ndarray, load: np.ndarray) -> np.ndarray:
        """Returns the time of each device."""
        times = load[..., : self.num_devices]
        if self._use:
            times = times + self._use * (memory > self.first_memory)
        if len(self._shared):
            causes, extra = np.split(load[..., self.num_devices :], 2, axis=-1)
            occurring = (causes > 0) * np.maximum(extra + self._shared, 0)
            times = times + occurring.sum(-1, keepdims=True)
        return times

    def _step(self, times: np.ndarray) -> np.ndarray:
        """Returns the time of a step from the times of the devices."""
        return step_time(times, self._fixed, self._sum_share)

    def excess(self, memory: np.ndarray) -> np.ndarray:
        """Returns the largest number of bytes above a budget."""
        return np.maximum((memory - self.budgets).max(-1), 0)

    def _keys(self, memory: np.ndarray, load: np.ndarray) -> list[Key]:
        """Returns the values that the search minimizes, most important first.

        These are: the bytes above the budget, the time of a step, the balance
        of the times, and the share of the budgets that is used.
        """
        times = self._times(memory, load)
        return [
            lambda at: self.excess(memory[at]),
            lambda at: self._step(times[at]),
            lambda at: np.square(times[at].astype(np.float64)).sum(-1),
            lambda at: (memory[at] / np.maximum(self.budgets, 1)).max(-1),
        ]

    def totals(
        self, columns: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes and the time of each device."""
        chosen = np.asarray(columns, np.int64)
        return (
            self.first_memory + self.memory[chosen].sum(0),
            self.first_load + self.load[chosen].sum(0),
        )

    def _key(self, memory: np.ndarray, load: np.ndarray) -> list[float]:
        only = np.zeros([1], np.int64)
        return [
            float(key(only)[0]) for key in self._keys(memory[None], load[None])
        ]

    def _enumerated(self) -> tuple[list[int], bool]:
        """Compares all combinations of choices."""
        memory = self.first_memory[None]
        load = self.first_load[None]
        for columns in self.columns:
            part = slice(columns.start, columns.stop)
            memory = (memory[:, None] + self.memory[part]).reshape(
                -1, self.num_devices
            )
            load = (load[:, None] + self.load[part]).reshape(
                -1, self.load.shape[-1]
            )
        index = _argmin(len(memory), self._keys(memory, load))
        best = np.unravel_index(
            index, [len(column_range) for column_range in self.columns] or 1
        )
        chosen = (
            [columns[int(i)] for columns, i in zip(self.columns, best)]
            if self.columns
            else []
        )
        return chosen, bool(self.excess(memory[index]) == 0)

    def _searched(self) -> tuple[list[int], bool]:
        starts = [self._greedy(weight) for weight in _MEMORY_WEIGHTS]
        starts.append(self._least_memory())
        best: list[int] = []
        best_key: list[float] = []
        seen: set[tuple[int, ...]] = set()
        for start in starts:
            columns = self._improved(start, pairs=False)
            if tuple(columns) in seen:
                continue
            seen.add(tuple(columns))
            key = self._key(*self.totals(columns))
            if not best or key < best_key:
                best, best_key = columns, key
            if not key[0] and self._is_good(key):
                break
        best = self._improved(best, pairs=True)
        return best, self._key(*self.totals(best))[0] == 0

    def _greedy(self, weight: float) -> list[int]:
        """Selects choices item by item, the largest item first.

        A choice is rated by the time that is expected at the end: at least the
        time of the slowest device so far, and at least the mean over devices if
        all later items get their cheapest choice.

        Args:
          weight: Importance of the used share of the memory, compared with the
            time. The used share is rated in the same way.
        """
        later_load = self._least_sums(self.load[:, : self.num_devices])
        later_memory = self._least_sums(self.memory)
        all_load = max(
            int(self.first_load.max()), sum(later_load) / self.num_devices, 1
        )
        budget = np.maximum(self.budgets, 1)
        memory, load = self.first_memory.copy(), self.first_load.copy()
        chosen = [0] * len(self.columns)
        # The items that need the most time or memory are placed first.
        values = self.load[:, : self.num_devices] if weight < 1 else self.memory
        order = sorted(
            range(len(self.columns)),
            key=lambda position: (
                -int(values[_part(self.columns[position])].max())
            ),
        )
        rest_load, rest_memory = sum(later_load), sum(later_memory)
        for position in order:
            rest_load -= later_load[position]
            rest_memory -= later_memory[position]
            part = _part(self.columns[position])
            new_memory = memory + self.memory[part]
            new_load = load + self.load[part]
            times = self._times(new_memory, new_load)
            time = (
                np.maximum(
                    self._step(times),
                    (times.sum(-1) + rest_load) / self.num_devices,
                )
                / all_load
            )
            share = np.maximum(
                (new_memory / budget).max(-1),
                (new_memory.sum(-1) + rest_memory) / budget.sum(),
            )
            rating = time + weight * share + 1e3 * np.maximum(share - 1, 0)
            balance = np.square(times / all_load).sum(-1)
            best = _argmin(len(rating), [rating.take, balance.take, share.take])
            chosen[position] = part.start + best
            memory, load = new_memory[best], new_load[best]
        return chosen

    def _least_memory(self) -> list[int]:
        """Selects the choices that need the fewest bytes."""
        memory = self.first_memory.copy()
        chosen: list[int] = []
        for columns in self.columns:
            part = _part(columns)
            new = memory + self.memory[part]
            best = _argmin(
                len(columns),
                [
                    self.memory[part].sum(-1).take,
                    (new - self.budgets).max(-1).take,
                    self.load[part, : self.num_devices].max(-1).take,
                ],
            )
            chosen.append(part.start + best)
            memory = new[best]
        return chosen

    def _least_sums(self, values: np.ndarray) -> list[int]:
        """Returns the smallest sum over devices of each item's choices."""
        return [
            int(values[_part(columns)].sum(-1).min())
            for columns in self.columns
        ]

    def _improved(self, start: list[int], *, pairs: bool) -> list[int]:
        """Changes choices until no change improves the plan.

        Args:
          start: One column per item.
          pairs: Whether changes of two items are also tried.
        """
        columns = np.asarray(start, np.int64)
        memory, load = self.totals(columns)
        for _ in range(_MAX_STEPS):
            now = self._key(memory, load)
            if self._is_good(now):
                break
            column, key = self._best_move(columns, memory, load)
            moved = [column]
            if column < 0 or not key < now:
                moved = (
                    self._best_pair(columns, memory, load, now) if pairs else []
                )
            if not moved:
                break
            for column in moved:
                old = columns[self.item_of[column]]
                memory = memory + self.memory[column] - self.memory[old]
                load = load + self.load[column] - self.load[old]
                columns[self.item_of[column]] = column
        return columns.tolist()

    def _candidates(
        self, columns: np.ndarray, memory: np.ndarray, load: np.ndarray
    ) -> np.ndarray:
        """Returns the columns that change the most loaded device.

        This is the device with the most bytes above its budget. If there are no
        such bytes, it is the slowest device. With shared costs, any choice can
        change its time.
        """
        over = memory - self.budgets
        if over.max() > 0:
            effect = self.memory[:, int(np.argmax(over))]
        else:
            slowest = int(np.argmax(self._times(memory, load)))
            effect = self.load[:, slowest]
            if len(self._shared):
                order = np.argsort(effect, kind="stable")
                return order[columns[self.item_of[order]] != order]
        gain = effect[columns[self.item_of]] - effect
        improving = np.flatnonzero(gain > 0)
        return improving[np.argsort(-gain[improving], kind="stable")]

    def _best_move(
        self, columns: np.ndarray, memory: np.ndarray, load: np.ndarray
    ) -> tuple[int, list[float]]:
        """Returns the best column to select instead, and its keys.

        The column is -1 if no column changes the most loaded device.
        """
        new = self._candidates(columns, memory, load)
        if not len(new):
            return -1, []
        old = columns[self.item_of[new]]
        keys = self._keys(
            memory + self.memory[new] - self.memory[old],
            load + self.load[new] - self.load[old],
        )
        best = _argmin(len(new), keys)
        at = np.asarray([best])
        return int(new[best]), [float(key(at)[0]) for key in keys]

    def _best_pair(
        self,
        columns: np.ndarray,
        memory: np.ndarray,
        load: np.ndarray,
        now: list[float],
    ) -> list[int]:
        """Returns two columns whose selection improves the plan, or [].

        The first column with an improvement is used. Columns with a larger
        effect on the most loaded device are tried first.
        """
        for first in self._candidates(columns, memory, load).tolist():
            if self.trials >= _MAX_PAIR_TRIALS:
                return []
            self.trials += 1
            old = columns[self.item_of[first]]
            changed = columns.copy()
            changed[self.item_of[first]] = first
            second, key = self._best_move(
                changed,
                memory + self.memory[first] - self.memory[old],
                load + self.load[first] - self.load[old],
            )
            if second >= 0 and key < now:
                return [first, second]
        return []


def _part(columns: range) -> slice:
    return slice(columns.start, columns.stop)


def _units(seconds: float) -> int:
    return round(seconds * _UNITS_PER_SECOND)


def _argmin(count: int, keys: Sequence[Key]) -> int:
    """Returns the index of the smallest element, by the first key that differs.

    If elements are equal, the first one is returned.
    """
    candidates = np.arange(count)
    for key in keys:
        values = key(candidates)
        candidates = candidates[values == values.min()]
        if len(candidates) == 1:
            break
    return int(candidates[0])
