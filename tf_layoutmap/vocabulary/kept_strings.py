"""`KeptStrings`, which stores the strings of an open vocabulary's keys.

The keys of a vocabulary are hashes of strings. With `keep_strings=True`, each
vocabulary also has a native store of the strings whose keys have a row. After a
training step has assigned rows to keys, `keep` passes the strings of the step
to the store, which copies only the strings of new keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.sharded.routing import assertions, checks
from tf_layoutmap.vocabulary import bucket_layout, key_tensors

Array = np.ndarray[Any, Any]


class KeptStrings(tf_private.Trackable):
    """The strings of one vocabulary's keys.

    A checkpoint contains the strings of all keys that have a row, as one vector
    of strings. The keys are not saved again, because they are the hashes of the
    strings. Checkpoints therefore do not depend on the capacity or on the
    number of shards.
    """

    def __init__(self, table: str, key_shards: Sequence[tf.Variable]):
        """Creates an empty store.

        Args:
          table: Name of the table, for messages.
          key_shards: Shards of the keys, `[num_buckets, 8]` int64.
        """
        self._table = table
        self._key_shards = list(key_shards)
        # Like the engine, the store exists as long as its handle.
        with tf.init_scope(), tf.device("/device:CPU:0"):
            self._handle = ops.create_string_store()

    def use_keys(self, key_shards: Sequence[tf.Variable]) -> None:
        """Replaces the variables of the keys after a resize."""
        self._key_shards = list(key_shards)

    def check_kind(self, kind: int) -> None:
        """Raises a ValueError if keys are integers; see `key_tensors.KINDS`."""
        key_tensors.require_strings(kind, self._table)

    def keep(
        self,
        keys: Sequence[tf.Tensor],
        strings: Sequence[tf.Tensor],
        training: Any = True,
        *,
        removes_all: bool = False,
    ) -> None:
        """Stores the strings of keys that have a row.

        Some strings of keys that have no row are also removed. The amount of
        this work is proportional to the number of new strings.

        Args:
          keys: Hashes of the strings, as int64 tensors of any shape.
          strings: For each tensor of keys, the strings in the same shape.
          training: Whether the strings belong to a training step. If the value
            is False, the method does nothing.
          removes_all: Whether the strings of all keys without a row are
            removed.
        """
        with tf.device(self._handle.device):
            ops.keep_strings(
                store=self._handle,
                training=tf.convert_to_tensor(training, tf.bool),
                shards=[key_shard.handle for key_shard in self._key_shards],
                offsets=self._offsets(),
                keys=[tf.cast(key, tf.int64) for key in keys],
                strings=list(strings),
                removes_all=removes_all,
                table=self._table,
            )

    def keep_input(self, value: Any) -> None:
        """Stores the strings of an input of `key_tensors.read_keys`.

        Strings of keys without a row are not stored.

        Args:
          value: Strings or `StoredKeys`, of any shape. If the value contains no
            strings, the method does nothing.
        """
        strings = key_tensors.strings_of(value)
        if strings is not None:
            self.keep([key_tensors.hash_strings(strings)], [strings])

    def keep_array(self, keys: Array, strings: Array) -> None:
        """Stores the strings of keys that have a row.

        Args:
          keys: `[num_keys]` int64.
          strings: `[num_keys]` strings. Elements that are None are ignored.
        """
        known = np.array([string is not None for string in strings], bool)
        if known.any():
            self.keep(
                [tf.constant(keys[known], tf.int64)],
                [tf.constant(list(strings[known]), tf.string)],
            )

    def read(self, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the strings of keys, and whether each string is known.

        Args:
          keys: int64, of any shape.
        """
        with tf.device(self._handle.device):
            stored = ops.read_strings(
                store=self._handle, keys=tf.convert_to_tensor(keys, tf.int64)
            )
        return stored.strings, stored.is_known

    def require(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the strings of keys, of any shape.

        Raises:
          tf.errors.InvalidArgumentError: If the string of a key is not known.
        """
        strings, is_known = self.read(keys)
        with tf.control_dependencies(
            assertions.require(
                tf.reduce_all(is_known),
                f"The strings of some keys of table {self._table!r} are not "
                "known, because the keys got their rows from files or "
                "checkpoints without strings. A string is stored in the next "
                "training step that contains it. `blocks` and `export` return "
                "all keys, with the strings that are known.",
            )
        ):
            return tf.identity(strings)

    def names(self, keys: Array) -> Array:
        """Returns an array of bytes, with None where no string is known.

        Args:
          keys: int64, of any shape.
        """
        strings, is_known = self.read(keys)
        names = np.array(strings.numpy(), object)
        names[~is_known.numpy()] = None
        return names

    def stats(self) -> dict[str, Any]:
        """Returns the entries of `Vocabulary.stats` about strings."""
        with tf.device(self._handle.device):
            described = ops.describe_strings(store=self._handle)
        return {
            "num_strings": int(described.num_strings.numpy()),
            "num_string_bytes": int(described.num_bytes.numpy()),
            "num_collisions": int(described.num_collisions.numpy()),
            "collisions": [
                (kept, other) for kept, other in described.collisions.numpy()
            ],
        }

    def all_strings(self) -> tf.Tensor:
        """Returns the known strings of all keys that have a row.

        The store is also compacted: the strings of all other keys are removed.

        Returns:
          `[num_strings]` strings, sorted by row.
        """
        self.keep([], [], removes_all=True)
        stored = tf.concat(
            [tf.reshape(key_shard, [-1]) for key_shard in self._key_shards],
            axis=0,
        )
        strings, is_known = self.read(
            tf.boolean_mask(stored, stored != bucket_layout.EMPTY_KEY)
        )
        return tf.boolean_mask(strings, is_known)

    def load(self, strings: tf.Tensor) -> None:
        """Replaces all strings.

        Args:
          strings: Distinct strings. Their keys need not have a row yet.
        """
        with tf.device(self._handle.device):
            ops.load_strings(
                store=self._handle,
                keys=key_tensors.hash_strings(strings),
                strings=strings,
            )

    def _copy_trackable_to_cpu(
        self, object_map: MutableMapping[Any, Any]
    ) -> None:
        # An asynchronous save copies the strings when it copies the keys. At
        # the first call, which is eager, the variable is created.
        strings = self.all_strings()
        if self in object_map:
            object_map[self].assign(strings)
            return
        with tf.device("/device:CPU:0"):
            object_map[self] = tf.Variable(
                strings, trainable=False, shape=[None], dtype=tf.string
            )

    def _offsets(self) -> Sequence[int]:
        num_buckets = sum(map(checks.known_size, self._key_shards))
        return bucket_layout.bucket_partition(
            num_buckets, len(self._key_shards)
        ).offsets

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {tf_private.VARIABLE_VALUE_KEY: self.all_strings()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.load(restored[tf_private.VARIABLE_VALUE_KEY])


def check_supported(
    settings: Mapping[str, Any], strategy: str, why: str
) -> None:
    """Checks that no vocabulary keeps strings.

    Args:
      settings: The `OpenVocabulary` of each open table, by table name.
      strategy: Name of a strategy that does not support kept strings.
      why: Reason, for the message.

    Raises:
      NotImplementedError: If a vocabulary keeps strings.
    """
    keeping = [
        name
        for name, table_settings in settings.items()
        if table_settings.keep_strings
    ]
    if keeping:
        raise NotImplementedError(
            "Argument `keep_strings` of tlm.vocabulary.OpenVocabulary must be "
            "False under "
            f"{strategy}: {why}. Received: `keep_strings=True` for tables "
            f"{keeping}."
        )


def to_columns(strings: Array) -> dict[str, Array]:
    """Converts strings to numeric arrays for files; see `from_columns`.

    >>> {name: one.tolist() for name, one in to_columns(
    ...     np.array([b"ab", None, b""], object)).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'string_bytes': [97, 98], 'string_splits': [0, 2, 2, 2],
     'has_string': [True, False, True]}

    Args:
      strings: `[num_keys]` bytes, or None for unknown strings.

    Returns:
      The bytes of all strings, the offsets `[num_keys + 1]` of the strings, and
      whether each string is known.
    """
    known: list[bytes] = [string or b"" for string in strings]
    return {
        "string_bytes": np.frombuffer(b"".join(known), np.uint8),
        "string_splits": np.cumsum([0, *map(len, known)], dtype=np.int64),
        "has_string": np.array(
            [string is not None for string in strings], bool
        ),
    }


def from_columns(columns: Mapping[str, Array]) -> Array:
    """Converts the result of `to_columns` to an array of bytes or None.

    Raises:
      ValueError: If the arrays do not fit to each other.
    """
    text = np.asarray(columns["string_bytes"], np.uint8).tobytes()
    splits = np.asarray(columns["string_splits"], np.int64)
    known = np.asarray(columns["has_string"], bool)
    if (
        len(splits) != len(known) + 1
        or splits[0] != 0
        or splits[-1] != len(text)
        or (np.diff(splits) < 0).any()
    ):
        raise ValueError("the offsets of the strings are not valid")
    return as_objects(
        text[begin:end] if is_known else None
        for begin, end, is_known in zip(splits, splits[1:], known)
    )


def as_objects(values: Iterable[bytes | None]) -> Array:
    """Returns an array of dtype object, `[num_values]`."""
    listed = list(values)
    array = np.empty([len(listed)], object)
    array[:] = listed
    return array
