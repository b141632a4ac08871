"""What TensorFlow's initializers give, written straight into large pages.

Called eagerly, they draw numbers, multiply and add: three tensors of the size
of the table, in pages of 4 KiB, which the system clears one by one and whose
addresses random rows wait for ever after. One operation of ours draws the same
numbers to the bit, also those that depend on `tf.random.set_seed`.
"""

import math
import secrets
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap import _ops, _strategies, _tf_private
from tf_layoutmap.sharded import creation_progress

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
        creation_progress.add(math.prod(shape) * dtype.size)
    return _ops.new_rows(
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
        _ops.new_rows(
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
        and (not _is_on_server() or _strategies.servers_know_our_ops())
    )


def _is_on_server() -> bool:
    return "/job:ps" in _tf_private.current_device()


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
