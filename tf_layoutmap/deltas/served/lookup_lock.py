"""A lock that many lookups share, and that short writes hold exclusively."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class LookupLock:
    """A readers-writer lock in which each write lets waiting readers run.

    A writer waits for the readers that hold the lock, and new readers wait for
    the writer. Between two writes, all readers that waited get the lock. A
    reader therefore waits for at most one write.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_readers = 0
        self._num_waiting = 0
        self._is_writing = False
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the lock with other readers; a thread can nest calls."""
        depth = getattr(self._of_thread, "depth", 0)
        if depth == 0:
            self._acquire_shared()
        self._of_thread.depth = depth + 1
        try:
            yield
        finally:
            self._of_thread.depth = depth
            if depth == 0:
                with self._condition:
                    self._num_readers -= 1
                    self._condition.notify_all()

    def _acquire_shared(self) -> None:
        with self._condition:
            if self._is_writing:
                self._num_waiting += 1
                try:
                    while self._is_writing:
                        self._condition.wait()
                finally:
                    self._num_waiting -= 1
                    self._condition.notify_all()
            self._num_readers += 1

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the lock alone. Only one thread may write.

        Raises:
          RuntimeError: If the thread itself holds the lock as a reader.
        """
        if getattr(self._of_thread, "depth", 0):
            raise RuntimeError(
                "`apply` must not be called inside `with lookups()`, because "
                "it would wait for the end of the block."
            )
        with self._condition:
            while self._num_waiting:
                self._condition.wait()
            self._is_writing = True
            try:
                while self._num_readers:
                    self._condition.wait()
            except BaseException:
                self._is_writing = False
                self._condition.notify_all()
                raise
        try:
            yield
        finally:
            with self._condition:
                self._is_writing = False
                self._condition.notify_all()
