"""Counts of keys, and `sample_keys`, which samples keys that have a row."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import checks, literals, ops, tf_private
from tf_layoutmap.sharded.routing import checks as routing_checks
from tf_layoutmap.vocabulary import key_tensors, stored_keys
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.parts import Part

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TensorLike

DISTRIBUTIONS = ("count", "uniform")


class KeyCounts(abc.ABC):
    """A mixin of `Vocabulary` with the methods that read counts."""

    settings: OpenVocabulary
    name: str

    @abc.abstractmethod
    def _ask(
        self,
        arguments: tf.Tensor,
        function: Callable[[Part, tf.Tensor], list[tf.Tensor]],
        num_results: int,
    ) -> list[list[tf.Tensor]]:
        """Calls a function for each part; see `TableStore.ask`."""

    @abc.abstractmethod
    def _read_keys(self, keys: Any) -> tuple[tf.Tensor, int]:
        """Converts an argument to keys; see `key_tensors.read_keys`."""

    @abc.abstractmethod
    def _check_kind(self, kind: int) -> list[tf.Operation]:
        """Returns ops that check the kind of keys."""

    def counts(self, keys: TensorLike) -> tf.Tensor:
        """Returns the number of uses of each key, and 0 for keys without a row.

        The method can be called eagerly or in a `tf.function`, for example for
        the logQ correction of an in-batch softmax.

        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import tf_layoutmap as tlm
        >>> words = tlm.layers.ShardedEmbedding(
        ...     tlm.vocabulary.OpenVocabulary(100), 8,
        ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
        >>> _ = words(np.array([[0]]))
        >>> _ = words.vocabulary.write([5, 7], counts=[2, 3])
        >>> words.vocabulary.counts([7, 5, 1]).numpy().tolist()
        [3, 2, 0]

        A count is the number of lookups of the key in training steps since the
        key got its row, including the step in which it got the row. If a key
        occurs n times in a step, over all samples, features and replicas, the
        count increases by n. Lookups of sampled negatives also count.

        Lookups before the key was admitted do not count: the sketch of
        `admission="count"` counts them only approximately. If a key is evicted,
        its count is lost. Steps without training do not count. `write` can set
        counts, and a count does not exceed 2^31 - 1.

        With `half_life_steps`, a count is halved, and rounded down, for each
        complete half-life between the last use of the key and the current step.
        This is the count that `evict="lfu"` compares.

        Args:
          keys: Integers or strings, of any shape.

        Returns:
          int64 counts, in the shape of `keys`. The keys and counts of a call
          are read at one point in time. On parameter servers, this holds for
          the keys of each server.

        Raises:
          TypeError: If `keys` are neither integers nor strings.
          NotImplementedError: In a function that XLA compiles or that a
            SavedModel contains.
          tf.errors.InvalidArgumentError: Same as for `lookup`.
        """
        check_has_kernels("counts", self.name)
        key_tensor, kind = self._read_keys(keys)

        def count(part: Part, keys: tf.Tensor) -> list[tf.Tensor]:
            return [
                ops.count_keys(
                    **_arguments(self, part),
                    keys=keys,
                    vocabulary_buckets=self.settings.num_buckets,
                )
            ]

        with tf.control_dependencies(self._check_kind(kind)):
            counts = [
                result
                for (result,) in self._ask(
                    key_tensors.flat(key_tensor), count, 1
                )
            ]
            # A key can have a row in only one part. Its other counts are 0.
            total = counts[0] if len(counts) == 1 else tf.add_n(counts)
            return key_tensors.in_shape_of(key_tensor, total)


class SampledKeys(NamedTuple):
    """Keys that `tlm.ops.sample_keys` has sampled, with replacement.

    Attributes:
      keys: `[num_sampled]` int64. If the ids of the vocabulary are strings, the
        keys are hashes.
      rows: `[num_sampled]` int64, the row of each key in the table.
      expected_counts: `[num_sampled]` float32, the expected number of times
        that each key is in `keys`: `num_sampled` times its probability.
    """

    keys: tf.Tensor
    rows: tf.Tensor
    expected_counts: tf.Tensor

    def ids(self, labels: TensorLike | None = None) -> stored_keys.StoredKeys:
        """Returns the sampled keys as the input of a layer or of a feature.

        Layers and embeddings hash strings, so the int64 tensor `keys` is not a
        valid input for a vocabulary of strings.

        Args:
          labels: None, or integers or strings of any shape, which precede the
            sampled keys in the result. A single lookup, and therefore a single
            step of the vocabulary, then returns the rows of all keys.
        """
        if labels is None:
            return stored_keys.StoredKeys(self.keys)
        keys, kind = key_tensors.read_keys(labels, "labels")
        return stored_keys.StoredKeys(
            tf.concat([tf.reshape(keys, [-1]), self.keys], axis=0),
            kind,
            key_tensors.strings_of(labels),
        )


def sample_keys(
    vocabulary: KeyCounts,
    num_sampled: int | tf.Tensor,
    *,
    distribution: literals.SampleDistribution = "count",
    seed: TensorLike | None = None,
) -> SampledKeys:
    """Samples keys that have a row in an open vocabulary, with replacement.

    The function can be called eagerly or in a `tf.function`, for example to
    sample negatives in each training step.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> words = tlm.layers.ShardedEmbedding(
    ...     tlm.vocabulary.OpenVocabulary(100), 8,
    ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
    >>> _ = words(np.array([[0]]))
    >>> _ = words.vocabulary.write([5, 7], counts=[1, 3])
    >>> sampled = tlm.ops.sample_keys(words.vocabulary, 8, seed=[1, 2])
    >>> set(sampled.keys.numpy().tolist()) <= {5, 7}
    True
    >>> expected = {5: 2.0, 7: 6.0}  # 8 * 1 / 4 and 8 * 3 / 4
    >>> [expected[int(key)] for key in sampled.keys] == (
    ...     sampled.expected_counts.numpy().tolist())
    True

    The probabilities are exact for the keys and counts at the time of the call.
    A call reads the keys and the counts of all rows.

    Args:
      vocabulary: The vocabulary of a table, for example `layer.vocabulary`.
      num_sampled: Number of keys to sample, at least 1: an int or an integer
        scalar.
      distribution: `"count"`: the probability of a key is proportional to its
        count, see `Vocabulary.counts`, but a key with the count 0 has the same
        probability as a key with the count 1. `"uniform"`: all keys have the
        same probability.
      seed: Two integers, `[2]`: the result depends only on the seed and on the
        vocabulary. On parameter servers, it also depends on the number of
        shards. An int: each call draws other keys, as for the op seed of
        `tf.random.uniform`, and each replica draws other keys. None: same as
        for an int, but with a seed from `tf.random.set_seed`.

    Returns:
      A `SampledKeys`. If no key has a row, for example before the first
      training step, its tensors are empty.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If an argument is out of range.
      NotImplementedError: In a function that XLA compiles or that a SavedModel
        contains.
    """
    if not isinstance(vocabulary, KeyCounts):
        raise TypeError(
            checks.message(
                "vocabulary",
                "the vocabulary of a table, for example `layer.vocabulary` of "
                "a built layer with a tlm.vocabulary.OpenVocabulary",
                vocabulary,
            )
        )
    where = f"table {vocabulary.name!r}"
    checks.check_one_of(
        "distribution", distribution, DISTRIBUTIONS, where=where
    )
    check_has_kernels("sample_keys", vocabulary.name)
    number = _read_number(num_sampled, where)
    seeds = _read_seed(seed, where)

    def sample(part: Part, arguments: tf.Tensor) -> list[tf.Tensor]:
        sampled = ops.sample_keys(
            **_arguments(vocabulary, part),
            num_sampled=arguments[0],
            # Each part needs other random numbers.
            seed=tf.reshape(arguments[1:], [2])
            + tf.constant([0, part.index], tf.int64),
            by=distribution,
        )
        return [*sampled[:3], tf.reshape(sampled.total, [1])]

    parts = [
        _Sample(keys, rows, weights, tf.reshape(total, []))
        for keys, rows, weights, total in vocabulary._ask(
            tf.concat([tf.reshape(number, [1]), seeds], 0), sample, 4
        )
    ]
    if len(parts) == 1:
        keys, rows, weights, total = parts[0]
    else:
        keys, rows, weights, total = _choose_shards(parts, number, seeds)
    # Weights and totals can be larger than the integers that float32 holds.
    probabilities = tf.cast(weights, tf.float64) / tf.cast(total, tf.float64)
    expected = probabilities * tf.cast(number, tf.float64)
    return SampledKeys(keys, rows, tf.cast(expected, tf.float32))


def check_has_kernels(function: str, table: str) -> None:
    """Raises an error where the ops of this package have no kernels."""
    if routing_checks.in_xla():
        raise NotImplementedError(
            f"`{function}` is not supported in functions that XLA compiles, "
            "because open vocabularies are on the host; use "
            f"`jit_compile=False` (table {table!r})."
        )
    if tf_private.in_save_context():
        raise NotImplementedError(
            f"`{function}` is not supported in a SavedModel, because the "
            "serving process does not have the ops of this package; call it "
            f"only in training steps (table {table!r})."
        )


class _Sample(NamedTuple):
    """Keys that were sampled from one part of a vocabulary.

    Attributes:
      keys: Sampled keys, int64, as the following attributes.
      rows: The row of each key.
      weights: The weight of each key.
      total: Sum of the weights of all keys of the part.
    """

    keys: tf.Tensor
    rows: tf.Tensor
    weights: tf.Tensor
    total: tf.Tensor


def _arguments(vocabulary: KeyCounts, part: Part) -> dict[str, Any]:
    """Returns the arguments that both ops have."""
    return {
        "lanes": [
            shard.handle
            for variables in part.key_variables()
            for shard in variables
        ],
        "numbers": part.numbers.handle,
        "offsets": part.offsets(),
        "first_bucket": part.buckets.start,
        "half_life_steps": vocabulary.settings.half_life_steps or 0,
        "table": vocabulary.name,
    }


def _choose_shards(
    parts: Sequence[Any], number: tf.Tensor, seeds: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Samples from the samples of all shards.

    For each result, a shard is chosen with the probability of its share of the
    total weight. The result is the sample of this shard at the same index.

    Args:
      parts: The outputs of the op for each shard.
      number: Number of keys to sample.
      seeds: The two seeds.
    """
    ends = tf.cumsum(tf.stack([part.total for part in parts]))
    total = ends[-1]
    draws = tf.random.stateless_uniform(
        tf.expand_dims(number, 0),
        seeds + tf.constant([1, 0], tf.int64),
        minval=tf.zeros([], tf.int64),
        maxval=tf.maximum(total, 1),
        dtype=tf.int64,
    )
    # If no key has a row, all results are empty.
    draws = draws[: tf.where(total > 0, number, 0)]
    chosen = tf.searchsorted(ends, draws, side="right")
    index = tf.stack(
        [chosen, tf.range(tf.size(draws), dtype=chosen.dtype)], axis=1
    )

    def choose(name: str) -> tf.Tensor:
        values = [getattr(part, name) for part in parts]
        # A shard without keys has no samples, and is never chosen.
        padded = [
            tf.pad(
                shard_values, [[0, number - tf.size(shard_values, tf.int64)]]
            )
            for shard_values in values
        ]
        return tf.gather_nd(tf.stack(padded), index)

    return choose("keys"), choose("rows"), choose("weights"), total


def _read_number(num_sampled: Any, where: str) -> tf.Tensor:
    if not tf.is_tensor(num_sampled):
        checks.check_int("num_sampled", num_sampled, lowest=1, where=where)
        return tf.constant(num_sampled, tf.int64)
    if not num_sampled.dtype.is_integer or num_sampled.shape.rank not in (
        None,
        0,
    ):
        raise TypeError(
            checks.message(
                "num_sampled", "an integer scalar", num_sampled, where
            )
        )
    return tf.cast(num_sampled, tf.int64)


def _read_seed(seed: Any, where: str) -> tf.Tensor:
    """Returns two seeds as an int64 tensor."""
    if seed is None or isinstance(seed, int):
        limits = tf.int64.limits
        drawn = tf.random.uniform(
            [2], limits[0], limits[1], dtype=tf.int64, seed=seed
        )
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return drawn
        # All replicas draw the same numbers.
        number = tf.cast(replica.replica_id_in_sync_group, tf.int64)
        return drawn + tf.stack([number, tf.zeros_like(number)])
    seed_tensor = tf.convert_to_tensor(seed)
    if (
        not seed_tensor.dtype.is_integer
        or not seed_tensor.shape.is_compatible_with([2])
    ):
        raise ValueError(
            checks.message("seed", "None, an int, or two integers", seed, where)
        )
    return tf.cast(seed_tensor, tf.int64)
