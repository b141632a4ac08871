"""Blocks of the random values that an initializer returns.

TensorFlow's CPU kernels for random numbers use a counter-based generator
(Philox), so each block of a tensor can be computed without the rest of the
tensor. A `RandomTensor` describes the values that an initializer of TensorFlow,
Keras 3 or tf_keras would return for the full shape. Each device, shard or
server then computes only its own block (`RandomTensor.block`), and all blocks
together are bitwise identical to the result of the initializer.

TensorFlow's initializers create three tensors of the size of the table, because
they draw numbers, multiply and add in separate ops. The tensors use pages of 4
KiB. The system clears these pages one at a time, and later reads of random rows
wait for address translations. The op `random_block` writes bitwise identical
numbers directly into large pages.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, strategies, tf_private

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)

# For each distribution, the op that draws from a given generator.
_TENSORFLOW_OPS = {
    "uniform": tf.raw_ops.StatelessRandomUniformV2,
    "normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_PHILOX = 1
# Number of 32-bit values that TensorFlow reserves per number of a truncated
# normal distribution, which draws again if a number is outside of the range.
_RESERVED = 256

# Smallest size in bytes for which `fill` uses large pages.
_LEAST_FILL_BYTES = 1 << 22


class _Library(NamedTuple):
    """The initializers of one library.

    Attributes:
      module: Module of the random initializers.
      constants: Module of the constant initializers.
      fans: Function that is called as `fans(initializer, shape)` and returns
        the numbers of input and output units.
      generator: Function that is called as `generator(initializer)` and returns
        the generator of the next call; None if it is not known. The function
        advances the state of the initializer in the same way as a call of the
        initializer.
      to_dtype: Function that is called as `to_dtype(value, dtype)` and converts
        a constant, or a limit of a uniform distribution, as the library does.
    """

    module: str
    constants: str
    fans: Callable[[Any, tuple[int, ...]], tuple[int, int]]
    generator: Callable[[Any], tf.Tensor | None]
    to_dtype: Callable[[Any, tf.DType], tf.Tensor]


class RandomTensor(NamedTuple):
    """The random values of a tensor: `drawn * factor + offset`.

    Attributes:
      shape: Shape of the tensor.
      distribution: `"uniform"`, `"normal"`, `"truncated_normal"`, or
        `"constant"`, where every value is `offset`.
      generator: Counter and key of the Philox generator, `[3]` uint64.
      factor, offset: `[]`, with the dtype of the tensor.
    """

    shape: tuple[int, ...]
    distribution: str
    generator: tf.Tensor
    factor: tf.Tensor
    offset: tf.Tensor

    def block(
        self,
        start: Sequence[int],
        shape: Sequence[int],
        row_step: int = 1,
    ) -> tf.Tensor:
        """Computes a block of the tensor on the current device.

        Args:
          start: Index of the first element of the block, one number per
            dimension.
          shape: Shape of the block. Elements outside of the tensor are 0.
          row_step: Distance between two rows of the block in the tensor.

        Returns:
          A tensor of shape `shape`, with the dtype of `factor`.
        """
        if is_on_stock_server():
            return self._block_by_tensorflow(start, shape, row_step)
        return ops.random_block(
            shape=tf.constant(shape, tf.int64, [len(shape)]),
            full_shape=tf.constant(self.shape, tf.int64, [len(shape)]),
            start=tf.constant(start, tf.int64, [len(shape)]),
            row_step=tf.constant(row_step, tf.int64),
            generator=self.generator,
            factor=self.factor,
            offset=self.offset,
            distribution=self.distribution,
        )

    def _block_by_tensorflow(
        self, start: Sequence[int], shape: Sequence[int], row_step: int
    ) -> tf.Tensor:
        """Computes a block on a server, with TensorFlow's own ops only.

        The server draws all rows between the first and the last row of the
        block in full, and then selects the rows and columns of the block.
        """
        if self.distribution == "constant" or 0 in shape:
            return tf.fill(shape, self.offset)
        num_rows = (shape[0] - 1) * row_step + 1
        row_size = math.prod(self.shape[1:])
        group_size = 2 if self.factor.dtype == tf.float64 else 4
        groups, skipped = divmod(start[0] * row_size, group_size)
        counts = (
            group_size * _RESERVED // 4
            if self.distribution == "truncated_normal"
            else 1
        )
        low, high, key = (int(word) for word in self.generator.numpy())
        counter = low + (high << 64) + groups * counts
        drawn = _TENSORFLOW_OPS[self.distribution](
            shape=tf.constant([skipped + num_rows * row_size], tf.int64),
            key=tf.constant([key], tf.uint64),
            counter=tf.constant(
                [counter % 2**64, (counter >> 64) % 2**64], tf.uint64
            ),
            alg=_PHILOX,
            dtype=self.factor.dtype,
        )
        rows = tf.reshape(
            drawn[skipped:] * self.factor + self.offset,
            [num_rows, *self.shape[1:]],
        )[::row_step]
        return tf.slice(rows, [0, *start[1:]], shape)


def random_tensor(
    initializer: Any, shape: Sequence[int], dtype: tf.DType
) -> RandomTensor | None:
    """Returns the values of `initializer(shape, dtype=dtype)`, uncomputed.

    The state of the initializer and of TensorFlow's random numbers advances as
    in a call of the initializer.

    >>> import tensorflow as tf
    >>> initializer = tf.random_normal_initializer(seed=1)
    >>> values = random_tensor(initializer, (4, 6), tf.float32)
    >>> right = values.block(start=(0, 3), shape=(4, 3))
    >>> bool(tf.reduce_all(right == initializer((4, 6))[:, 3:]))
    True

    Args:
      initializer: Any callable.
      shape: Shape of the full tensor, rank at least 1.
      dtype: Dtype of the tensor.

    Returns:
      The values; None if the values of the initializer can only be computed in
      full, for example orthogonal matrices and callables of users.
    """
    shape = tuple(shape)
    parameters = _parameters(initializer, shape, dtype)
    library = _library_of(initializer)
    if parameters is None or library is None or not tf.executing_eagerly():
        return None
    distribution, factor, offset = parameters
    generator = tf.zeros([3], tf.uint64)
    if distribution != "constant":
        generator = library.generator(initializer)
        if generator is None:
            return None
    return RandomTensor(shape, distribution, generator, factor, offset)


def is_known(initializer: Any, dtype: tf.DType) -> bool:
    """Returns whether `random_tensor` can describe an initializer."""
    return _parameters(initializer, None, dtype) is not None


def is_on_server() -> bool:
    """Returns whether the current device belongs to a parameter server."""
    return "/job:ps" in tf_private.current_device()


def is_on_stock_server() -> bool:
    """Returns whether the current device may not have this package's ops."""
    return is_on_server() and not strategies.servers_know_our_ops()


