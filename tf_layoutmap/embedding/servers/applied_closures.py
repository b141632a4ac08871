"""Which closures the servers of an embedding have applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# The variable `applied`: cc/core/servers/applied_closures.h.
SIZE = 2054
_EPOCH, _BASE, _WINDOW = 0, 1, 6
# The variable `fetched_steps`: cc/core/served_keys/fetched_steps.h.
_FETCHED_EPOCH = 2


class AppliedClosures:
    """The records of one embedding's servers, one for each server."""

    def __init__(
        self, applied: Sequence[Any], fetched_steps: Sequence[Any] = ()
    ):
        """Initializes from the variables that the ops of a step write.

        Args:
          applied: Variable `applied` of each server.
          fetched_steps: Variable `fetched_steps` of each server; empty without
            open vocabularies.
        """
        self._applied = applied
        self._fetched_steps = fetched_steps

    def move_to_epoch(self, epoch: int, next_epoch: int) -> list[set[int]]:
        """Moves what was applied in one epoch to the next one.

        Afterwards servers raise an error for closures of `epoch` that are
        still under way somewhere. A closure that is scheduled again, in
        `next_epoch` and under its number, is applied by the servers that have
        not applied it.

        No closure of `next_epoch` may have been scheduled. If the last round
        that failed was moved, too, no closure of an epoch before `epoch` can
        change a server any more.

        Args:
          epoch: The epoch of the closures; their numbers are below 1,024.
          next_epoch: A later epoch that no closure has used.

        Returns:
          For each server, the numbers of the closures that it has applied.
        """
        for variable in self._fetched_steps:
            if variable.numpy()[_FETCHED_EPOCH] == epoch:
                _write(variable, [_FETCHED_EPOCH], [next_epoch])
        return [
            _move(variable, epoch, next_epoch) for variable in self._applied
        ]


def _move(variable: Any, epoch: int, next_epoch: int) -> set[int]:
    before = variable.numpy()
    # One operation under the lock that an update takes: from here on the
    # server raises an error for closures of `epoch`.
    _write(variable, [_EPOCH], [next_epoch])
    state = variable.numpy()
    # The first closure of `epoch` may have been applied between the read and
    # the write. The attempt of a closure is unique, so the window differs.
    if before[_EPOCH] != epoch and np.array_equal(
        before[_WINDOW:], state[_WINDOW:]
    ):
        # The window is that of an older epoch, whose numbers were others.
        places = [_BASE, *range(_WINDOW, SIZE)]
        _write(variable, places, [0] * len(places))
        return set()
    numbers = state[_WINDOW::2]
    return {int(one) - 1 for one in numbers[numbers > 0]}


def _write(variable: Any, places: Sequence[int], values: Sequence[int]):
    variable.scatter_nd_update(
        [[one] for one in places], np.asarray(values, np.int64)
    )
