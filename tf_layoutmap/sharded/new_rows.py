"""Fast initialization of large tables, with a progress bar.

TensorFlow's initializers, called eagerly, create three tensors of the size of
the table: they draw numbers, multiply and add. The tensors use pages of 4 KiB.
The system clears these pages one at a time, and later reads of random rows wait
for address translations. The op `new_rows` writes bitwise identical numbers
directly into large pages, including numbers that depend on
`tf.random.set_seed`.
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
        # Bytes that the op `new_rows` did not write.
        self.by_others = 0
        # Whether a bar is visible. Only one bar is visible at a time, although
        # a model creates several tables, and a table creates several shards.
        self.is_shown = False

    def bytes(self) -> int:
        """Returns all bytes so far, including bytes of an op that runs."""
        return self.by_others + int(ops.bytes_drawn())


_progress = _Progress()


def add_progress(num_bytes: int) -> None:
    """Counts a value that the op `new_rows` did not write."""
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
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class _Draw(NamedTuple):
    """A distribution: a drawn number times `factor`, plus `offset`."""

    distribution: str
    factor: tf.Tensor
    offset: tf.Tensor


def draw(
    initializer: Any, shape: tuple[int, ...], dtype: tf.DType
) -> tf.Tensor | None:
    """Returns the same tensor as `initializer(shape, dtype=dtype)`, or None.

    None means that the caller has to call the initializer: the initializer is
    not supported here, the result is small, it is on a parameter server that
    may not have this package's ops, or a function is being traced.
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
        # The op counts its bytes in the server's process.
        add_progress(math.prod(shape) * dtype.size)
    return ops.new_rows(
        shape=tf.constant(shape, tf.int64),
        generator=generator,
        factor=found.factor,
        offset=found.offset,
        distribution=found.distribution,
    )


def is_known(initializer: Any, dtype: tf.DType) -> bool:
    """Returns whether all processes draw equal numbers with an initializer.

    This holds for initializers that the op `new_rows` supports.
    """
    return _draw_of(initializer, dtype) is not None


def skip(initializer: Any, dtype: tf.DType) -> bool:
    """Advances TensorFlow's random state as a call of an initializer would.

    TensorFlow's random numbers depend on the number of previous calls.

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
    """Returns `tf.fill` of an integer type; large results use large pages.

    Args:
      shape: Shape of the result.
      value: Value of every element.
      dtype: int32 or int64.
    """
    constant = tf.constant(value, dtype)
    if not _uses_our_op(shape, dtype):
        return tf.fill(shape, constant)
    # The op writes floats, so it gets a float with the same bits.
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
    """Returns whether the op `new_rows` is available and saves time."""
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
    # TensorFlow's eager random ops read the seeds in the same way.
    key, upper = (one or 0 for one in tf.compat.v1.get_seed(None))
    if key == upper == 0:
        key, upper = secrets.randbits(63), secrets.randbits(63)
    return tf.constant([0, upper % 2**64, key % 2**64], tf.uint64)
