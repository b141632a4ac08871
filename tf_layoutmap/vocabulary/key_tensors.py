"""Conversion of ids to int64 keys; strings are hashed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Kinds of ids that keys come from, with the numbers that the ops use.
INTEGERS, STRINGS = 1, 2
KINDS = {INTEGERS: "integers", STRINGS: "strings"}
# Advice for ids of this kind if the ids of a table are of the other kind.
REMEDIES = {
    INTEGERS: "tf.strings.as_string makes strings of them",
    STRINGS: "tf.strings.to_number makes numbers of them",
}

# These numbers must not change: the keys of saved vocabularies depend on them.
_HASH_KEY = [0x6C61796F75746D61, 0x70206B6579732E31]
_NUM_HASHES = 2**63 - 1


def hash_strings(strings: tf.Tensor) -> tf.Tensor:
    """Returns the keys of strings, in [0, 2^63 - 1), of any shape.

    The function computes a keyed hash. An attacker who does not know the two
    numbers of the hash key cannot construct collisions, but both numbers are
    public in this file. The probability that two of n strings have the same
    key is n^2 / 2^64.
    """
    return tf.strings.to_hash_bucket_strong(strings, _NUM_HASHES, _HASH_KEY)


def of_input(value: Any) -> tuple[Any, int]:
    """Returns an input of a feature with its ids as keys, and their kind.

    Args:
      value: A `tf.Tensor`, `tf.SparseTensor`, `tf.RaggedTensor`, or a value
        that `tf.convert_to_tensor` accepts.
    """
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
            return value, INTEGERS  # The reader of the input raises an error.
        value = tf.convert_to_tensor(value)
    return of_tensor(value)


def of_tensor(value: tf.Tensor) -> tuple[tf.Tensor, int]:
    """Returns keys and their kind. Only strings are converted, by hashing."""
    if value.dtype == tf.string:
        return hash_strings(value), STRINGS
    return value, INTEGERS


def read_keys(keys: Any, where: str) -> tuple[tf.Tensor, int]:
    """Returns int64 keys of an argument, and their kind.

    Args:
      keys: Integers or strings, of any shape.
      where: Description of the vocabulary, for messages.

    Raises:
      TypeError: If `keys` are neither integers nor strings.
    """
    found, kind = of_tensor(tf.convert_to_tensor(keys))
    if not found.dtype.is_integer or found.dtype == tf.uint64:
        raise TypeError(
            "Argument `keys` must be integers that int64 holds, or strings. "
            f"Received: {found.dtype.name} ({where})."
        )
    return tf.cast(found, tf.int64), kind
