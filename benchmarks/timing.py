"""Measures times in interleaved rounds.

Other load on the machine then affects all contestants equally.
"""

import time
from collections.abc import Callable

import numpy as np


class Milliseconds(float):
    """A duration that a contestant has measured itself."""


def interleave(
    contestants: dict[str, Callable[[int], object]],
    rounds: int,
    warm_up: int = 2,
) -> dict[str, np.ndarray]:
    """Returns the milliseconds of each contestant in each round.

    Args:
      contestants: Maps names to functions that accept the number of the round.
        Each round has another random order, because a call is slower after a
        call that used other code and memory. A function that measures its own
        time returns `Milliseconds`.
      rounds: Number of measured rounds.
      warm_up: Number of rounds before the measured rounds.

    Returns:
      Maps names to `[rounds]` milliseconds.
    """
    names = list(contestants)
    times = {name: [] for name in names}
    order = np.random.default_rng(0)
    for i in range(-warm_up, rounds):
        for name in order.permutation(names):
            start = time.perf_counter()
            result = contestants[name](i)
            elapsed = 1e3 * (time.perf_counter() - start)
            if isinstance(result, Milliseconds):
                elapsed = float(result)
            if i >= 0:
                times[name].append(elapsed)
            del result
    return {name: np.array(values) for name, values in times.items()}