def fill(shape: tuple[int, ...], value: int, dtype: tf.DType) -> tf.Tensor:
    """Returns integers of equal value, in large pages if the result is large.

    Args:
      shape: Shape of the result.
      value: Value of every element.
      dtype: int32 or int64.
    """
    constant = tf.constant(value, dtype)
    if (
        not tf.executing_eagerly()
        or math.prod(shape) * dtype.size < _LEAST_FILL_BYTES
        or is_on_stock_server()
    ):
        return tf.fill(shape, constant)
    # The op can write only floats, so this function writes floats with the same
    # bits as the integer.
    as_float = tf.float32 if dtype == tf.int32 else tf.float64
    values = RandomTensor(
        shape,
        "constant",
        generator=tf.zeros([3], tf.uint64),
        factor=tf.zeros([], as_float),
        offset=tf.bitcast(constant, as_float),
    )
    return tf.bitcast(values.block([0] * len(shape), shape), dtype)


def _parameters(
    initializer: Any, shape: tuple[int, ...] | None, dtype: tf.DType
) -> tuple[str, tf.Tensor, tf.Tensor] | None:
    """Returns the distribution, factor and offset of an initializer.

    Args:
      initializer: Any callable.
      shape: Shape of the full tensor. None if the caller only checks whether
        the result is None.
      dtype: Dtype of the tensor.

    Returns:
      None if the values cannot be computed in blocks.
    """
    library = _library_of(initializer)
    if library is None or dtype not in _DTYPES or shape == ():
        return None
    kind = type(initializer)

    def scaled(
        distribution: str, factor: Any, offset: Any
    ) -> tuple[str, tf.Tensor, tf.Tensor] | None:
        if np.ndim(factor) or np.ndim(offset):
            return None
        return (
            distribution,
            tf.constant(factor, dtype),
            tf.constant(offset, dtype),
        )

    def uniform(low: Any, high: Any):
        if np.ndim(low) or np.ndim(high):
            return None
        low, high = library.to_dtype(low, dtype), library.to_dtype(high, dtype)
        return "uniform", high - low, low

    if kind.__name__ in ("Zeros", "Ones", "Constant"):
        value = {"Zeros": 0, "Ones": 1}.get(
            kind.__name__, getattr(initializer, "value", None)
        )
        if not isinstance(value, (int, float)):
            return None
        return "constant", tf.zeros([], dtype), library.to_dtype(value, dtype)
    if kind.__name__ == "RandomUniform":
        return uniform(initializer.minval, initializer.maxval)
    if kind.__name__ == "RandomNormal":
        return scaled("normal", initializer.stddev, initializer.mean)
    if kind.__name__ == "TruncatedNormal":
        return scaled("truncated_normal", initializer.stddev, initializer.mean)
    if not any(base.__name__ == "VarianceScaling" for base in kind.__mro__):
        return None
    scale = initializer.scale
    fan_in, fan_out = (
        (1, 1) if shape is None else library.fans(initializer, shape)
    )
    scale /= max(
        1.0,
        {"fan_in": fan_in, "fan_out": fan_out}.get(
            initializer.mode, (fan_in + fan_out) / 2.0
        ),
    )
    # All three libraries use the same formula and the same constant, the
    # standard deviation of a normal distribution that is truncated at 2.
    if initializer.distribution == "truncated_normal":
        return scaled(
            "truncated_normal", math.sqrt(scale) / 0.87962566103423978, 0.0
        )
    if initializer.distribution == "untruncated_normal":
        return scaled("normal", math.sqrt(scale), 0.0)
    limit = math.sqrt(3.0 * scale)
    return uniform(-limit, limit)


