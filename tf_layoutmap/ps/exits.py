"""How a process ends whose cluster does not answer."""

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
    """Prepares this process to end without an answer of its cluster.

    TensorFlow removes functions and resources from all servers and workers when
    Python frees them, and waits for each answer without a deadline: a process
    with one stopped worker would never end. After this call nothing is removed
    from other processes. Should something else block the interpreter's
    shutdown, the process ends with exit code 1 after `END_SECONDS`.
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
