"""Lengths of time as people write them."""

from __future__ import annotations

import math
import re

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def read_seconds(value: str | float, argument: str) -> float:
    """Returns a length of time in seconds.

    >>> read_seconds("5min", "save_every"), read_seconds(30, "save_every")
    (300.0, 30.0)

    Args:
      value: Seconds, or a number with `s`, `min` or `h` behind it.
      argument: Its name, for messages.

    Raises:
      ValueError: It is neither, or not above 0.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", value.strip())
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    else:
        seconds = 0.0 if isinstance(value, bool) else float(value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(
            f'Argument `{argument}` must be like "30s", "5min" or "2h", or a '
            f"number of seconds above 0. Received: {value!r}."
        )
    return seconds
