"""Marks code whose caller handles the errors of a lost process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

# TensorFlow raises these errors if a process is lost, or if a server was
# restarted without its variables.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError)

_handlers = threading.local()


@contextlib.contextmanager
def error_handler() -> Iterator[None]:
    """Marks a block of this thread whose caller handles the errors `LOST`.

    `lost_calls` does not change these errors.
    """
    before = handles_errors()
    _handlers.is_active = True
    try:
        yield
    finally:
        _handlers.is_active = before


def handles_errors() -> bool:
    """Returns whether this thread is in a block of `error_handler`."""
    return getattr(_handlers, "is_active", False)
