"""Interleaved timing, so that disturbances affect all contestants equally."""

import time
from collections.abc import Callable

import numpy as np


class Milliseconds(float):
    """Duration that a contestant measured itself."""


def interleave(
    contestants: dict[str, Callable[[int], object]],
    rounds: int,
    warm_up: int = 2,
) -> dict[str, np.ndarray]:
    """Returns the milliseconds of each contestant in each round.

    Args:
      contestants: Functions of the round number, by name. Their order rotates,
        so that the state of the caches varies. A function that measures itself
        returns `Milliseconds`.
      rounds: Number of timed rounds.
      warm_up: Number of rounds before the timed rounds.

    Returns:
      `[rounds]` milliseconds by name.
    """
    names = list(contestants)
    times = {name: [] for name in names}
    for i in range(-warm_up, rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            result = contestants[name](i)
            elapsed = 1e3 * (time.perf_counter() - start)
            if isinstance(result, Milliseconds):
                elapsed = float(result)
            if i >= 0:
                times[name].append(elapsed)
            del result
    return {name: np.array(values) for name, values in times.items()}
