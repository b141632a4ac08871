"""Reads a folder of Python files as a corpus of identifiers."""

from __future__ import annotations

import keyword
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from completion.data.corpus import Corpus, DataError, Names
from completion.data.ragged import Ragged, splits_of

# Installed packages are skipped, because they are not part of the standard
# library. Test suites are skipped, because they are three times as large as all
# other files, and `self.assertEqual` is their most frequent name.
STDLIB_SKIPS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
    }
)
FOLDER_SKIPS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "node_modules"}
)

_SILENT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
)


def read_standard_library() -> Corpus:
    """Returns the corpus of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    source = f"standard library of Python {platform.python_version()}"
    return read_folder(root, source=source, skips=STDLIB_SKIPS)


def read_folder(
    root: Path,
    *,
    source: str | None = None,
    skips: frozenset[str] = FOLDER_SKIPS,
) -> Corpus:
    """Reads every `*.py` below `root` that can be tokenized.

    Args:
      root: Folder to read.
      source: Name of the data in the report; the path by default.
      skips: Names of folders to skip. Hidden folders are always skipped.

    Raises:
      DataError: `root` is not a folder, or has no readable Python file.
    """
    if not root.is_dir():
        raise DataError(
            f"--data must be 'stdlib', 'movielens' or a folder "
            f"of Python files. Received: {str(root)!r}, which is "
            f"{'a file' if root.exists() else 'missing'}."
        )
    names, marks, places, scopes = Names(), Names(), Names(), Names()
    documents, document_places, files = [], [], []
    unread = 0
    for path in python_files(root, skips):
        try:
            with tokenize.open(path) as text:
                files.append(read_file(text.readline, names, marks, scopes))
        except (SyntaxError, ValueError, tokenize.TokenError, OSError):
            unread += 1  # Python 2 code, templates or test data.
            continue
        relative = path.relative_to(root).with_suffix("")
        documents.append(relative.as_posix() + ".py")
        document_places.append(
            places.numbers(
                part for part in relative.parts if part != "__init__"
            )
        )
    if not documents:
        raise DataError(
            f"--data must contain at least one readable Python file. Received: "
            f"{str(root)!r} with {unread} unreadable files."
        )

    items = np.concatenate([file.items for file in files])
    mark_lengths = [len(file.marks) for file in files]
    mark_splits = splits_of(np.array(mark_lengths))
    return Corpus(
        item_names=list(names),
        mark_names=list(marks),
        place_names=list(places),
        scope_names=list(scopes),
        documents=documents,
        items=items,
        document_splits=splits_of(np.array([len(f.items) for f in files])),
        marks=np.concatenate([file.marks for file in files]),
        mark_splits=mark_splits,
        marks_before=np.concatenate(
            [
                file.marks_before + start
                for file, start in zip(files, mark_splits, strict=False)
            ]
        ),
        places=Ragged.from_lists(document_places),
        scopes=Ragged.from_lists(
            scope for file in files for scope in file.scopes
        ),
        facts=[
            ("source", source or str(root)),
            ("files", f"{len(documents):,} read, {unread:,} unreadable"),
            ("tokens", f"{sum(mark_lengths):,}"),
        ],
        words={"document": "file", "item": "identifier"},
    )


def python_files(root: Path, skips: frozenset[str]) -> Iterator[Path]:
    """Yields the Python files below `root` in sorted order."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if name not in skips and not name.startswith(".")
        )
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)


class FileTokens:
    """Identifiers of one file, with their marks and scopes."""

    def __init__(
        self,
        items: list[int],
        marks: list[int],
        marks_before: list[int],
        scopes: list[tuple[int, ...]],
    ) -> None:
        self.items = np.array(items, np.int32)
        self.marks = np.array(marks, np.int32)
        self.marks_before = np.array(marks_before, np.int64)
        self.scopes = scopes


def read_file(
    readline, names: Names, marks: Names, scopes: Names
) -> FileTokens:
    """Returns the identifiers, marks and scopes of one file.

    Args:
      readline: Function that returns the next line, such as
        `io.StringIO(...).readline`.
      names: Index of each identifier. New identifiers are added.
      marks: Index of each token. All identifiers are the token `NAME`.
      scopes: Index of each `def NAME` and `class NAME`.
    """
    items, marks_seen, marks_before, scope_of = [], [], [], []
    blocks = []  # Scope or None for each open indent.
    header = None  # Scope whose body has not yet started.
    current = ()  # Scopes of the next token, outermost first.
    before = ""  # The previous mark.
    for kind, text, *_ in tokenize.generate_tokens(readline):
        if kind in _SILENT:
            continue
        if kind == tokenize.INDENT:
            blocks.append(header)
            header = None
        elif header is not None and before == "NEWLINE":
            header = None  # The body is on the same line as the header.
            current = _open_scopes(blocks)
        if kind == tokenize.DEDENT:
            blocks.pop()
            current = _open_scopes(blocks)
        if kind == tokenize.OP or keyword.iskeyword(text):
            mark = text
        else:
            mark = tokenize.tok_name[kind]
        if mark == "NAME":
            items.append(names.number(text))
            marks_before.append(len(marks_seen))
            scope_of.append(current)
            if before in ("def", "class"):
                header = scopes.number(f"{before} {text}")
                current = (*current, header)
        before = mark
        marks_seen.append(marks.number(mark))
    return FileTokens(items, marks_seen, marks_before, scope_of)


def _open_scopes(blocks: list[int | None]) -> tuple[int, ...]:
    return tuple(block for block in blocks if block is not None)