def _library_of(initializer: Any) -> _Library | None:
    """Returns the library that defines the class of an initializer.

    Subclasses of users are excluded, because they can return other values.
    """
    # `library` imports the library, which the program has already imported.
    name = type(initializer).__module__
    for root, library in _LIBRARIES.items():
        if name.startswith(root):
            loaded = library()
            return loaded if name in (loaded.module, loaded.constants) else None
    return None


def _generator_of_seed(seed: Any) -> tf.Tensor:
    """Returns the generator of a stateless op with the seed `[2]`."""
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    return tf.concat([counter, key], 0)


def _constant(value: Any, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(value, dtype)


def _tensorflow() -> _Library:
    def generator(initializer: Any) -> tf.Tensor:
        if initializer.seed is not None:
            return _generator_of_seed([initializer.seed, 0])
        # TensorFlow's eager random ops read the seeds in the same way.
        key, upper = (seed or 0 for seed in tf.compat.v1.get_seed(None))
        if key == upper == 0:
            key, upper = secrets.randbits(63), secrets.randbits(63)
        return tf.constant([0, upper % 2**64, key % 2**64], tf.uint64)

    module = tf.random_uniform_initializer.__module__
    return _Library(
        module,
        module,
        lambda _, shape: tf_private.compute_fans(shape),
        generator,
        _constant,
    )


def _keras3() -> _Library:
    from tf_layoutmap._core import keras_private

    def generator(initializer: Any) -> tf.Tensor | None:
        seed = keras_private.stateless_seed_of(initializer)
        return None if seed is None else _generator_of_seed(seed)

    return _Library(
        keras_private.RandomInitializer.__module__,
        keras_private.constant_initializers.__name__,
        keras_private.fans_of,
        generator,
        # Keras converts Python numbers to float32 first.
        tf.cast,
    )


def _tf_keras() -> _Library:
    from tf_layoutmap._core import tf_keras_private

    def generator(initializer: Any) -> tf.Tensor | None:
        seed = tf_keras_private.stateless_seed_of(initializer)
        return None if seed is None else _generator_of_seed(seed)

    module = tf_keras_private.VarianceScaling.__module__
    return _Library(
        module,
        module,
        lambda _, shape: tf_keras_private.compute_fans(shape),
        generator,
        _constant,
    )


_LIBRARIES: dict[str, Callable[[], _Library]] = {
    "tensorflow.": _tensorflow,
    "keras.": _keras3,
    "tf_keras.": _tf_keras,
}
