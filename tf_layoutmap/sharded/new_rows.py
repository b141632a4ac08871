"""Fast initialization of large tables, with a progress bar.

When TensorFlow's initializers are called eagerly, they draw numbers, multiply
and add, and each of these three ops creates a tensor of the size of the table.
The tensors use memory pages of 4 KiB. The operating system clears these pages
one at a time, and later reads of random rows wait for address translations. The
op `new_rows` writes bitwise identical numbers directly into large pages.
Numbers that depend on `tf.random.set_seed` are also bitwise identical.
"""

import contextlib
import math
import secrets
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import ops, strategies, tf_private

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
        # Bytes that other ops than `new_rows` have written.
        self.by_others = 0
        # Whether a bar is visible. Only one bar is visible at a time, because a
        # model creates several tables, and a table creates several shards.
        self.is_shown = False

    def bytes(self) -> int:
        """Returns the bytes so far, including the op that is running."""
        return self.by_others + int(ops.bytes_drawn())


_progress = _Progress()


def add_progress(num_bytes: int) -> None:
    """Counts the bytes of a value that the op `new_rows` did not write."""
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
        # Whether all values are computed, including values from the user's own
        # variable creators. The bytes of these values are not counted.
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


# Smallest size in bytes for which large pages are used.
_LEAST_SIZE = 1 << 22
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class _Draw(NamedTuple):
    """Distribution of the number `drawn * factor + offset`."""

    distribution: str
    factor: tf.Tensor
    offset: tf.Tensor


def draw(
    initializer: Any, shape: tuple[int, ...], dtype: tf.DType
) -> tf.Tensor | None:
    """Returns the value of `initializer(shape, dtype=dtype)`, or None.

    If the result is None, the caller must call the initializer itself. The
    result is None if the initializer is not supported, if the value is small,
    if the value is on a parameter server that may not have this package's ops,
    or if a function is being traced.
    """
    if not _uses_our_op(shape, dtype):
        return None
    found = _draw_of(initializer, dtype)
    if found is None:
        return None
    generator = tf.zeros([3], tf.uint64)
    if found.distribution != "constant":
        generator = _generator(initializer.seed)
    if _is_on_server():
        # The op runs on a server and counts its bytes there, so they are added
        # here.
        add_progress(math.prod(shape) * dtype.size)
    return ops.new_rows(
        shape=tf.constant(shape, tf.int64),
        generator=generator,
        factor=found.factor,
        offset=found.offset,
        distribution=found.distribution,
    )


def is_known(initializer: Any, dtype: tf.DType) -> bool:
    """Returns whether the op `new_rows` supports an initializer.

    All processes draw equal numbers with a supported initializer.
    """
    return _draw_of(initializer, dtype) is not None


def skip(initializer: Any, dtype: tf.DType) -> bool:
    """Advances TensorFlow's random state without calling an initializer.

    The state must be advanced, because TensorFlow's random numbers depend on
    the number of previous calls.

    Returns:
      Whether the initializer is supported.
    """
    found = _draw_of(initializer, dtype)
    if found is None:
        return False
    if found.distribution != "constant":
        _generator(initializer.seed)
    return True


def fill(shape: tuple[int, ...], value: int, dtype: tf.DType) -> tf.Tensor:
    """Returns integers of equal value, in large pages if the result is large.

    Args:
      shape: Shape of the result.
      value: Value of every element.
      dtype: int32 or int64.
    """
    constant = tf.constant(value, dtype)
    if not _uses_our_op(shape, dtype):
        return tf.fill(shape, constant)
    # The op can write only floats, so this function writes floats with the same
    # bits as the integer.
    as_float = tf.float32 if dtype == tf.int32 else tf.float64
    return tf.bitcast(
        ops.new_rows(
            shape=tf.constant(shape, tf.int64),
            generator=tf.zeros([3], tf.uint64),
            factor=tf.zeros([], as_float),
            offset=tf.bitcast(constant, as_float),
            distribution="constant",
        ),
        dtype,
    )


def _uses_our_op(shape: tuple[int, ...], dtype: tf.DType) -> bool:
    """Returns whether the op `new_rows` is available and faster."""
    return (
        tf.executing_eagerly()
        and math.prod(shape) * dtype.size >= _LEAST_SIZE
        and (not _is_on_server() or strategies.servers_know_our_ops())
    )


def _is_on_server() -> bool:
    return "/job:ps" in tf_private.current_device()


def _draw_of(initializer: Any, dtype: tf.DType) -> _Draw | None:
    kind = type(initializer)
    if dtype not in _DTYPES or not isinstance(
        getattr(initializer, "seed", None), (int, type(None))
    ):
        return None
    if kind.__module__ != tf.random_uniform_initializer.__module__:
        return None

    def number(value: Any) -> tf.Tensor:
        return tf.constant(value, dtype)

    if kind is tf.random_uniform_initializer:
        low = number(initializer.minval)
        return _Draw("uniform", number(initializer.maxval) - low, low)
    # The value of `tf.constant_initializer` may be an array, which the op does
    # not support.
    constants = {
        tf.zeros_initializer: 0,
        tf.ones_initializer: 1,
        tf.constant_initializer: getattr(initializer, "value", None),
    }
    if isinstance(constants.get(kind), (int, float)):
        return _Draw("constant", number(0), number(constants[kind]))
    draws = {"RandomNormal": "normal", "TruncatedNormal": "truncated_normal"}
    if kind.__name__ not in draws:
        return None
    return _Draw(
        draws[kind.__name__],
        number(initializer.stddev),
        number(initializer.mean),
    )


def _generator(seed: int | None) -> tf.Tensor:
    """Returns counter and key of TensorFlow's generator, uint64 [3]."""
    if seed is not None:
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[seed, 0])
        return tf.concat([counter, key], 0)
    # TensorFlow's eager random ops compute their seeds in the same way.
    key, upper = (one or 0 for one in tf.compat.v1.get_seed(None))
    if key == upper == 0:
        key, upper = secrets.randbits(63), secrets.randbits(63)
    return tf.constant([0, upper % 2**64, key % 2**64], tf.uint64)
