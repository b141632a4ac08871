"""Reads source code as windows of characters."""

from __future__ import annotations

import tokenize
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from completion.data.corpus import DataError, held_out_documents
from completion.data.python_source import python_files

OTHER = 0  # Row of characters that are not in the vocabulary.
_HELD_OUT = 0.1


class Characters:
    """The most frequent characters; all other characters share row 0.

    >>> characters = Characters("abba c", size=3)
    >>> characters.rows("abc").tolist()
    [1, 2, 0]
    >>> characters.text([1, 2, 0])
    'ab\ufffd'

    Attributes:
      names: The character of each row.
    """

    def __init__(self, text: str, *, size: int) -> None:
        """Creates a vocabulary of at most `size` rows from `text`."""
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        found, counts = np.unique(points, return_counts=True)
        # Characters are sorted by frequency, and then by code point.
        kept = found[np.argsort(-counts, kind="stable")][: size - 1]
        self.names = "\ufffd" + "".join(map(chr, kept))
        self._row_of = {char: row for row, char in enumerate(self.names) if row}

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, text: str) -> np.ndarray:
        """Returns the row of each character, `[len(text)]` uint8."""
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        found, inverse = np.unique(points, return_inverse=True)
        rows = np.array(
            [self._row_of.get(chr(p), OTHER) for p in found], np.uint8
        )
        return rows[inverse]

    def text(self, rows: Iterable[int]) -> str:
        """Returns the string of the given rows."""
        return "".join(self.names[row] for row in rows)


class Text:
    """The data set: text of training files and of held-out files.

    Attributes:
      characters: Vocabulary of the training files.
      training: `[num_characters]` uint8 rows of the training files.
      held_out: `[num_characters]` uint8 rows of the held-out files.
      facts: Names and values that the report prints.
    """

    def __init__(
        self,
        root: Path,
        skips: frozenset[str],
        source: str,
        *,
        vocabulary_size: int,
        context: int,
        seed: int,
    ) -> None:
        """Reads every `*.py` below `root`.

        Raises:
          DataError: The folder has fewer than two files, or too little text.
        """
        documents = read_files(root, skips)
        held_out = held_out_documents(
            list(documents), fraction=_HELD_OUT, seed=seed
        )
        texts = np.array(list(documents.values()), object)
        training, measured = "".join(texts[~held_out]), "".join(texts[held_out])
        shortest = min(len(training), len(measured))
        if len(documents) < 2 or shortest <= context:
            raise DataError(
                f"--data must contain at least two files of more than "
                f"--context={context} characters, because one is held out. "
                f"Received: {len(documents)} files, {len(training)} training "
                f"characters and {len(measured)} held-out characters."
            )
        self.characters = Characters(training, size=vocabulary_size)
        self.training = self.characters.rows(training)
        self.held_out = self.characters.rows(measured)
        self.facts = [
            ("source", source),
            (
                "files",
                f"{len(documents):,}, {held_out.sum():,} of them held out",
            ),
            (
                "characters",
                f"{len(training):,} for training, {len(measured):,} held out",
            ),
            (
                "vocabulary",
                f"{len(self.characters) - 1} characters; "
                f"{np.mean(self.held_out == OTHER):.3%} of the held-out "
                "characters are not in it",
            ),
        ]

    def measured_windows(self, context: int, limit: int) -> np.ndarray:
        """Returns evenly spaced held-out windows.

        Returns:
          `[num_windows, context + 1]` int32 with at most `limit` windows. The
          inputs are all columns except the last, and the targets are all
          columns except the first.
        """
        last = len(self.held_out) - context - 1
        count = min(limit, last // context + 1)
        starts = np.linspace(0, last, count).astype(np.int64)
        return self.held_out[
            starts[:, np.newaxis] + np.arange(context + 1)
        ].astype(np.int32)


def read_files(root: Path, skips: frozenset[str]) -> dict[str, str]:
    """Returns the text of each readable Python file below `root`.

    Raises:
      DataError: `root` is not a folder.
    """
    if not root.is_dir():
        raise DataError(
            f"--data must be 'stdlib' or a folder of Python "
            f"files. Received: {str(root)!r}, which is "
            f"{'a file' if root.exists() else 'missing'}."
        )
    documents = {}
    for path in python_files(root, skips):
        try:
            with tokenize.open(path) as file:
                documents[path.relative_to(root).as_posix()] = file.read()
        except (SyntaxError, ValueError, OSError):
            continue  # The file cannot be decoded with its declared encoding.
    return documents
