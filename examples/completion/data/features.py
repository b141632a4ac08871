"""Computes the features of a position from earlier positions only."""

from __future__ import annotations

import numpy as np

from completion.data.corpus import Corpus
from completion.data.ragged import Ragged
from completion.data.vocabulary import (
    UNKNOWN,
    ItemVocabulary,
    common_rows,
    hashed_pieces,
)

HISTORY = 12  # Number of previous items, most recent item first.
BAG = 64  # Number of previous items in the bag, which has no order.
RECENT = 48  # Distinct items of the document, most recently used first.
ECHOES = 4  # Items that followed earlier occurrences of the same context.
MARKS = 6  # Number of previous marks, most recent mark first.
SPELLED = 2  # Number of previous items with spelling features.
PIECE_BUCKETS = 1 << 14

# Maximum number of ids of each feature whose ids are ordered.
SEQUENCES = {
    "history": HISTORY,
    "echo": ECHOES,
    "marks": MARKS,
    "recent": RECENT,
}


class FeatureReader:
    """A reader that returns the ragged ids of each feature for given positions.

    Labels get a row only if they occur in training documents.

    Attributes:
      num_rows: Number of rows of each feature. All ids are smaller than this
        number.
    """

    def __init__(
        self, corpus: Corpus, vocabulary: ItemVocabulary, held_out: np.ndarray
    ) -> None:
        documents = corpus.document_of()
        self._starts = corpus.document_splits[documents]
        self._rows = vocabulary.row_of[corpus.items]
        self._marks = corpus.marks
        self._mark_ends = corpus.marks_before
        self._mark_starts = corpus.mark_splits[documents]
        self._documents = documents
        self._items = corpus.items
        self._item_names = corpus.item_names
        self._pieces = hashed_pieces(corpus.item_names, PIECE_BUCKETS)
        self._recent = recent_items(self._rows, corpus.document_splits, RECENT)
        self._earlier = earlier_matches(corpus)

        train_documents = np.where(held_out, -1, np.arange(len(held_out)))
        place_rows, places = common_rows(
            corpus.places, train_documents, corpus.place_names
        )
        scope_rows, scopes = common_rows(
            corpus.scopes, train_documents[documents], corpus.scope_names
        )
        self._places = relabel(corpus.places, place_rows)
        self._scopes = relabel(corpus.scopes, scope_rows)
        self.num_rows = {
            "history": vocabulary.num_rows,
            "bag": vocabulary.num_rows,
            "echo": vocabulary.num_rows,
            "recent": vocabulary.num_rows,
            "marks": len(corpus.mark_names),
            "place": max(1, len(places)),
            "scope": max(1, len(scopes)),
            "pieces": PIECE_BUCKETS,
        }

    def targets(self, positions: np.ndarray) -> np.ndarray:
        """Returns the rows to predict; `UNKNOWN` always counts as a miss."""
        return self._rows[positions]

    def previous(self, positions: np.ndarray) -> np.ndarray:
        """Returns the row of the item before each position, or `UNKNOWN`."""
        before, inside = window(positions, self._starts[positions], 1)
        return np.where(inside[:, 0], self._rows[before[:, 0]], UNKNOWN)

    def item_names_before(self, position: int, width: int) -> list[str]:
        """Returns the names of the previous items in document order."""
        start = max(self._starts[position], position - width)
        return [self._item_names[item] for item in self._items[start:position]]

    def batch(self, positions: np.ndarray) -> dict[str, Ragged]:
        """Returns the ids of every feature, one ragged row per position."""
        starts = self._starts[positions]
        before, inside = window(positions, starts, BAG)
        history = self._rows[before]
        spelled = Ragged.from_mask(
            self._items[before[:, :SPELLED]], inside[:, :SPELLED]
        )
        recent = self._recent[positions]
        return {
            "history": Ragged.from_mask(
                history[:, :HISTORY], inside[:, :HISTORY]
            ),
            "bag": Ragged.from_mask(history, inside),
            "echo": self._echoes(positions),
            "recent": Ragged.from_mask(recent, recent != UNKNOWN),
            "marks": self._marks_before(positions),
            "place": self._places.take(self._documents[positions]),
            "scope": self._scopes.take(positions),
            "pieces": flatten(
                self._pieces.take(spelled.values), spelled.splits
            ),
        }

    def _marks_before(self, positions: np.ndarray) -> Ragged:
        before, inside = window(
            self._mark_ends[positions], self._mark_starts[positions], MARKS
        )
        return Ragged.from_mask(self._marks[before], inside)

    def _echoes(self, positions: np.ndarray) -> Ragged:
        matches = np.empty((len(positions), ECHOES), np.int64)
        last = positions
        for column in range(ECHOES):
            last = np.where(last >= 0, self._earlier[last], -1)
            matches[:, column] = last
        rows = self._rows[matches]
        return Ragged.from_mask(rows, (matches >= 0) & (rows != UNKNOWN))


