"""Progress bar and large pages for the initialization of large tables.

TensorFlow's initializers create three tensors of the size of the table, because
they draw numbers, multiply and add in separate ops. The tensors use pages of 4
KiB. The system clears these pages one at a time, and later reads of random rows
wait for address translations. The op `random_block` writes bitwise identical
numbers directly into large pages (`random_tensors`).
"""

import contextlib
import math
import secrets
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import ops, random_tensors

# Seconds until the bar appears, and between its updates. If the output is not a
# terminal, each update is a line of a file.
FIRST_SECONDS = 3.0
TERMINAL_SECONDS = 0.5
FILE_SECONDS = 10.0

# Smaller tables are ready before the bar would appear.
LEAST_BYTES = 1 << 28

_MIB = 1 << 20


class _Progress:
    """Bytes of initial values that this process has computed."""

    def __init__(self) -> None:
        # Bytes that the op `random_block` did not write.
        self.by_others = 0
        # Whether a bar is visible. Only one bar is visible at a time, although
        # a model creates several tables, and a table creates several shards.
        self.is_shown = False

    def bytes(self) -> int:
        """Returns all bytes so far, including bytes of an op that runs."""
        return self.by_others + int(ops.bytes_drawn())


_progress = _Progress()


def add_progress(num_bytes: int) -> None:
    """Counts a value that the op `random_block` did not write."""
    _progress.by_others += num_bytes


@contextlib.contextmanager
def show_progress(num_bytes: int) -> Iterator[None]:
    """Shows, after a few seconds, how much of `num_bytes` is initialized.

    No bar is shown for small tables, inside another bar, or during tracing.
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

    The thread reads the number of bytes where no device, mesh or strategy of
    the user's program is active.
    """

    def __init__(self, num_bytes: int):
        """Starts the thread, and returns after it has started to count."""
        # Whether all values are ready, including values of variable creators
        # of the user's program, which are not counted.
        self.is_complete = False
        self._num_bytes = num_bytes
        self._counts = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._counts.wait()

    def end(self) -> None:
        """Shows the final state if the bar is visible, and ends the thread."""
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
        # `tf.keras` is the Keras version that the user's program uses.
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


# Smallest size in bytes for which large pages are used.
_LEAST_SIZE = 1 << 22


def fill(shape: tuple[int, ...], value: int, dtype: tf.DType) -> tf.Tensor:
    """Returns `tf.fill` of an integer type; large results use large pages.

    Args:
      shape: Shape of the result.
      value: Value of every element.
      dtype: int32 or int64.
    """
    constant = tf.constant(value, dtype)
    if (
        not tf.executing_eagerly()
        or math.prod(shape) * dtype.size < _LEAST_SIZE
        or random_tensors.is_on_stock_server()
    ):
        return tf.fill(shape, constant)
    # The op writes floats, so it gets a float with the same bits.
    as_float = tf.float32 if dtype == tf.int32 else tf.float64
    values = random_tensors.RandomTensor(
        shape,
        "constant",
        generator=tf.zeros([3], tf.uint64),
        factor=tf.zeros([], as_float),
        offset=tf.bitcast(constant, as_float),
    )
    return tf.bitcast(values.block([0] * len(shape), shape), dtype)
