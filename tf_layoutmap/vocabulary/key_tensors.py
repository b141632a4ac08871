"""Converts ids to int64 keys. Strings are hashed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.vocabulary import stored_keys

# Kinds of ids, with the numbers that the ops use.
INTEGERS, STRINGS = 1, 2
KINDS = {INTEGERS: "integers", STRINGS: "strings"}
# Parts of error messages that say how to convert ids of a kind to the other
# kind.
REMEDIES = {
    INTEGERS: "tf.strings.as_string makes strings of them",
    STRINGS: "tf.strings.to_number makes numbers of them",
}

# These numbers must not change, because the keys of saved vocabularies depend
# on them.
_HASH_KEY = [0x6C61796F75746D61, 0x70206B6579732E31]
_NUM_HASHES = 2**63 - 1


def hash_strings(strings: tf.Tensor) -> tf.Tensor:
    """Returns the keys of strings, in [0, 2^63 - 1), of any shape.

    The function computes a keyed hash. The hash key is public, because it is in
    this file. The hash therefore does not prevent an attacker from constructing
    strings with the same key. The probability that two of n strings have the
    same key is n^2 / 2^64.
    """
    return tf.strings.to_hash_bucket_strong(strings, _NUM_HASHES, _HASH_KEY)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedKeys:
    """Keys from a packed batch, which stores strings as hashes.

    Attributes:
      ids: int64 keys.
      kind: int32 scalar tensor: one of `KINDS`, or 0 if there are no samples.
    """

    ids: tf.RaggedTensor
    kind: tf.Tensor


def ids_of(value: Any) -> Any:
    """Returns the ids of `PackedKeys`, and any other value unchanged."""
    return value.ids if isinstance(value, PackedKeys) else value


def of_input(value: Any) -> tuple[Any, int | tf.Tensor]:
    """Converts the ids of a feature to keys; returns the keys and their kind.

    Args:
      value: A `tf.Tensor`, `tf.SparseTensor`, `tf.RaggedTensor`, `PackedKeys`,
        `StoredKeys`, or a value that `tf.convert_to_tensor` accepts.

    Returns:
      The keys and their kind. The kind of `PackedKeys` is a tensor.
    """
    if isinstance(value, PackedKeys):
        return value.ids, value.kind
    if isinstance(value, stored_keys.StoredKeys):
        return value.values, value.kind
    if isinstance(value, tf.SparseTensor):
        keys, kind = of_tensor(value.values)
        return tf.SparseTensor(value.indices, keys, value.dense_shape), kind
    if isinstance(value, tf.RaggedTensor):
        keys, kind = of_tensor(value.flat_values)
        return value.with_flat_values(keys), kind
    if not tf.is_tensor(value):
        if not isinstance(value, tf.Variable) and (
            not hasattr(value, "__array__")
        ):
            return value, INTEGERS  # Raises later.
        value = tf.convert_to_tensor(value)
    return of_tensor(value)


def strings_of(value: Any) -> tf.Tensor | None:
    """Returns the strings of an input of `of_input`, `[num_strings]`.

    The result is None if the input contains integers or only hashes.
    """
    if isinstance(value, PackedKeys):
        return None
    if isinstance(value, stored_keys.StoredKeys):
        return value.strings
    if isinstance(value, tf.SparseTensor):
        value = value.values
    elif isinstance(value, tf.RaggedTensor):
        value = value.flat_values
    strings = tf.convert_to_tensor(value)
    if strings.dtype != tf.string:
        return None
    return tf.reshape(strings, [-1])


def of_tensor(value: tf.Tensor) -> tuple[tf.Tensor, int]:
    """Returns keys and their kind. Strings are hashed."""
    if value.dtype == tf.string:
        return hash_strings(value), STRINGS
    return value, INTEGERS


def require_strings(kind: int, table: str) -> None:
    """Raises a ValueError if keys are integers.

    Args:
      kind: Kind of the keys, one of `KINDS`, or 0 for keys that were read from
        the vocabulary.
      table: Name of a table that keeps strings, for the message.
    """
    if kind == INTEGERS:
        raise ValueError(
            "The keys of a table with `keep_strings=True` must be strings. "
            f"Received: {KINDS[kind]} (table {table!r}); {REMEDIES[INTEGERS]}."
        )


def as_array(keys: Any) -> np.ndarray[Any, Any]:
    """Returns integers, strings or stored keys as an array, without hashing."""
    if isinstance(keys, stored_keys.StoredKeys):
        keys = keys.values
    return tf.convert_to_tensor(keys).numpy()


def names_of(
    keys: Any, hashes: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any] | None:
    """Returns the string of each key, or None if no string is known.

    Args:
      keys: Strings or `StoredKeys`, `[num_keys]`.
      hashes: The keys as int64, `[num_keys]`.

    Returns:
      `[num_keys]` of dtype object. An element is None if the string of the key
      is not known.
    """
    strings = strings_of(keys)
    if strings is None or not isinstance(keys, stored_keys.StoredKeys):
        return None if strings is None else np.array(strings.numpy(), object)
    by_key = dict(zip(hash_strings(strings).numpy().tolist(), strings.numpy()))
    names = np.empty([len(hashes)], object)
    names[:] = [by_key.get(key) for key in hashes.tolist()]
    return names


def read_keys(keys: Any, where: str) -> tuple[tf.Tensor, int]:
    """Converts an argument to int64 keys; returns the keys and their kind.

    Args:
      keys: Integers, strings or `StoredKeys`, of any shape.
      where: Description of the vocabulary, for messages.

    Raises:
      TypeError: If `keys` are neither integers nor strings.
    """
    if isinstance(keys, stored_keys.StoredKeys):
        values: Any = keys.values
        return tf.convert_to_tensor(values), keys.kind
    tensor, kind = of_tensor(tf.convert_to_tensor(keys))
    if not tensor.dtype.is_integer or tensor.dtype == tf.uint64:
        raise TypeError(
            "Argument `keys` must be integers that int64 holds, or strings. "
            f"Received: {tensor.dtype.name} ({where})."
        )
    return tf.cast(tensor, tf.int64), kind


def flat(keys: tf.Tensor) -> tf.Tensor:
    """Returns keys as a vector. A vector needs no op."""
    return keys if keys.shape.rank == 1 else tf.reshape(keys, [-1])


def in_shape_of(keys: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns a vector with a value per key in the shape of the keys.

    Args:
      keys: Keys of any shape.
      values: Vector with one value for each element of `flat(keys)`.
    """
    return (
        values if keys.shape.rank == 1 else tf.reshape(values, tf.shape(keys))
    )
