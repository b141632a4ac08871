"""Calls functions that may never return, with a deadline.

`read_seconds` reads durations such as `"5min"`. `ServerLostError` and
`StepDeadlineError` are the errors that stop training on parameter servers.
TensorFlow's coordinator classifies an error by words in its message, such as
addresses of processes. The errors of this module contain such addresses, and
are therefore raised only after the classification.
"""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tf_layoutmap._core import tf_private
from tf_layoutmap.ps import answers, handled_errors

# Interval between two checks of the deadline, in seconds.
_POLL_SECONDS = 0.2


class LateError(Exception):
    """Error that a call made no progress within its deadline."""


def wait_for_error(closure: Any) -> Exception | None:
    """Waits for a scheduled closure; returns its error, or None.

    The traceback of the error is removed. The closure holds a reference to the
    error, and the frames in the traceback would hold references to all other
    closures. The values of these closures would remain on workers until the
    garbage collector runs.
    """
    try:
        tf_private.wait_for_closure(closure)
    except Exception as error:
        return error.with_traceback(None)
    return None


def call_with_deadline(
    call: Callable[[], Any], seconds: float, watched: Sequence[Any] = ()
) -> Any:
    """Calls a function; returns its result or raises its error.

    The function runs in a daemon thread, which does not block the exit of the
    program.

    Args:
      call: Function that is called once.
      seconds: Maximum time without progress.
      watched: RemoteValues of a coordinator, in the order in which they were
        scheduled. Each RemoteValue that becomes available counts as progress.

    Raises:
      LateError: If there was no progress for `seconds`.
    """
    ended: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
    last = [time.monotonic()]

    def run():
        try:
            with handled_errors.error_handler():
                ended.put((call(), None))
        except BaseException as error:  # Raised by the caller's thread.
            ended.put((None, error))

    def watch():
        for remote_value in watched:
            wait_for_error(remote_value)  # `join` raises the error.
            last[0] = time.monotonic()

    for target in (run, watch) if watched else (run,):
        threading.Thread(target=target, daemon=True).start()
    with answers.doubled_deadline():
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
    """Returns a duration in seconds.

    >>> read_seconds("5min", "save_every"), read_seconds(30, "save_every")
    (300.0, 30.0)

    Args:
      value: A number of seconds, or a string of a number and `s`, `min` or `h`.
      argument: Name of the argument, for messages.

    Raises:
      ValueError: If `value` is not such a duration, or is not above 0.
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
    """Raised if a parameter server is lost.

    The error is also raised if a worker is lost during a call that is not part
    of a step, such as `build`. The error of such a call is also a
    `tf.errors.UnavailableError`.
    """


class StepDeadlineError(RuntimeError):
    """Raised if no step has ended within the deadline.

    The error is also raised if a server or worker does not answer a call that
    is not part of a step, such as `build` or `stats`. The error of such a call
    is also a `tf.errors.UnavailableError`.

    After this error, the process must not use its cluster. The process can exit
    although other processes do not answer. For example, `sys.exit(3)` exits
    with code 3. Functions and resources of this process are not removed from
    other processes. If the shutdown of the interpreter takes longer than 20 s,
    the process is terminated with exit code 1.
    """
