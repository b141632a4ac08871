"""Ids of any kind as int64 keys: integers as they are, strings hashed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# What the keys of a vocabulary are made of; as the ops number them.
INTEGERS, STRINGS = 1, 2
KINDS = {INTEGERS: "integers", STRINGS: "strings"}
# For keys of this kind where those of a table are of the other.
REMEDIES = {
    INTEGERS: "tf.strings.as_string makes strings of them",
    STRINGS: "tf.strings.to_number makes numbers of them",
}

# A change would make the keys of every saved vocabulary unknown.
_HASH_KEY = [0x6C61796F75746D61, 0x70206B6579732E31]
_NUM_HASHES = 2**63 - 1


def hash_strings(strings: tf.Tensor) -> tf.Tensor:
    """Returns the keys of strings, in [0, 2^63 - 1), of any shape.

    A keyed hash: whoever does not know these two numbers cannot choose strings
    that share one, though both are in the open here. Of n strings, two have
    the same key with a chance of n^2 / 2^64.
    """
    return tf.strings.to_hash_bucket_strong(strings, _NUM_HASHES, _HASH_KEY)


def of_input(value: Any) -> tuple[Any, int]:
    """Returns an input of a feature with keys for its ids, and their kind.

    Args:
      value: A `tf.Tensor`, `tf.SparseTensor` or `tf.RaggedTensor`, or what
        `tf.convert_to_tensor` takes.
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
            return value, INTEGERS  # Refused where it is read.
        value = tf.convert_to_tensor(value)
    return of_tensor(value)


def of_tensor(value: tf.Tensor) -> tuple[tf.Tensor, int]:
    """Returns keys and their kind; what is neither stays as it is."""
    if value.dtype == tf.string:
        return hash_strings(value), STRINGS
    return value, INTEGERS


def read_keys(keys: Any, where: str) -> tuple[tf.Tensor, int]:
    """Returns int64 keys of an argument, and their kind.

    Args:
      keys: Integers or strings, of any shape.
      where: The vocabulary, for messages.

    Raises:
      TypeError: If they are neither.
    """
    found, kind = of_tensor(tf.convert_to_tensor(keys))
    if not found.dtype.is_integer or found.dtype == tf.uint64:
        raise TypeError(
            "Argument `keys` must be integers that int64 holds, or strings. "
            f"Received: {found.dtype.name} ({where})."
        )
    return tf.cast(found, tf.int64), kind
