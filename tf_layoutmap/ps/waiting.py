"""Waiting for calls that may never return, with a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tf_layoutmap import _tf_private

# Between two looks at the time.
_POLL_SECONDS = 0.2


class LateError(Exception):
    """Nothing has happened until the deadline."""


def error_of(closure: Any) -> Exception | None:
    """Waits for a closure that a coordinator has scheduled.

    Its error has no traceback: the closure keeps the error, whose frames would
    keep all other closures, and what they hold on workers, until the garbage
    collector finds them.
    """
    try:
        _tf_private.wait_for_closure(closure)
    except Exception as error:
        return error.with_traceback(None)
    return None


def within(
    call: Callable[[], Any], seconds: float, watched: Sequence[Any] = ()
) -> Any:
    """Returns what `call` returns, or raises what it raises.

    It runs in a thread that does not keep the program from ending.

    Args:
      call: Is called once.
      seconds: How long nothing may happen.
      watched: RemoteValues of a coordinator, in the order in which they were
        scheduled. That one becomes known counts as something happening.

    Raises:
      LateError: Nothing has happened for so long.
    """
    ended: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
    last = [time.monotonic()]

    def run():
        try:
            ended.put((call(), None))
        except BaseException as error:  # Raised by whoever waits.
            ended.put((None, error))

    def watch():
        for one in watched:
            error_of(one)  # Whoever joins is told of it.
            last[0] = time.monotonic()

    for target in (run, watch) if watched else (run,):
        threading.Thread(target=target, daemon=True).start()
    while True:
        try:
            result, error = ended.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if time.monotonic() - last[0] > seconds:
                raise LateError from None
            continue
        if error is not None:
            raise error
        return result
