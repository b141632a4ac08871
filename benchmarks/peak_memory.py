"""Peak memory of a call."""

import pathlib
from collections.abc import Callable

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")


def is_available() -> bool:
    """Returns whether the system reports peak memory (Linux does)."""
    return _STATUS.exists() and _CLEAR.exists()


def extra_bytes(call: Callable[[], object]) -> int:
    """Returns the increase of this process's peak memory during `call`."""
    _CLEAR.write_text("5")  # Resets the peak to the current memory.
    before = _read("VmRSS")
    call()
    return max(0, _read("VmHWM") - before)


def _read(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status must have {name}.")
