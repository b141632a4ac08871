"""`MachineCosts`: the measured speed of a machine, and its cache file.

`probe.py` measures the costs. This module stores them in a JSON file, so that a
program measures a machine only once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any, cast

from tf_layoutmap.deltas.served import storage

# Changes if the fields of `MachineCosts` or the measurements change. A file
# with another version is measured again.
VERSION = 2

# Environment variable with the path of the cache file.
CACHE_VARIABLE = "TF_LAYOUTMAP_COSTS"

_CPU_INFO = pathlib.Path("/proc/cpuinfo")
# The lines that together identify a processor core of Arm.
_ARM_NAMES = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")


@dataclasses.dataclass(frozen=True)
class MachineCosts:
    """Speed of a machine. All times are in seconds, all sizes in bytes.

    >>> costs = MachineCosts.typical()
    >>> round(costs.seconds_of_rows(1000, 160) * 1e6)
    80
    >>> round(costs.seconds_of_collective(3_000_000, 2) * 1e6)
    1400

    Attributes:
      row_seconds: Time to read and later write one random row of a large table,
        by the bytes of the row and its slot variables.
      table_seconds: Time per table and step that does not depend on the number
        of ids.
      id_seconds: Time per id of a batch to find unique rows and to combine
        rows, without the rows themselves.
      flops_per_second: Floating-point operations per second of a matrix
        product on one device.
      memory_bytes_per_second: Bytes per second of a copy in memory.
      collective_latency: Time of a small all-reduce, by number of devices.
      collective_bytes_per_second: Bytes of the unsharded tensor per second of
        a large all-reduce, by number of devices.
      gather_bytes_per_second: Bytes of the unsharded tensor per second of a
        large all-gather, by number of devices.
      server_latency: Time of one small call to a parameter server.
      server_bytes_per_second: Bytes per second between a worker and a server.
      server_sharing: How many times as long servers take if all of them work at
        the same time. The value is 1 for separate machines, and more for
        servers that share processors.
    """

    row_seconds: Mapping[int, float]
    table_seconds: float
    id_seconds: float
    flops_per_second: float
    memory_bytes_per_second: float
    collective_latency: Mapping[int, float]
    collective_bytes_per_second: Mapping[int, float]
    gather_bytes_per_second: Mapping[int, float]
    server_latency: float
    server_bytes_per_second: float
    server_sharing: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value: Mapping[int, Any] | Any = getattr(self, field.name)
            numbers: list[Any] = (
                list(cast("Mapping[int, Any]", value).values())
                if isinstance(value, Mapping)
                else [value]
            )
            if not numbers or not all(
                isinstance(number, int | float)
                and not isinstance(number, bool)
                and math.isfinite(number)
                and number > 0
                for number in numbers
            ):
                raise ValueError(
                    f"`{field.name}` of MachineCosts must hold positive "
                    f"numbers. Received: {value!r}."
                )

    @classmethod
    def typical(cls) -> MachineCosts:
        """Returns costs of a typical machine, for plans without measurements.

        The plan is then the same on all machines.
        """
        return cls(
            row_seconds={64: 6e-8, 256: 1e-7, 1024: 4e-7},
            table_seconds=1e-5,
            id_seconds=3e-8,
            flops_per_second=2e11,
            memory_bytes_per_second=2e10,
            collective_latency={2: 4e-4, 4: 6e-4, 8: 1e-3},
            collective_bytes_per_second={2: 3e9, 4: 1.5e9, 8: 1e9},
            gather_bytes_per_second={2: 6e9, 4: 3e9, 8: 2e9},
            server_latency=2e-4,
            server_bytes_per_second=1e9,
        )

    def seconds_per_row(self, row_bytes: float) -> float:
        """Returns the time to read and write one random row.

        Args:
          row_bytes: Bytes of the row and its slot variables. Times between
            measured sizes are interpolated linearly. Larger rows are
            extrapolated in proportion to their size.
        """
        return _interpolated(self.row_seconds, row_bytes)

    def seconds_of_rows(self, num_rows: float, row_bytes: float) -> float:
        """Returns the time to read and write `num_rows` random rows."""
        return num_rows * self.seconds_per_row(row_bytes)

    def seconds_of_collective(
        self, num_bytes: float, num_devices: int
    ) -> float:
        """Returns the time of an all-reduce; 0 for a single device.

        Args:
          num_bytes: Bytes of the tensor on each device.
          num_devices: Number of devices that take part. The times of numbers
            that were not measured are interpolated.
        """
        return self._of_collective(
            num_bytes, num_devices, self.collective_bytes_per_second
        )

    def seconds_of_gather(self, num_bytes: float, num_devices: int) -> float:
        """Returns the time of an all-gather; 0 for a single device.

        Args:
          num_bytes: Bytes of the gathered tensor.
          num_devices: Number of devices that take part.
        """
        return self._of_collective(
            num_bytes, num_devices, self.gather_bytes_per_second
        )

    def _of_collective(
        self,
        num_bytes: float,
        num_devices: int,
        bytes_per_second: Mapping[int, float],
    ) -> float:
        if num_devices < 2:
            return 0.0
        seconds_per_byte = {
            size: 1 / speed for size, speed in bytes_per_second.items()
        }
        return _interpolated(
            self.collective_latency, num_devices
        ) + num_bytes * _interpolated(seconds_per_byte, num_devices)

    def seconds_of_copy(self, num_bytes: float) -> float:
        """Returns the time to read `num_bytes` and write them elsewhere."""
        return num_bytes / self.memory_bytes_per_second

    def seconds_of_flops(self, num_flops: float) -> float:
        """Returns the time of floating-point operations on one device."""
        return num_flops / self.flops_per_second

    def seconds_of_call(self, num_bytes: float, num_calls: int = 1) -> float:
        """Returns the time of calls to a server that send `num_bytes`."""
        return (
            num_calls * self.server_latency
            + num_bytes / self.server_bytes_per_second
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the costs as a dict that JSON can represent."""
        values: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value: Mapping[int, float] | float = getattr(self, field.name)
            values[field.name] = (
                {str(size): seconds for size, seconds in sorted(value.items())}
                if isinstance(value, Mapping)
                else value
            )
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> MachineCosts:
        """Returns the costs of a dict that `to_dict` returned.

        Raises:
          ValueError: If the dict has other fields or invalid numbers.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names:
            raise ValueError(
                f"The fields of MachineCosts must be {sorted(names)}. "
                f"Received: {sorted(values)}."
            )
        read: dict[str, Any] = {}
        for name, value in values.items():
            read[name] = (
                {
                    int(size): seconds
                    for size, seconds in cast(
                        "Mapping[str, float]", value
                    ).items()
                }
                if isinstance(value, Mapping)
                else value
            )
        return cls(**read)


def _interpolated(points: Mapping[int, float], at: float) -> float:
    """Returns the value at `at` of a line through points with positive keys.

    The first value also applies below the first point. Above the last point,
    the line through the last two points continues. If this line descends, or
    if there is only one point, the last value applies.
    """
    sizes = sorted(points)
    if at <= sizes[0] or len(sizes) == 1:
        return points[sizes[0]]
    high = next((i for i, size in enumerate(sizes) if at <= size), -1)
    if high == -1:
        low, high = len(sizes) - 2, len(sizes) - 1
    else:
        low = high - 1
    x, y = sizes[low], points[sizes[low]]
    slope = (points[sizes[high]] - y) / (sizes[high] - x)
    if at > sizes[-1] and slope < 0:
        return points[sizes[-1]]
    return y + slope * (at - x)


def machine_name() -> str:
    """Returns a name that differs between machines of different speed."""
    return f"{platform.machine()}, {os.cpu_count()} CPUs, {_cpu_model()}"


def _cpu_model() -> str:
    """Returns a name of the processor, or an empty string if it is unknown."""
    try:
        text = _CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    lines = [line.partition(":") for line in text.splitlines()]
    # The lines repeat for each CPU.
    fields = {name.strip(): value.strip() for name, _, value in lines}
    if "model name" in fields:
        return fields["model name"]
    # Linux on aarch64 reports numbers instead of a name.
    numbers = [fields[name] for name in _ARM_NAMES if name in fields]
    return " ".join(numbers) or platform.processor()


def cache_path(path: str | os.PathLike[str] | None = None) -> str:
    """Returns the path of the cache file.

    Args:
      path: Path, or None for the environment variable `TF_LAYOUTMAP_COSTS`. If
        this variable is not set, the file is in the folder `XDG_CACHE_HOME`,
        whose default is `~/.cache`.
    """
    if path is not None:
        return os.fspath(path)
    if os.environ.get(CACHE_VARIABLE):
        return os.environ[CACHE_VARIABLE]
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(
        os.path.expanduser("~"), ".cache"
    )
    return os.path.join(folder, "tf_layoutmap", "costs.json")


def read_cache(path: str, key: str) -> MachineCosts | None:
    """Returns the costs in a cache file, or None if they must be measured.

    Args:
      path: Path of the file.
      key: What was measured: the machine and the number of devices.

    Returns:
      None if the file does not exist, cannot be read, is damaged, has another
      version, or has no costs for `key`.
    """
    stored = _entries(path).get(key)
    try:
        return MachineCosts.from_dict(stored) if stored else None
    except (TypeError, ValueError, AttributeError):
        return None


def cache_text(path: str, key: str, costs: MachineCosts) -> str:
    """Returns the new text of a cache file, which keeps all other entries."""
    entries = {**_entries(path), key: costs.to_dict()}
    return json.dumps({"version": VERSION, "costs": entries}, indent=1)


def _entries(path: str) -> dict[str, Any]:
    try:
        stored = json.loads(storage.read_text(path))
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    known = cast("dict[str, Any]", stored)
    entries = known.get("costs")
    if known.get("version") != VERSION or not isinstance(entries, dict):
        return {}
    return cast("dict[str, Any]", entries)
