"""Initial values of Keras' `Embedding`, computed one shard at a time."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.sharded.initial_value import ShardInfo

# Number of float32 values that TensorFlow's CPU generator produces per counter
# value.
_GROUP = 4

# Maps each distribution to its op and to the number of counter values that the
# op reserves for each group of values. The op for truncated normal values
# reserves more, because it draws again when a value is outside the range.
_OPS = {
    "uniform": ("StatelessRandomUniformV2", 1),
    "normal": ("StatelessRandomNormalV2", 1),
    "truncated_normal": ("StatelessTruncatedNormalV2", 256),
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random values of a full table: `scale * drawn + offset`.

    Attributes:
      distribution: `"uniform"`, `"normal"` or `"truncated_normal"`.
      seed: `[2]` int32, as for `tf.random.stateless_uniform`.
      scale, offset: `[]` float32.
    """

    distribution: str
    seed: tf.Tensor
    scale: tf.Tensor
    offset: tf.Tensor

    def rows(self, start: int, num_rows: int, dim: int) -> tf.Tensor:
        """Returns `num_rows` rows from `start` on; draws no other rows."""
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


def known_draw(
    kinds: Any,
    initializer: Any,
    stateless_seed: Callable[[Any], tf.Tensor | None],
) -> Draw | None:
    """Returns the `Draw` of a Keras initializer, or None if there is none.

    Args:
      kinds: The `initializers` module of the initializer's Keras version.
      initializer: The initializer.
      stateless_seed: Function that returns the seed of an initializer's next
        values, `[2]` int32, or None if the seed is not known.
    """
    known = {
        kinds.RandomUniform: ("uniform", "minval", "maxval"),
        kinds.RandomNormal: ("normal", "mean", "stddev"),
        kinds.TruncatedNormal: ("truncated_normal", "mean", "stddev"),
    }
    # Subclasses are excluded, because they may draw values in another way.
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


def sharded_initializer(
    initializer: Callable[..., Any],
    shape: tuple[int, int],
    dtype: tf.DType,
    known_draw: Callable[[Any], Draw | None],
) -> Callable[..., Any]:
    """Returns an initializer that gives each shard its slice of a full table.

    Args:
      initializer: A Keras initializer whose values are random or depend on the
        shape.
      shape: Shape of the full table.
      dtype: Dtype of the table.
      known_draw: Function that returns the `Draw` of an initializer and
        advances its stateful seed. The function returns None if the initializer
        has no `Draw`.

    Returns:
      `initializer` if it accepts shard arguments. Otherwise a callable with a
      `shard_info` argument, as for `ShardedVariable.create`. The callable must
      be called once for each shard, in the order of the shards.
    """
    parameters = inspect.signature(initializer).parameters
    if {"shard_info", "partition_shape"} & set(parameters):
        return initializer
    return _ShardedInitializer(initializer, shape, dtype, known_draw)


class _ShardedInitializer:
    """Initializer of shards that returns slices of the full table's values.

    If the initializer has no `Draw`, the call for the first shard computes the
    full table, and the call for the last shard releases its memory.
    """

    def __init__(
        self,
        initializer: Any,
        shape: tuple[int, int],
        dtype: tf.DType,
        known_draw: Callable[[Any], Draw | None],
    ):
        self._initializer = initializer
        self._shape = shape
        self._dtype = dtype
        self._known_draw = known_draw
        self._draw: Draw | None = None
        self._is_draw_known = False
        self._full_table: tf.Tensor | None = None

    def is_drawn(self) -> bool:
        """Whether the values of each shard are drawn separately."""
        if (
            not self._is_draw_known
            and self._dtype == tf.float32
            and (tf.executing_eagerly())
        ):
            self._draw = self._known_draw(self._initializer)
        self._is_draw_known = True
        return self._draw is not None

    def __call__(self, shard_info: ShardInfo) -> tf.Tensor:
        start, num_rows = shard_info.offset[0], shard_info.shape[0]
        if self.is_drawn():
            assert self._draw is not None
            return self._draw.rows(start, num_rows, self._shape[1])
        if self._full_table is None:
            self._full_table = tf.convert_to_tensor(
                self._initializer(self._shape, dtype=self._dtype)
            )
        rows = self._full_table[start : start + num_rows]
        if start + num_rows == self._shape[0]:
            self._full_table = None
        return rows
