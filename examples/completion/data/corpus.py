"""The data set: documents, which are sequences of items with context."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from completion.data.ragged import Ragged


class DataError(Exception):
    """The data cannot be used. The message contains the reason and a remedy."""


class Names:
    """A numbering of distinct strings in order of first appearance.

    >>> names = Names()
    >>> [names.number(word) for word in ["self", "path", "self"]]
    [0, 1, 0]
    >>> list(names)
    ['self', 'path']
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Returns the number of `name`; a new name gets the next number."""
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
    """Documents that consist of items. A position is one item in one document.

    | term | Python source | MovieLens |
    |---|---|---|
    | document | file | user |
    | item | identifier | movie |
    | mark | token; all identifiers are the same mark | rating |
    | place | part of the module's path | attribute of the user |
    | scope | class or function that contains the position | genre |

    The arrays contain indices into the lists of names: for example, `items`
    contains indices into `item_names`.
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
    marks_before: np.ndarray  # [num_positions] int64, number of earlier marks
    places: Ragged  # One row per document.
    scopes: Ragged  # One row per position.
    facts: list[tuple[str, str]]  # Names and values that the report prints.
    words: dict[str, str]  # Words that the report uses for document and item.

    @property
    def num_positions(self) -> int:
        """Number of items in all documents."""
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
    """Selects the documents that are held out from training.

    Documents are selected by a hash of their name, so the selection of a
    document does not depend on other documents and is the same on every
    machine.

    >>> held_out_documents(["a.py", "b.py"], fraction=0.5, seed=1).tolist()
    [True, False]

    Returns:
      `[num_documents]` bool. If there are at least two documents, at least one
      is held out and at least one is used for training.
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
