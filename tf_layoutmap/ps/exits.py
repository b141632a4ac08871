"""Lets a process exit although its cluster does not answer."""

from __future__ import annotations

import atexit
import faulthandler
import sys
from collections.abc import Callable
from typing import Any

from tf_layoutmap._core import patches

# Seconds after the start of the interpreter's shutdown at which the process is
# terminated.
END_SECONDS = 20.0

_has_left = False


def leave_cluster() -> None:
    """Prepares this process to exit without waiting for its cluster.

    When Python frees a function or a resource, TensorFlow removes it from all
    servers and workers, and waits for their answers without a deadline. If a
    worker is stopped, this process would therefore never exit. After a call of
    this function, TensorFlow does not remove functions and resources from other
    processes. If the interpreter's shutdown takes longer than `END_SECONDS` for
    another reason, the process exits with code 1.
    """
    global _has_left
    patches.ensure("ps_exit")
    if not _has_left:
        _has_left = True
        atexit.register(_limit_shutdown)


def remove(original: Callable[..., None], *args: Any) -> None:
    """Removes a function or a resource, unless `leave_cluster` was called."""
    if not _has_left:
        original(*args)


def _limit_shutdown() -> None:
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(
            END_SECONDS, exit=True, file=sys.__stderr__
        )
