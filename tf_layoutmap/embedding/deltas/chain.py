"""Reads and checks the deltas in a directory.

Each delta is a directory that contains `meta.json` and a checkpoint with the
tensors of the delta. The writer creates the directory only after it has written
all files to disk. `meta.json` contains the checksums of the files, a checksum
of itself, and the checksum of the previous delta. This module does not import
TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from typing import Any

# A delta of several embeddings has format 2, with a prefix for each table.
FORMATS = (1, 2)
META_FILE = "meta.json"
# Prefix of the TensorFlow checkpoint with the tensors of a delta.
TENSORS = "delta"
_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Meta:
    """Contents of `meta.json`, which describes a delta and its predecessor.

    Attributes:
      sequence: Number of the delta. The first delta of a base has number 1.
      base: Fingerprint of the checkpoint on which the deltas are based.
      prefix: Prefix of the tables' checkpoint keys in the base. Empty if the
        delta contains several embeddings.
      previous: The property `seal` of the previous delta, or an empty string
        for the first delta.
      tables: A dict for each table. `num_rows` is the number of changed rows,
        and `variables` is a list of the names of the table's variables. For an
        open vocabulary, `from_step` and `to_step` are its numbers of training
        steps at the previous delta and at this delta. If the delta contains
        several embeddings, `table` and `prefix` are the name and the prefix of
        the table in the base.
      files: For each file: `num_bytes` and `sha256`.
    """

    sequence: int
    base: str
    prefix: str
    previous: str
    tables: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]

    @property
    def seal(self) -> str:
        """Checksum of all attributes."""
        return _seal(dataclasses.asdict(self))

    def in_base(self, table: str) -> tuple[str, str]:
        """Returns the prefix and the name of a table in the base.

        Args:
          table: Name of the table in `tables`.
        """
        found = self.tables[table]
        return found.get("prefix", self.prefix), found.get("table", table)

    def to_json(self) -> str:
        """Returns the contents of `meta.json`."""
        has_several_embeddings = any(
            "prefix" in one for one in self.tables.values()
        )
        found = {
            "format": FORMATS[has_several_embeddings],
            **dataclasses.asdict(self),
        }
        return json.dumps({**found, "seal": self.seal}, indent=1) + "\n"


def meta_from_json(text: str, where: str) -> Meta:
    """Parses the text that `to_json` returned.

    Args:
      text: Contents of the file.
      where: Path of the file, for messages.

    Raises:
      ValueError: If the text is truncated, modified or in another format.
    """
    try:
        found = json.loads(text)
        version, seal = found.pop("format"), found.pop("seal")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{where!r} must be a file that tlm.DeltaWriter has written. "
            "Received: a truncated or modified file."
        ) from None
    if version not in FORMATS:
        raise ValueError(
            f"{where!r} must be of format {FORMATS[0]} or {FORMATS[1]}, which "
            f"this version supports. Received: format {version!r}."
        )
    if seal != _seal(found):
        raise ValueError(
            f"{where!r} must be a file that tlm.DeltaWriter has written. "
            "Received: a modified file, whose seal does not match."
        )
    return Meta(**found)


def _seal(found: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(found, sort_keys=True).encode()
    ).hexdigest()


@dataclasses.dataclass(frozen=True)
class Delta:
    """A complete delta.

    Attributes:
      path: Directory of the delta.
      meta: Contents of the file `meta.json` of the delta.
    """

    path: str
    meta: Meta

    @property
    def tensors(self) -> str:
        """Prefix of the checkpoint with the tensors of the delta."""
        return os.path.join(self.path, TENSORS)


def directory_name(sequence: int) -> str:
    """Returns the directory name of a delta.

    >>> directory_name(12)
    '00000012'
    """
    return f"{sequence:08d}"


def read_deltas(directory: str, base: str) -> list[Delta]:
    """Reads all deltas in a directory, and verifies their checksums.

    Args:
      directory: Directory of the deltas.
      base: Prefix of the checkpoint on which the deltas are based.

    Raises:
      ValueError: If a delta is missing, occurs twice, has another base or
        another predecessor, or contains a truncated or modified file. The
        message names the delta.
    """
    if not os.path.isdir(directory):
        raise ValueError(
            "Argument `directory` must be a directory with deltas. Received: "
            f"directory={directory!r}."
        )
    expected = fingerprint(base)
    found: list[Delta] = []
    for name in sorted(os.listdir(directory)):
        if not re.fullmatch(r"\d{8}", name):
            continue
        number, sequence = int(name), len(found) + 1
        if number != sequence:
            raise ValueError(
                f"Deltas must have consecutive numbers. Received: delta "
                f"{number} after {len(found)} (directory {directory!r})."
            )
        path = os.path.join(directory, name)
        meta = _read_meta(path)
        if meta.sequence != number:
            raise ValueError(
                f"{path!r} must hold delta {number}. Received: delta "
                f"{meta.sequence}"
                + (" again." if meta.sequence < number else ".")
            )
        if meta.base != expected:
            raise ValueError(
                f"Delta {number} must be of base {base!r}. Received: a delta "
                f"of another checkpoint ({path!r})."
            )
        if meta.previous != (found[-1].meta.seal if found else ""):
            raise ValueError(
                f"Delta {number} must follow delta {number - 1} of its "
                "directory. Received: a delta that follows another one "
                f"({path!r})."
            )
        _check_files(path, meta)
        found.append(Delta(path, meta))
    return found


def fingerprint(base: str) -> str:
    """Returns a checksum that identifies a checkpoint.

    The function reads only the index file of the checkpoint, which contains a
    checksum of each tensor.

    Raises:
      ValueError: If there is no checkpoint with this prefix.
    """
    try:
        return checksum(f"{base}.index")
    except OSError as error:
        raise ValueError(
            "Argument `base` must be the prefix of a checkpoint of "
            f"TensorFlow. Received: base={base!r} ({error})."
        ) from None


def checksum(path: str) -> str:
    """Returns the SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def _read_meta(path: str) -> Meta:
    file = os.path.join(path, META_FILE)
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            text = opened.read()
    except OSError as error:
        raise ValueError(
            f"{path!r} must hold {META_FILE!r}. Received: {error}."
        ) from None
    return meta_from_json(text, file)


def _check_files(path: str, meta: Meta) -> None:
    for name, expected in meta.files.items():
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            raise ValueError(
                f"Delta {meta.sequence} must have the file {file!r}. "
                "Received: none."
            )
        num_bytes = os.path.getsize(file)
        if num_bytes != expected["num_bytes"]:
            raise ValueError(
                f"{file!r} must have {expected['num_bytes']} bytes. Received: "
                f"{num_bytes}; the file was truncated or modified."
            )
        if checksum(file) != expected["sha256"]:
            raise ValueError(
                f"{file!r} must have the checksum in {META_FILE!r}. Received: "
                "another checksum; the file was modified."
            )
