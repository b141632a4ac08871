"""What can be asked of the keys of one table."""

# DOC-MERGE: The numbers of a vocabulary whose shards each count for themselves.
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.sharded.routing import assertions
from tf_layoutmap.vocabulary import bucket_layout, key_tensors, stock_find
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary

Array = np.ndarray[Any, Any]

# Of the numbers: the steps and the kind of keys. All others are counts.
_STEP, _KIND = 0, 1


class ShardedNumbers(tf_private.Trackable):
    """int64 numbers of each shard, which are one vector to everybody else.

    A step counts in all shards, a key in its own. A checkpoint has them as the
    one variable that they are on a host.

    Attributes:
      copies: By shard, each `[num_numbers]` int64.
      shape: `[num_numbers]`.
      dtype: int64.
    """

    dtype = tf.int64

    def __init__(self, copies: list[Any]):
        """Takes the variables, one or more."""
        self.copies = copies
        self.shape = copies[0].shape

    def __getitem__(self, index: int) -> tf.Tensor:
        """Returns a number, in graphs, too."""
        found = tf.stack([one[index] for one in self.copies])
        return (tf.reduce_max if index in (_STEP, _KIND) else tf.reduce_sum)(
            found
        )

    def numpy(self) -> Array:
        """Returns all numbers."""
        found = np.stack([one.numpy() for one in self.copies])
        values = found.sum(0)
        # A step that one server has refused is counted by the others.
        values[[_STEP, _KIND]] = found[:, [_STEP, _KIND]].max(0)
        return values

    def assign(self, values: Any) -> None:
        """Takes the numbers of a whole vocabulary; counts go to one shard."""
        values = tf.cast(values, tf.int64)
        is_count = tf.range(tf.size(values)) > _KIND
        uncounted = tf.where(is_count, tf.zeros_like(values), values)
        for shard, one in enumerate(self.copies):
            one.assign(uncounted if shard else values)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        """The copies in an exported graph, which reads them; else none."""
        del kwargs
        return (
            {}
            if save_type == "checkpoint"
            else {str(shard): one for shard, one in enumerate(self.copies)}
        )

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {
            tf_private.VARIABLE_VALUE_KEY: tf.constant(self.numpy(), tf.int64)
        }

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored[tf_private.VARIABLE_VALUE_KEY])


# The names of the variables, beside those of the table, in checkpoints.
KEYS = "vocabulary_keys"
LAST_STEPS = "vocabulary_last_steps"
COUNTS = "vocabulary_counts"
SKETCH = "vocabulary_sketch"
SKETCH_SUMS = "vocabulary_sketch_sums"
NUMBERS = "vocabulary_numbers"
NAMES = frozenset({KEYS, LAST_STEPS, COUNTS, SKETCH, SKETCH_SUMS, NUMBERS})

