"""Times several things in turn, so that a busy moment hits them all."""

import time
from collections.abc import Callable

import numpy as np


class Milliseconds(float):
    """What a contestant returns that was timed elsewhere."""


def interleave(
    contestants: dict[str, Callable[[int], object]],
    rounds: int,
    warm_up: int = 2,
) -> dict[str, np.ndarray]:
    """Milliseconds of each contestant, round by round.

    Args:
      contestants: Called with the number of the round. The order rotates, so
        that none always finds the caches as the same one left them. One that
        returns `Milliseconds` has timed itself.
      rounds: How often each is timed.
      warm_up: Rounds before, not timed.

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
