"""Readers of files of word vectors, whose keys are strings.

- Text: each line contains a key and the numbers of its row, separated by blanks
  or tabs. GloVe, word2vec, fastText and gensim write such files. word2vec and
  fastText write the numbers of keys and columns to the first line.
- Binary: the first line is the same. Each key is followed by a blank, and its
  row as little-endian float32. word2vec writes such files with `-binary 1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.vocabulary import key_rows

Array = np.ndarray[Any, Any]

_VALUE = np.dtype("<f4")
# Size of the parts in which a binary file is read.
_PART = 2**22
# A longer key is a sign of a wrong number of columns.
_MAX_KEY = 10_000


def read_text(path: str, dim: int) -> Iterator[key_rows.KeyBlock]:
    """Yields the rows of a text file.

    Args:
      path: The file.
      dim: Number of columns of the rows. The last `dim` words of a line are the
        row. The words before, with the blanks between them, are the key.

    Raises:
      ValueError: If the file cannot be read, or a line contains no key, or no
        row of `dim` numbers.
    """
    return _blocks(_text_rows(path, dim), path)


def read_word2vec(path: str, dim: int) -> Iterator[key_rows.KeyBlock]:
    """Yields the rows of a binary file of word2vec.

    Args:
      path: The file.
      dim: Number of columns of the rows.

    Raises:
      ValueError: If the file cannot be read, has another number of columns, or
        is not complete.
    """
    return _blocks(_binary_rows(path, dim), path)


def _text_rows(path: str, dim: int) -> Iterator[tuple[bytes, Array]]:
    with tf.io.gfile.GFile(path, "rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            # With one column, the first line could also be a row.
            if number == 1 and dim > 1 and _is_head(line):
                _check_head(line, path, dim)
                continue
            words = line.replace(b"\t", b" ").strip(b" \r\n").rsplit(b" ", dim)
            if not any(words):
                continue
            row = _row_of(words[1:])
            if len(words) != dim + 1 or row is None:
                raise ValueError(
                    f"Each line of {path!r} must contain a key and {dim} "
                    f"numbers. Received: line {number}, "
                    f"{_shortened(line)!r}."
                )
            yield words[0].rstrip(b" "), row


def _binary_rows(path: str, dim: int) -> Iterator[tuple[bytes, Array]]:
    with tf.io.gfile.GFile(path, "rb") as file:
        content = _Content(file, path)
        head = content.until(b"\n")
        if not _is_head(head):
            raise ValueError(
                f"The first line of {path!r} must contain the numbers of keys "
                f"and columns. Received: {_shortened(head)!r}."
            )
        for _ in range(_check_head(head, path, dim)):
            # word2vec writes a line break after each row, gensim does not.
            key = content.until(b" ").lstrip(b"\n")
            row = content.take(_VALUE.itemsize * dim)
            yield key, np.frombuffer(row, _VALUE)


def _blocks(
    rows: Iterator[tuple[bytes, Array]], path: str
) -> Iterator[key_rows.KeyBlock]:
    """Yields blocks of rows. The last row of equal keys is used."""
    block: dict[bytes, Array] = {}
    for key, row in rows:
        if not key:
            raise ValueError(
                f"Keys must not be empty. Received: the row of {path!r} after "
                f"{len(block)} keys of a block."
            )
        block[key] = row
        if len(block) >= key_rows.BLOCK_SIZE:
            yield _block_of(block)
            block = {}
    if block:
        yield _block_of(block)


def _block_of(rows: dict[bytes, Array]) -> key_rows.KeyBlock:
    keys = np.empty([len(rows)], object)
    keys[:] = list(rows)
    return key_rows.KeyBlock(
        keys, np.stack(list(rows.values())).astype(np.float32)
    )


class _Content:
    """Reads a binary file up to a separator, or a number of bytes."""

    def __init__(self, file: Any, path: str):
        self._file = file
        self._path = path
        self._bytes = b""
        self._position = 0

    def until(self, separator: bytes) -> bytes:
        while True:
            end = self._bytes.find(separator, self._position)
            if end >= 0:
                content = self._bytes[self._position : end]
                self._position = end + 1
                return content
            if len(self._bytes) - self._position > _MAX_KEY:
                raise ValueError(
                    f"A key of {self._path!r} must have less than {_MAX_KEY} "
                    "bytes. The file is not a binary file of word2vec."
                )
            self._read_more()

    def take(self, size: int) -> bytes:
        while len(self._bytes) - self._position < size:
            self._read_more()
        content = self._bytes[self._position : self._position + size]
        self._position += size
        return content

    def _read_more(self) -> None:
        part = _read(lambda: self._file.read(_PART), self._path)
        if not part:
            raise ValueError(
                f"The file {self._path!r} must contain the number of keys in "
                "its first line. It ends before."
            )
        self._bytes = self._bytes[self._position :] + part
        self._position = 0


def _lines(file: Any, path: str) -> Iterator[bytes]:
    while line := _read(file.readline, path):
        yield line


def _read(read: Any, path: str) -> bytes:
    try:
        return read()
    except tf.errors.OpError as error:
        raise ValueError(
            checks.message("path", "a file", path, error.message)
        ) from None


def _is_head(line: bytes) -> bool:
    """Returns whether a first line contains the numbers of keys and columns."""
    words = line.split()
    return len(words) == 2 and all(word.isdigit() for word in words)


def _check_head(line: bytes, path: str, dim: int) -> int:
    """Returns the number of keys, and checks the number of columns."""
    num_keys, columns = map(int, line.split())
    if columns != dim:
        raise ValueError(
            f"The rows of {path!r} must have {dim} columns, as the table. "
            f"Received: {columns} columns."
        )
    return num_keys


def _row_of(words: list[bytes]) -> Array | None:
    try:
        return np.array([float(word) for word in words], np.float32)
    except ValueError:
        return None


def _shortened(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= 80 else f"{text[:80]}..."