# What `NUMBERS` holds (cc/kernels/vocabulary/locked_vocabulary.h).
NUMBERS_HELD = (
    "step",
    "kind",
    "num_lookups",
    "num_known",
    "num_probes",
    "num_admitted",
    "num_rejected",
    "num_full",
    "num_evicted",
    "num_expired",
)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What became of the keys of one table.

    Attributes:
      num_kept: Keys that have a row in the new one.
      num_dropped: Keys that found no place there.
    """

    num_kept: int
    num_dropped: int


def in_order_of_ops(variables: dict[str, Any]) -> list[tf.Variable]:
    """Returns all variables as the ops take them, shard by shard."""
    return [
        shard
        for name in (KEYS, LAST_STEPS, COUNTS, SKETCH, SKETCH_SUMS, NUMBERS)
        if name in variables
        for shard in shards_of(variables[name])
    ]


def shards_of(variable: Any) -> list[tf.Variable]:
    """Returns the shards of a variable, one if it is not cut."""
    return list(getattr(variable, "variables", None) or [variable])


class Vocabulary:
    """The keys of one table, as `embedding.vocabularies["words"]` shows them.

    Attributes:
      settings: The `OpenVocabulary` that it was made with.
      name: The name of its table.
    """

    def __init__(
        self,
        settings: OpenVocabulary,
        name: str,
        variables: dict[str, Any],
        evict_keys: Callable[..., tf.Tensor],
        resize: Callable[
            [int], tuple[OpenVocabulary, dict[str, Any], Conversion]
        ],
    ):
        """Takes the variables, which others own.

        Args:
          settings: What the variables were created with.
          name: The name of its table.
          variables: From `KEYS` and so on to the variables.
          evict_keys: Takes rows of keys away, of int64 `keys`, or with
            `expired` those of keys whose time is over; returns these keys.
          resize: Gives the table another capacity; returns new settings and
            variables, and what became of the keys.
        """
        self.settings = settings
        self.name = name
        self._variables = variables
        self._evict_keys = evict_keys
        self._resize = resize

    def __repr__(self) -> str:
        return f"Vocabulary({self.name!r}, {self.settings})"

    @property
    def key_variable(self) -> Any:
        """The keys by place, `[num_buckets, 8]` int64; -2^63 where none is.

        The row of a key is 8 times its bucket, and its place in it.
        """
        return self._variables[KEYS]

    @property
    def _num_buckets(self) -> int:
        # Of what there is: settings may be older than a resize.
        return int(self.key_variable.shape[0])

    def lookup(self, keys: Any) -> tf.Tensor:
        """Returns the row of each key, or -1.

        It changes nothing: keys are not counted as used.

        Args:
          keys: Integers or strings, of any shape.

        Returns:
          int64, of that shape.

        Raises:
          TypeError: If keys are neither.
          tf.errors.InvalidArgumentError: If they are strings where integers
            were before, or the other way round.
        """
        found, kind = self._read_keys(keys)
        with tf.control_dependencies(self._check_kind(kind)):
            return self._find(found)

    def contains(self, keys: Any) -> tf.Tensor:
        """Returns whether each key has a row; see `lookup`."""
        return self.lookup(keys) >= 0

    @property
    def count_variable(self) -> Any:
        """How often each key was used, `[num_buckets, 8]` int32, by place.

        With `half_life_steps`, as it was when the key was used last.
        """
        return self._variables[COUNTS]

    def rows_by_stock_ops(
        self,
        keys: tf.Tensor,
        kind: int = key_tensors.INTEGERS,
    ) -> tf.Tensor:
        """Returns the row of each key, that of unknown keys where it has none.

        By TensorFlow's own operations, for graphs that are exported.

        Args:
          keys: `[num_keys]` int64, strings hashed.
          kind: What they were, of `key_tensors.KINDS`. If those before were
            others, the operation fails.
        """
        with tf.control_dependencies(self._check_kind(kind)):
            keys = tf.identity(keys)
        return stock_find.find_rows(self.key_variable, self._num_buckets, keys)

    def keys(self) -> tf.Tensor:
        """Returns all keys that have a row, `[num_keys]` int64, by row.

        Of strings, the hashes: the strings are not kept.
        """
        stored = tf.reshape(tf.convert_to_tensor(self.key_variable), [-1])
        return tf.boolean_mask(stored, stored != bucket_layout.EMPTY_KEY)

    def stats(self) -> dict[str, Any]:
        """Returns what the vocabulary holds, and what there was so far.

        Returns:
          `num_keys`, `num_rows` that keys may have, and `load`, their ratio;
          `step`: training steps so far; and of these `num_lookups`,
          `num_known` of them that had a row, `num_probes`: buckets looked
          into, `num_admitted`: keys that got a row, `num_rejected`: that were
          not admitted, each once a step, `num_full`: that found no place,
          `num_evicted`: that gave their row away, and `num_expired` of these;
          `share_known`: of lookups, None before the first; `keys_are`:
          `"integers"`, `"strings"` or None.
        """
        if not tf.executing_eagerly():
            raise RuntimeError("`stats` must be called outside tf.function.")
        numbers = self._variables[NUMBERS].numpy().tolist()
        found = dict(zip(NUMBERS_HELD, numbers))
        num_rows = bucket_layout.KEYS_PER_BUCKET * self._num_buckets
        num_keys = sum(_num_keys(one) for one in shards_of(self.key_variable))
        kind = key_tensors.KINDS.get(found.pop("kind"))
        lookups = found["num_lookups"]
        return {
            "num_keys": num_keys,
            "num_rows": num_rows,
            "load": num_keys / num_rows,
            **found,
            "share_known": found["num_known"] / lookups if lookups else None,
            "keys_are": kind,
        }

    def evict(self, keys: Any) -> tf.Tensor:
        """Takes the rows of keys away.

        Args:
          keys: Integers or strings, of any shape; unknown ones are ignored.

        Returns:
          The keys that had a row, `[num_evicted]` int64.

        Raises:
          TypeError: If keys are neither.
          tf.errors.InvalidArgumentError: As of `lookup`.
          tf.errors.FailedPreconditionError: If a step in flight uses the row
            of a key; then none is evicted.
        """
        found, kind = self._read_keys(keys)
        with tf.control_dependencies(self._check_kind(kind)):
            return self._evict_keys(found, expired=False)

    def evict_expired(self) -> tf.Tensor:
        """Takes the rows of all keys away that `ttl_steps` have passed for.

        Without it they leave when another key needs their row. Rows that a
        step in flight uses stay.

        Returns:
          The keys, `[num_evicted]` int64, by row.
        """
        return self._evict_keys(tf.zeros([0], tf.int64), expired=True)

    def resize(self, capacity: int) -> Conversion:
        """Gives the vocabulary another capacity.

        Keys keep the values of their rows and slot variables, their steps and
        counts. Where there is not room for all, those with the highest score
        stay, by `evict`; `on_evict` is told of the others. What was counted of
        keys without a row is forgotten.

        The table gets new variables and the embedding a new engine, whose
        `TPUEmbedding.stats` begin anew. So functions that were traced before
        are refused when they step, and must be traced anew: of a Keras model by
        `make_train_function(force=True)`, or `compile`. A program that starts
        again makes the embedding with the new capacity.

        Args:
          capacity: As of `OpenVocabulary`.

        Returns:
          How many keys have a row, and how many found no place.

        Raises:
          NotImplementedError: On parameter servers.
          TypeError: If it is not an integer.
          ValueError: If it is no capacity.
          RuntimeError: If steps are in flight, or in a tf.function. Nothing
            is changed then.
        """
        if not tf.executing_eagerly():
            raise RuntimeError("`resize` must be called outside tf.function.")
        self.settings, self._variables, conversion = self._resize(capacity)
        return conversion

    def _find(self, keys: tf.Tensor) -> tf.Tensor:
        if isinstance(self._variables[NUMBERS], ShardedNumbers):
            # Its shards are in several processes.
            rows = stock_find.find_rows(
                self.key_variable, self._num_buckets, tf.reshape(keys, [-1])
            )
            is_known = rows < bucket_layout.KEYS_PER_BUCKET * self._num_buckets
            return tf.reshape(
                tf.where(is_known, rows, tf.constant(-1, tf.int64)),
                tf.shape(keys),
            )
        return ops.find_keys(
            shards=[one.handle for one in shards_of(self.key_variable)],
            offsets=self._offsets(),
            keys=keys,
            table=self.name,
        )

    def _offsets(self) -> Sequence[int]:
        return bucket_layout.bucket_partition(
            self._num_buckets, len(shards_of(self.key_variable))
        ).offsets

    def _read_keys(self, keys: Any) -> tuple[tf.Tensor, int]:
        return key_tensors.read_keys(keys, f"table {self.name!r}")

    def _check_kind(self, kind: int) -> list[tf.Operation]:
        known = self._variables[NUMBERS][1]
        other = (key_tensors.INTEGERS + key_tensors.STRINGS) - kind
        return assertions.require(
            (known == 0) | (known == kind),
            f"The keys of table {self.name!r} must be "
            f"{key_tensors.KINDS[other]}, as those before. Received: "
            f"{key_tensors.KINDS[kind]}; {key_tensors.REMEDIES[kind]}.",
        )


def _num_keys(shard: tf.Variable) -> int:
    # Where it is: only the number comes back.
    with tf.device(shard.device):
        return int(
            tf.math.count_nonzero(tf.not_equal(shard, bucket_layout.EMPTY_KEY))
        )