def window(
    ends: np.ndarray, starts: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the last `width` indices before each end, in descending order.

    >>> before, inside = window(np.array([5]), np.array([3]), 3)
    >>> before.tolist(), inside.tolist()
    ([[4, 3, 3]], [[True, True, False]])

    Returns:
      `[num_ends, width]` indices and a mask of the same shape. The mask is
      False where an index would be smaller than the start; the start is
      returned instead.
    """
    before = ends[:, None] - 1 - np.arange(width)
    inside = before >= starts[:, None]
    return np.maximum(before, np.minimum(starts, ends)[:, None]), inside


def recent_items(
    rows: np.ndarray, document_splits: np.ndarray, width: int
) -> np.ndarray:
    """Returns the distinct known rows that occur before each position.

    >>> recent_items(np.array([4, 7, 4, 0, 9]), np.array([0, 5]), 2).tolist()
    [[0, 0], [4, 0], [7, 4], [4, 7], [4, 7]]

    Returns:
      `[num_positions, width]` int32, most recent occurrence first, padded with
      `UNKNOWN`.
    """
    recent = np.full((len(rows), width), UNKNOWN, np.int32)
    for start, end in zip(
        document_splits[:-1], document_splits[1:], strict=True
    ):
        queue = []
        for position, row in enumerate(rows[start:end].tolist(), start):
            recent[position, : len(queue)] = queue
            if row == UNKNOWN:
                continue
            if row in queue:
                queue.remove(row)
            elif len(queue) == width:
                queue.pop()
            queue.insert(0, row)
    return recent


def earlier_matches(corpus: Corpus) -> np.ndarray:
    """Returns the most recent earlier position with the same left context.

    Two positions of a document match if the previous items are equal and the
    previous marks are equal. Items often repeat in the same context.

    Returns:
      `[num_positions]` int64, -1 for positions without a match.
    """
    num_positions = corpus.num_positions
    documents = corpus.document_of()
    first = corpus.document_splits[documents] == np.arange(num_positions)
    mark_at = np.maximum(corpus.marks_before - 1, 0)
    keys = np.stack(
        [documents, np.roll(corpus.items, 1), corpus.marks[mark_at]], axis=1
    ).astype(np.int64)
    order = np.lexsort((np.arange(num_positions), *keys.T))
    order = order[~first[order]]
    same = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    matches = np.full(num_positions, -1, np.int64)
    matches[order[1:][same]] = order[:-1][same]
    return matches


def relabel(labels: Ragged, row_of: np.ndarray) -> Ragged:
    """Returns the rows of the labels; labels without a row are dropped."""
    rows = row_of[labels.values]
    kept = rows >= 0
    kept_before = np.concatenate([[0], np.cumsum(kept)])
    return Ragged(rows[kept], kept_before[labels.splits].astype(np.int64))


def flatten(inner: Ragged, outer_splits: np.ndarray) -> Ragged:
    """Concatenates the inner rows that belong to each outer row."""
    return Ragged(inner.values, inner.splits[outer_splits])
