"""Vocabulary of items, and subword features of their names."""

from __future__ import annotations

import re
import zlib

import numpy as np

from completion.data.ragged import Ragged

UNKNOWN = 0  # Row of all items that are not in the vocabulary.

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")


class ItemVocabulary:
    """The items that the model can predict, sorted by frequency from row 1.

    Only training documents are counted. An item that occurs only in held-out
    documents is unknown, and predictions of this item count as misses.

    Attributes:
      names: `[num_rows]` names; the name of row 0 is empty.
      counts: `[num_rows]` int64, frequencies in training; 0 for row 0.
      row_of: `[num_items]` int32, the row of each item of the corpus.
    """

    def __init__(
        self, items: np.ndarray, item_names: list[str], *, min_count: int
    ) -> None:
        counts = np.bincount(items, minlength=len(item_names))
        by_count = np.argsort(-counts, kind="stable")
        kept = by_count[counts[by_count] >= min_count]
        self.names = [""] + [item_names[item] for item in kept]
        self.counts = np.concatenate([[0], counts[kept]]).astype(np.int64)
        self.row_of = np.zeros(len(item_names), np.int32)
        self.row_of[kept] = np.arange(1, len(kept) + 1)

    @property
    def num_rows(self) -> int:
        """Number of rows of an item table, including the row `UNKNOWN`."""
        return len(self.names)

    def log_shares(self) -> np.ndarray:
        """Returns the log of each row's share of the training items, float32.

        Row 0 is never a candidate. Its share is computed as if the row occurred
        once.
        """
        counts = np.maximum(self.counts, 1)
        return np.log(counts / self.counts.sum()).astype(np.float32)


def common_rows(
    labels: Ragged, groups: np.ndarray, names: list[str]
) -> tuple[np.ndarray, list[str]]:
    """Selects the labels that occur in two or more groups.

    A label that occurs in a single training document does not help to predict
    other documents.

    Args:
      labels: Labels of each sample.
      groups: `[num_samples]` group of each sample, or -1 for no group.
      names: Name of each label.

    Returns:
      `[num_labels]` int32 rows, -1 for labels without a row; and the name of
      each row.
    """
    group_of = np.repeat(groups, np.diff(labels.splits)).astype(np.int64)
    seen = group_of >= 0
    pairs = np.unique(group_of[seen] * len(names) + labels.values[seen])
    spread = np.bincount(pairs % max(1, len(names)), minlength=len(names))
    kept = np.flatnonzero(spread >= 2)
    row_of = np.full(len(names), -1, np.int32)
    row_of[kept] = np.arange(len(kept))
    return row_of, [names[label] for label in kept]


def pieces_of(name: str) -> list[str]:
    """Returns the words and the character trigrams of a name.

    >>> pieces_of("getHTTPKey_2")[:4]
    ['get', 'http', 'key', '2']
    >>> pieces_of("self")
    ['self', '#^se', '#sel', '#elf', '#lf$']
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    spelled = f"^{name.lower()}$"
    return words + [f"#{spelled[i : i + 3]}" for i in range(len(spelled) - 2)]


def hashed_pieces(names: list[str], num_buckets: int) -> Ragged:
    """Returns the hash buckets of each name's pieces.

    The hash is the same on every machine.
    """
    return Ragged.from_lists(
        [zlib.crc32(piece.encode()) % num_buckets for piece in pieces_of(name)]
        for name in names
    )
