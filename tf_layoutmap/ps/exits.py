"""Exit of a process while its cluster does not answer."""

from __future__ import annotations

import atexit
import faulthandler
import sys
from collections.abc import Callable
from typing import Any

from tf_layoutmap._patches import engine

# Seconds between the start of the interpreter's shutdown and its forced end.
END_SECONDS = 20.0

_has_left = False


def leave_cluster() -> None:
    """Prepares this process to exit without an answer of its cluster.

    TensorFlow removes functions and resources from all servers and workers when
    Python frees them, and waits for each answer without a deadline. A process
    with one stopped worker would therefore never exit. After this call nothing
    is removed from other processes. If the interpreter's shutdown takes longer
    than `END_SECONDS` for another reason, the process exits with code 1.
    """
    global _has_left
    engine.ensure("ps_exit")
    if not _has_left:
        _has_left = True
        atexit.register(_limit_shutdown)


def remove(original: Callable[..., None], *args: Any) -> None:
    """Removes a function or a resource, unless the cluster does not answer."""
    if not _has_left:
        original(*args)


def _limit_shutdown() -> None:
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(
            END_SECONDS, exit=True, file=sys.__stderr__
        )
