"""What TensorFlow's initializers give, written straight into large pages.

Called eagerly, they draw numbers, multiply and add: three tensors of the size
of the table, in pages of 4 KiB, which the system clears one by one and whose
addresses random rows wait for ever after. One operation of ours draws the same
numbers to the bit, also those that depend on `tf.random.set_seed`.
"""

# DOC-MERGE: How far tables are that take seconds to make, as a bar.
import contextlib
import math
import secrets
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import ops, strategies, tf_private

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
        return self.by_others + int(ops.bytes_drawn())


_made = _Made()


def add_progress(num_bytes: int) -> None:
    """Counts a value that is ready and was not drawn by `new_rows`."""
    _made.by_others += num_bytes


@contextlib.contextmanager
def show_progress(num_bytes: int) -> Iterator[None]:
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


# Bytes. Below them there is no large page to fill.
_LEAST_SIZE = 1 << 22
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class _Draw(NamedTuple):
    """How a value is drawn: a number times `factor`, plus `offset`."""

    distribution: str
    factor: tf.Tensor
    offset: tf.Tensor


def draw(
    initializer: Any, shape: tuple[int, ...], dtype: tf.DType
) -> tf.Tensor | None:
    """Returns what `initializer(shape, dtype=dtype)` does.

    None if it must be asked itself: it is none of TensorFlow's that this
    module knows, or the result is small, or on a parameter server that may
    not know our operations, or a function is being traced.
    """
    if not _is_for_us(shape, dtype):
        return None
    found = _draw_of(initializer, dtype)
    if found is None:
        return None
    generator = tf.zeros([3], tf.uint64)
    if found.distribution != "constant":
        generator = _generator(initializer.seed)
    if _is_on_server():
        # What it draws is counted there.
        add_progress(math.prod(shape) * dtype.size)
    return ops.new_rows(
        shape=tf.constant(shape, tf.int64),
        generator=generator,
        factor=found.factor,
        offset=found.offset,
        distribution=found.distribution,
    )


def is_known(initializer: Any, dtype: tf.DType) -> bool:
    """Whether any process draws the same, by our operation or TensorFlow's."""
    return _draw_of(initializer, dtype) is not None


def skip(initializer: Any, dtype: tf.DType) -> bool:
    """Lets an initializer be as if it had been asked; false if it is unknown.

    What TensorFlow draws depends on how often it was asked before.
    """
    found = _draw_of(initializer, dtype)
    if found is None:
        return False
    if found.distribution != "constant":
        _generator(initializer.seed)
    return True


def fill(shape: tuple[int, ...], value: int, dtype: tf.DType) -> tf.Tensor:
    """Returns `tf.fill` of an integer type, in large pages if it is large.

    Args:
      shape: Of the result.
      value: What every element is.
      dtype: int32 or int64.
    """
    constant = tf.constant(value, dtype)
    if not _is_for_us(shape, dtype):
        return tf.fill(shape, constant)
    # The operation writes floats: it is given one of the same bits.
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


def _is_for_us(shape: tuple[int, ...], dtype: tf.DType) -> bool:
    """Whether it pays, and the operation is there."""
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
    # The value of `tf.constant_initializer` may be an array.
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
    """The counter and the key with which TensorFlow draws, uint64 [3]."""
    if seed is not None:
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[seed, 0])
        return tf.concat([counter, key], 0)
    # Eagerly, as the operation would ask for them.
    key, upper = (one or 0 for one in tf.compat.v1.get_seed(None))
    if key == upper == 0:
        key, upper = secrets.randbits(63), secrets.randbits(63)
    return tf.constant([0, upper % 2**64, key % 2**64], tf.uint64)
