"""What TensorFlow's random initializers draw, in the memory of the result.

Called eagerly, they draw numbers, multiply and add: three tensors of the size
of the table. In a function each step works in the memory of the one before,
and what the system clears, page by page, is a third. The numbers are the same
to the bit, also those that depend on `tf.random.set_seed`.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Below it a function takes longer to make than the copies.
_LEAST_SIZE = 1 << 22


def draw(initializer: Any, shape: tuple[int, ...],
         dtype: tf.DType) -> tf.Tensor | None:
    """Returns what `initializer(shape, dtype=dtype)` does.

    None if it must be asked itself: it is no random initializer of
    TensorFlow, or the result is small, or a function is being traced.
    """
    found = _draw_and_range(initializer)
    if (found is None or not tf.executing_eagerly() or not dtype.is_floating
            or math.prod(shape) < _LEAST_SIZE):
        return None
    stateful, stateless, factor, offset = found
    if not isinstance(initializer.seed, (int, type(None))):
        return None

    if initializer.seed is None:
        # Eagerly, as the operation would ask for them.
        seed, seed2 = tf.compat.v1.get_seed(None)

        def numbers():
            return stateful(shape=tf.constant(shape, tf.int64), dtype=dtype,
                            seed=seed or 0, seed2=seed2 or 0)
    else:
        def numbers():
            return stateless(shape, seed=[initializer.seed, 0], dtype=dtype)

    # Arguments, or the optimizer would leave out an addition of zero.
    scaled = tf.function(
        lambda factor, offset: numbers() * factor + offset, autograph=False)
    values = factor(dtype), offset(dtype)
    # One function for each call: nothing to warn of.
    return scaled.get_concrete_function(*values)(*values)


def _draw_and_range(initializer: Any) -> tuple[
        Callable, Callable, Callable, Callable] | None:
    """Operations that draw, and the functions of a dtype that scale."""
    kind = type(initializer)
    if kind.__module__ != tf.random_uniform_initializer.__module__:
        return None
    constant = tf.constant
    if kind is tf.random_uniform_initializer:
        def low(dtype):
            return constant(initializer.minval, dtype)

        return (tf.raw_ops.RandomUniform, tf.random.stateless_uniform,
                lambda dtype: constant(initializer.maxval, dtype) - low(dtype),
                low)
    draws = {"RandomNormal": (tf.raw_ops.RandomStandardNormal,
                              tf.random.stateless_normal),
             "TruncatedNormal": (tf.raw_ops.TruncatedNormal,
                                 tf.random.stateless_truncated_normal)}
    if kind.__name__ not in draws:
        return None
    return (*draws[kind.__name__],
            lambda dtype: constant(initializer.stddev, dtype),
            lambda dtype: constant(initializer.mean, dtype))
