"""Which distribution a thread has set."""

import threading
from typing import Any

_current = threading.local()


def distribution() -> Any:
    """Returns the distribution of this thread, set or in scope, or None."""
    return getattr(_current, "value", None)


def note(value: Any) -> None:
    """Makes `distribution` return `value`."""
    _current.value = value
