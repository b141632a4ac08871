"""Reads the argument `memory` of `tlm.plan`."""

from __future__ import annotations

import numbers
import re
from collections.abc import Sequence
from typing import Any, cast

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
        return tuple(read_bytes(one) for one in sizes)
    return (read_bytes(memory),) * num_devices
