"""How far tables are that take seconds to make, as a bar."""

import contextlib
import sys
import threading
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap import _ops

# Until the bar comes, and from one state of it to the next; where no person
# looks at a terminal, each state is a line of a file.
FIRST_SECONDS = 3.0
TERMINAL_SECONDS = 0.5
FILE_SECONDS = 10.0

# Less is made before the bar would come.
LEAST_BYTES = 1 << 28

_MIB = 1 << 20


class _Made:
    """Bytes of first values that this process has made."""

    def __init__(self) -> None:
        # Those that come from elsewhere than our operation.
        self.by_others = 0
        # One bar at a time: tables are made of shards, models of tables.
        self.is_shown = False

    def bytes(self) -> int:
        """Returns all by now, those of a running operation too."""
        return self.by_others + int(_ops.bytes_drawn())


_made = _Made()


def add(num_bytes: int) -> None:
    """Counts a value that is ready and was not drawn by `new_rows`."""
    _made.by_others += num_bytes


@contextlib.contextmanager
def shown(num_bytes: int) -> Iterator[None]:
    """Shows how much of `num_bytes` is made inside, after a few seconds.

    Nothing inside of another one, of small tables, and while functions are
    traced.
    """
    if (
        num_bytes < LEAST_BYTES
        or _made.is_shown
        or (not tf.executing_eagerly())
    ):
        yield
        return
    _made.is_shown = True
    bar = _Bar(num_bytes)
    try:
        yield
        bar.is_whole = True
    finally:
        bar.end()
        _made.is_shown = False


class _Bar:
    """A thread that shows how far this process is.

    It asks for bytes in its own thread, where no device, mesh or strategy of
    the program is in force.
    """

    def __init__(self, num_bytes: int):
        """Returns once it has begun to count."""
        # Whether all was made, also what creators of the program have made.
        self.is_whole = False
        self._num_bytes = num_bytes
        self._counts = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._counts.wait()

    def end(self) -> None:
        """Shows the last state, if it has shown any."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            before = _made.bytes()
        finally:
            self._counts.set()
        if self._ended.wait(FIRST_SECONDS):
            return
        total = max(self._num_bytes // _MIB, 1)
        print("Making tables", flush=True)
        # Of the Keras that the program uses.
        bar = tf.keras.utils.Progbar(total, unit_name="MiB")
        pause = TERMINAL_SECONDS if sys.stdout.isatty() else FILE_SECONDS
        is_last = False
        while not is_last:
            is_last = self._ended.wait(pause)
            made = min((_made.bytes() - before) // _MIB, total)
            bar.update(
                total if is_last and self.is_whole else made, finalize=is_last
            )
