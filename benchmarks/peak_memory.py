"""The most memory that a call holds."""

import pathlib
from collections.abc import Callable

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")


def is_available() -> bool:
    """Whether this system counts it (Linux does)."""
    return _STATUS.exists() and _CLEAR.exists()


def extra_bytes(call: Callable[[], object]) -> int:
    """Returns by how much `call` raises this process's memory at its peak."""
    _CLEAR.write_text("5")  # Sets the peak to what is in use now.
    before = _read("VmRSS")
    call()
    return max(0, _read("VmHWM") - before)


def _read(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status must have {name}.")
