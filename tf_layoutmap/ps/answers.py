"""Closes connections to processes of the cluster that do not answer.

TensorFlow waits for the answer of a process without a deadline. Some of these
calls hold the lock of the Python interpreter meanwhile, so that no other thread
of Python can run. The thread of this module is written in C++. If a process has
not answered for longer than the deadline, the thread closes all connections of
this program to the process, and TensorFlow raises an `UnavailableError`.
`lost_calls` adds the names of the processes to this error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tf_layoutmap._core import ops


class _Watch:
    """The thread, and the deadline that it currently applies."""

    def __init__(
        self, addresses: Sequence[str], seconds: float, num_servers: int
    ):
        self.thread = ops.native.AnswerWatch(
            list(addresses), seconds, num_servers
        )
        self.seconds = seconds
        self.num_extended = 0

    def apply(self) -> None:
        self.thread.set_seconds(self.seconds * (2 if self.num_extended else 1))


# A process can be connected to one cluster only.
_watch: _Watch | None = None


def watch(
    addresses: Sequence[str], seconds: float, num_servers: int = 0
) -> None:
    """Starts to check whether processes answer.

    Args:
      addresses: Addresses of all processes of the cluster. The processes of an
        earlier call are not checked any more.
      seconds: Time without an answer after which connections are closed.
      num_servers: Number of parameter servers, which are the first processes.
        If one of them does not answer, the connections to all processes are
        closed: a call can wait for a process that waits for this server.
    """
    global _watch
    stop()
    _watch = _Watch(addresses, seconds, num_servers)


def stop() -> None:
    """Ends the checks."""
    global _watch
    if _watch is not None:
        _watch.thread.end()
        _watch = None


def set_deadline(seconds: float) -> None:
    """Sets the time without an answer after which connections are closed."""
    if _watch is not None:
        _watch.seconds = seconds
        _watch.apply()


def num_closed() -> int:
    """Returns how often connections to any process were closed."""
    return 0 if _watch is None else _watch.thread.num_cuts


@contextlib.contextmanager
def doubled_deadline() -> Iterator[None]:
    """Doubles the deadline during a call that has a separate deadline.

    The separate deadline should end first, because it also ends calls of
    processes that answer, and does not close connections.
    """
    current = _watch
    if current is None:
        yield
        return
    current.num_extended += 1
    current.apply()
    try:
        yield
    finally:
        current.num_extended -= 1
        current.apply()
