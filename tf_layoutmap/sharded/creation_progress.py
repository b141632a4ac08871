"""A progress bar that is shown while large tables are initialized."""

import contextlib
import sys
import threading
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap._core import ops

# Seconds until the bar appears, and seconds between two updates of the bar. If
# the output is a file, each update writes a line, so updates are less frequent.
FIRST_SECONDS = 3.0
TERMINAL_SECONDS = 0.5
FILE_SECONDS = 10.0

# No bar is shown for smaller tables, because they are initialized before the
# bar would appear.
LEAST_BYTES = 1 << 28

_MIB = 1 << 20


class _Progress:
    """Counts the bytes of initial values that this process has computed."""

    def __init__(self) -> None:
        # Bytes that the op `random_block` did not write.
        self.by_others = 0
        # Whether a bar is visible. Only one bar is visible at a time, because a
        # model creates several tables, and a table creates several shards.
        self.is_shown = False

    def bytes(self) -> int:
        """Returns the bytes so far, including the op that is running."""
        return self.by_others + int(ops.bytes_drawn())


_progress = _Progress()


def add_progress(num_bytes: int) -> None:
    """Counts a value that the op `random_block` did not write."""
    _progress.by_others += num_bytes


@contextlib.contextmanager
def show_progress(num_bytes: int) -> Iterator[None]:
    """Context that shows a progress bar if its body takes some seconds.

    The bar shows how much of `num_bytes` is initialized. No bar is shown for
    small tables, if another bar is visible, or while a function is traced.
    """
    if (
        num_bytes < LEAST_BYTES
        or _progress.is_shown
        or (not tf.executing_eagerly())
    ):
        yield
        return
    _progress.is_shown = True
    bar = _Bar(num_bytes)
    try:
        yield
        bar.is_complete = True
    finally:
        bar.end()
        _progress.is_shown = False


class _Bar:
    """A progress bar that a separate thread updates.

    A separate thread is used, so that no device, mesh or strategy of the user's
    program is active when the number of bytes is read.
    """

    def __init__(self, num_bytes: int):
        """Starts the thread, and waits until it counts bytes."""
        # Whether all values are computed. The flag also covers the values of
        # the user's own variable creators, whose bytes are not counted.
        self.is_complete = False
        self._num_bytes = num_bytes
        self._counts = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._counts.wait()

    def end(self) -> None:
        """Stops the thread, and shows the final state if the bar is visible."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            before = _progress.bytes()
        finally:
            self._counts.set()
        if self._ended.wait(FIRST_SECONDS):
            return
        total = max(self._num_bytes // _MIB, 1)
        print("Making tables", flush=True)
        # `tf.keras` is the Keras version of the user's program.
        bar = tf.keras.utils.Progbar(total, unit_name="MiB")
        pause = TERMINAL_SECONDS if sys.stdout.isatty() else FILE_SECONDS
        is_last = False
        while not is_last:
            is_last = self._ended.wait(pause)
            done = min((_progress.bytes() - before) // _MIB, total)
            bar.update(
                total if is_last and self.is_complete else done,
                finalize=is_last,
            )
