"""The keys of a table with an open vocabulary, in an exported model."""

from __future__ import annotations

import tensorflow as tf

from tf_layoutmap.vocabulary import key_tensors, state, stock_find


class StoredKeys:
    """One variable, whatever the shards of the table.

    Attributes:
      variable: `[num_buckets, 8]` int64, as of `Vocabulary.key_variable`.
    """

    def __init__(self, vocabulary: state.Vocabulary):
        """Copies the keys that have rows now."""
        self._name = vocabulary.name
        self._num_buckets = int(vocabulary.key_variable.shape[0])
        self._are = vocabulary.stats()["keys_are"]
        with tf.device("CPU:0"):
            self.variable = tf.Variable(
                tf.concat(state.shards_of(vocabulary.key_variable), axis=0),
                trainable=False,
                name="keys",
            )

    def rows_of(self, keys: tf.Tensor, kind: int) -> tf.Tensor:
        """Returns the row of each key; the last where it has none.

        Args:
          keys: `[num_keys]` int64, strings hashed.
          kind: What they were, of `key_tensors.KINDS`.

        Raises:
          ValueError: If the table has keys of another kind.
        """
        if self._are not in (None, key_tensors.KINDS[kind]):
            raise ValueError(
                f"The ids of table {self._name!r} must be {self._are}, as "
                f"those before. Received: {key_tensors.KINDS[kind]}."
            )
        return stock_find.find_rows(self.variable, self._num_buckets, keys)


def id_type(vocabulary: state.Vocabulary) -> tf.DType:
    """Returns the type of a table's ids; int64 if there were none yet."""
    is_strings = (
        vocabulary.stats()["keys_are"]
        == (key_tensors.KINDS[key_tensors.STRINGS])
    )
    return tf.string if is_strings else tf.int64
