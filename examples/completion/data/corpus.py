"""What was read: documents, each a sequence of items with their context."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from completion.data.ragged import Ragged


class DataError(Exception):
    """The data asked for cannot be used; says why and what to do instead."""


class Names:
    """Gives every distinct string a number, in order of first appearance.

    >>> names = Names()
    >>> [names.number(word) for word in ["self", "path", "self"]]
    [0, 1, 0]
    >>> list(names)
    ['self', 'path']
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Returns the number of `name`, a new one if it has none yet."""
        return self._numbers.setdefault(name, len(self._numbers))

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Returns the number of each name."""
        return [self.number(name) for name in names]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents of items; a position is one item in one document.

    In Python source a document is a file, an item an identifier, a mark any
    token (identifiers all count as one), a place a part of the module's path
    and a scope the class or function around the position. In MovieLens they
    are a user, a movie, a rating, an attribute of the user and a genre.

    A number is an index into the list of names of its kind.
    """

    item_names: list[str]
    mark_names: list[str]
    place_names: list[str]
    scope_names: list[str]
    documents: list[str]
    items: np.ndarray  # [num_positions] int32
    document_splits: np.ndarray  # [num_documents + 1] int64, into items
    marks: np.ndarray  # [num_marks] int32
    mark_splits: np.ndarray  # [num_documents + 1] int64, into marks
    marks_before: np.ndarray  # [num_positions] int64, marks that precede it
    places: Ragged  # one row per document
    scopes: Ragged  # one row per position
    facts: list[tuple[str, str]]  # what a person wants to know about it
    words: dict[str, str]  # what a document and an item are called

    @property
    def num_positions(self) -> int:
        """Returns how many items all documents hold."""
        return len(self.items)

    def document_of(self) -> np.ndarray:
        """Returns the document of every position, `[num_positions]` int64."""
        return np.repeat(
            np.arange(len(self.documents)), np.diff(self.document_splits)
        )

    def positions_of(self, documents: np.ndarray) -> np.ndarray:
        """Returns the positions of the documents where the mask is True."""
        return np.flatnonzero(
            np.repeat(documents, np.diff(self.document_splits))
        )


def held_out_documents(
    documents: list[str], *, fraction: float, seed: int
) -> np.ndarray:
    """Chooses the documents that are only tested on, never trained on.

    Each name is hashed on its own, so the choice for a document does not
    depend on which others there are, and is the same on every machine.

    >>> held_out_documents(["a.py", "b.py"], fraction=0.5, seed=1).tolist()
    [True, False]

    Returns:
      `[num_documents]` bool. Never all and never none of two or more.
    """
    draws = (
        np.array(
            [
                int.from_bytes(
                    hashlib.blake2b(
                        f"{seed}/{name}".encode(), digest_size=6
                    ).digest(),
                    "big",
                )
                for name in documents
            ],
            np.float64,
        )
        / 2.0**48
    )
    chosen = draws < fraction
    if len(documents) > 1:
        chosen[np.argmin(draws)] = True
        chosen[np.argmax(draws)] = False
    return chosen
