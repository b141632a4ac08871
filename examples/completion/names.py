"""Mappings from item names to rows: closed, open and hashed vocabularies."""

from __future__ import annotations

import zlib

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from completion.data.vocabulary import UNKNOWN, ItemVocabulary

TABLES = ("before", "next")


class ClosedNames:
    """A closed vocabulary, whose items are counted before training."""

    def __init__(self, vocabulary: ItemVocabulary):
        """Wraps a vocabulary."""
        self.ids = tf.constant(vocabulary.row_of.astype(np.int64))
        self.num_rows = vocabulary.num_rows
        self.vocabularies = None
        self._known = vocabulary.row_of != UNKNOWN
        self._log_counts = np.log(np.maximum(vocabulary.counts, 1))

    def rows(
        self, embedding: tlm.TPUEmbedding, items: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of each item, and whether the item has a row."""
        return self.ids.numpy()[items], self._known[items]

    def log_counts(self, embedding: tlm.TPUEmbedding) -> np.ndarray:
        """Returns the log of the frequency of the item of each row."""
        return self._log_counts

    def count(self, targets: np.ndarray) -> None:
        """Does nothing, because items were counted before training."""


class HashedNames:
    """A hashed vocabulary, in which names with the same hash share a row."""

    def __init__(self, item_names: list[str], num_rows: int):
        """Hashes all names to `num_rows` rows."""
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
        """Returns the rows of items, and True, because each item has a row."""
        return self.ids.numpy()[items], np.ones(len(items), bool)

    def log_counts(self, embedding: tlm.TPUEmbedding) -> np.ndarray:
        """Returns the log of the number of occurrences of each row."""
        return np.log(np.maximum(self._counts, 1))

    def count(self, targets: np.ndarray) -> None:
        """Counts the occurrences of each row."""
        np.add.at(self._counts, self.ids.numpy()[targets], 1)


class OpenNames:
    """An open vocabulary, whose keys are names; training adds keys."""

    def __init__(self, item_names: list[str], capacity: int, **settings):
        """Creates the vocabulary of each table with the same `settings`."""
        self.ids = tf.constant(
            [name.encode("utf-8", "surrogateescape") for name in item_names]
        )
        self.num_rows = capacity
        self.vocabularies = {
            name: tlm.vocabulary.OpenVocabulary(capacity, **settings)
            for name in TABLES
        }

    def rows(
        self, embedding: tlm.TPUEmbedding, items: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of each item, and whether the item has a row."""
        rows = (
            embedding.vocabularies["next"]
            .lookup(tf.gather(self.ids, items))
            .numpy()
        )
        return np.maximum(rows, 0), rows >= 0

    def log_counts(self, embedding: tlm.TPUEmbedding) -> np.ndarray:
        """Returns the log of the count of the key of each row."""
        counts = (
            tf.convert_to_tensor(embedding.vocabularies["next"].count_variable)
            .numpy()
            .ravel()
        )
        # Keys without a row use the last row.
        return np.log(np.maximum([*counts, 1], 1))

    def count(self, targets: np.ndarray) -> None:
        """Does nothing, because the open vocabulary counts its keys itself."""
