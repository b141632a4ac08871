"""How names of items find rows: of a vocabulary, as they come, or hashed."""

from __future__ import annotations

import zlib

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from completion.data.vocabulary import UNKNOWN, ItemVocabulary

TABLES = ("before", "next")


class ClosedNames:
    """Rows of a vocabulary that was counted before training."""

    def __init__(self, vocabulary: ItemVocabulary):
        """Takes the vocabulary."""
        self.ids = tf.constant(vocabulary.row_of.astype(np.int64))
        self.num_rows = vocabulary.num_rows
        self.vocabularies = None
        self._known = vocabulary.row_of != UNKNOWN
        self._log_counts = np.log(np.maximum(vocabulary.counts, 1))

    def rows(
        self, embedding: tlm.TPUEmbedding, items: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of each item, and whether it has one."""
        return self.ids.numpy()[items], self._known[items]

    def log_counts(self, embedding: tlm.TPUEmbedding) -> np.ndarray:
        """Returns the log of how often the item of each row came."""
        return self._log_counts

    def count(self, targets: np.ndarray) -> None:
        """Nothing: they were counted before."""


class HashedNames:
    """A number of rows that names share by their hash."""

    def __init__(self, item_names: list[str], num_rows: int):
        """Hashes all names."""
        rows = [
            zlib.crc32(name.encode("utf-8", "surrogateescape")) % num_rows
            for name in item_names
        ]
        self.ids = tf.constant(rows, tf.int64)
        self.num_rows = num_rows
        self.vocabularies = None
        self._counts = np.zeros(num_rows, np.int64)

    def rows(
        self, embedding: tlm.TPUEmbedding, items: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of each item; each has one."""
        return self.ids.numpy()[items], np.ones(len(items), bool)

    def log_counts(self, embedding: tlm.TPUEmbedding) -> np.ndarray:
        """Returns the log of how often items of each row came."""
        return np.log(np.maximum(self._counts, 1))

    def count(self, targets: np.ndarray) -> None:
        """Counts what came, by row."""
        np.add.at(self._counts, self.ids.numpy()[targets], 1)


class OpenNames:
    """Names as they come: strings are keys, and get rows while training."""

    def __init__(self, item_names: list[str], capacity: int, **settings):
        """Takes settings of `tlm.OpenVocabulary`, for each table."""
        self.ids = tf.constant(
            [name.encode("utf-8", "surrogateescape") for name in item_names]
        )
        self.num_rows = capacity
        self.vocabularies = {
            name: tlm.OpenVocabulary(capacity, **settings) for name in TABLES
        }

    def rows(
        self, embedding: tlm.TPUEmbedding, items: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of each item, and whether it has one."""
        rows = (
            embedding.vocabularies["next"]
            .lookup(tf.gather(self.ids, items))
            .numpy()
        )
        return np.maximum(rows, 0), rows >= 0

    def log_counts(self, embedding: tlm.TPUEmbedding) -> np.ndarray:
        """Returns the log of how often the key of each row came."""
        counts = (
            tf.convert_to_tensor(embedding.vocabularies["next"].count_variable)
            .numpy()
            .ravel()
        )
        # One more row: that of keys without one.
        return np.log(np.maximum([*counts, 1], 1))

    def count(self, targets: np.ndarray) -> None:
        """Nothing: the vocabulary counts."""
