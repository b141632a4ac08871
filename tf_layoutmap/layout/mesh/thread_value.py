"""A value that every thread has of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ThreadValue(Generic[_T]):
    """What a thread has set, and in all others what it was made with.

    >>> level = ThreadValue(0)
    >>> with level.set_to(2):
    ...     level.get()
    2
    >>> level.get()
    0
    """

    def __init__(self, default: _T):
        self._default = default
        self._thread = threading.local()

    def get(self) -> _T:
        """Returns the value of this thread."""
        return getattr(self._thread, "value", self._default)

    @contextlib.contextmanager
    def set_to(self, value: _T) -> Generator[None]:
        """While open, `value` is that of this thread."""
        before = self.get()
        self._thread.value = value
        try:
            yield
        finally:
            self._thread.value = before
