"""The values that `Embedding` of Keras starts with, one shard at a time."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.sharded.initial_value import ShardInfo

# Numbers that TensorFlow's generator on a CPU makes from one count of its
# counter, for float32.
_GROUP = 4

# Of each distribution: its operation, and how many counts it keeps for a group
# of numbers. A truncated one draws again what falls outside.
_OPS = {
    "uniform": ("StatelessRandomUniformV2", 1),
    "normal": ("StatelessRandomNormalV2", 1),
    "truncated_normal": ("StatelessTruncatedNormalV2", 256),
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers of a whole table: `scale * drawn + offset`.

    Attributes:
      distribution: `"uniform"`, `"normal"` or `"truncated_normal"`.
      seed: `[2]` int32, as `tf.random.stateless_uniform` takes it.
      scale, offset: `[]` float32.
    """

    distribution: str
    seed: tf.Tensor
    scale: tf.Tensor
    offset: tf.Tensor

    def rows(self, start: int, num_rows: int, dim: int) -> tf.Tensor:
        """Returns rows of the table `[..., dim]`, drawing no others."""
        op, counts = _OPS[self.distribution]
        first, skipped = divmod(start * dim, _GROUP)
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=self.seed)
        low, high = (int(one) for one in counter.numpy())
        moved = low + (high << 64) + first * counts
        counter = tf.constant([moved % 2**64, (moved >> 64) % 2**64], tf.uint64)
        drawn = getattr(tf.raw_ops, op)(
            shape=tf.constant([skipped + num_rows * dim], tf.int64),
            key=key,
            counter=counter,
            alg=tf.raw_ops.StatelessRandomGetAlg(),
            dtype=tf.float32,
        )
        drawn = drawn[skipped:] * self.scale + self.offset
        return tf.reshape(drawn, [num_rows, dim])


def draw_of(
    kinds: Any,
    initializer: Any,
    stateless_seed: Callable[[Any], tf.Tensor | None],
) -> Draw | None:
    """Returns the random numbers of one of Keras' initializers, if known.

    Args:
      kinds: The `initializers` module of its Keras version.
      initializer: That is asked for its numbers.
      stateless_seed: Returns the seed of its next numbers, `[2]` int32, or
        None if it is not known.
    """
    known = {
        kinds.RandomUniform: ("uniform", "minval", "maxval"),
        kinds.RandomNormal: ("normal", "mean", "stddev"),
        kinds.TruncatedNormal: ("truncated_normal", "mean", "stddev"),
    }
    # Not of a subclass, which may draw otherwise.
    if type(initializer) not in known:
        return None
    seed = stateless_seed(initializer)
    if seed is None:
        return None
    distribution, *names = known[type(initializer)]
    first, second = (
        tf.constant(getattr(initializer, name), tf.float32) for name in names
    )
    if distribution == "uniform":
        return Draw(distribution, seed, second - first, first)
    return Draw(distribution, seed, second, first)


def of_one_table(
    initializer: Callable[..., Any],
    shape: tuple[int, int],
    dtype: tf.DType,
    draw_of: Callable[[Any], Draw | None],
) -> Callable[..., Any]:
    """Returns what gives each shard its rows of the whole table's values.

    Args:
      initializer: An initializer of Keras whose values depend on the shape,
        or are random.
      shape: Of the whole table.
      dtype: Of the table.
      draw_of: Returns the `Draw` of an initializer, and moves a seed with
        state on; None where there is none.

    Returns:
      For an initializer that asks for a shard itself, that; else one that
      does, as `ShardedVariable.create` takes it, once for all shards.
    """
    asked = inspect.signature(initializer).parameters
    if {"shard_info", "partition_shape"} & set(asked):
        return initializer
    return _OneTable(initializer, shape, dtype, draw_of)


class _OneTable:
    """Draws at the first shard; a whole table is let go at the last one."""

    def __init__(
        self,
        initializer: Any,
        shape: tuple[int, int],
        dtype: tf.DType,
        draw_of: Callable[[Any], Draw | None],
    ):
        self._initializer = initializer
        self._shape = shape
        self._dtype = dtype
        self._draw_of = draw_of
        self._draw: Draw | None = None
        self._is_asked = False
        self._whole: tf.Tensor | None = None

    def is_drawn(self) -> bool:
        """Whether TensorFlow's operations draw each shard where it is."""
        if (
            not self._is_asked
            and self._dtype == tf.float32
            and (tf.executing_eagerly())
        ):
            self._draw = self._draw_of(self._initializer)
        self._is_asked = True
        return self._draw is not None

    def __call__(self, shard_info: ShardInfo) -> tf.Tensor:
        start, num_rows = shard_info.offset[0], shard_info.shape[0]
        if self.is_drawn():
            assert self._draw is not None
            return self._draw.rows(start, num_rows, self._shape[1])
        if self._whole is None:
            self._whole = tf.convert_to_tensor(
                self._initializer(self._shape, dtype=self._dtype)
            )
        rows = self._whole[start : start + num_rows]
        if start + num_rows == self._shape[0]:
            self._whole = None
        return rows
