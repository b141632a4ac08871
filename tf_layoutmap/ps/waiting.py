"""Waiting for calls that may never return, with a deadline."""

# DOC-MERGE: Lengths of time as people write them.
# DOC-MERGE: What ends a run over parameter servers.
#
# TensorFlow's coordinator tells failures apart by words in their messages. These
# come after it has done so, and name processes by their addresses.
#
from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tf_layoutmap._core import tf_private

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
        tf_private.wait_for_closure(closure)
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


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def read_seconds(value: str | float, argument: str) -> float:
    """Returns a length of time in seconds.

    >>> read_seconds("5min", "save_every"), read_seconds(30, "save_every")
    (300.0, 30.0)

    Args:
      value: Seconds, or a number with `s`, `min` or `h` behind it.
      argument: Its name, for messages.

    Raises:
      ValueError: It is neither, or not above 0.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", value.strip())
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    else:
        seconds = 0.0 if isinstance(value, bool) else float(value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(
            f'Argument `{argument}` must be like "30s", "5min" or "2h", or a '
            f"number of seconds above 0. Received: {value!r}."
        )
    return seconds


class ServerLostError(RuntimeError):
    """A parameter server is gone; updates since the checkpoint are lost."""


class StepDeadlineError(RuntimeError):
    """No step has ended within the deadline.

    The process cannot use its cluster any more. It can exit, though, while
    other processes do not answer: `sys.exit(3)` ends it with code 3. From this
    error on, nothing that it has made on other processes is removed there, and
    a shutdown of the interpreter that takes longer than 20 s is forced, with
    exit code 1.
    """
