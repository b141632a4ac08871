"""The deltas in a directory, in their order, refused unless they are whole.

Pure: no TensorFlow.
"""

# DOC-MERGE: A delta's directory: complete and on the disk, or not there.
# DOC-MERGE: What `meta.json` of a delta says, sealed by a checksum.
#
# Pure: no TensorFlow.
#
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from typing import Any

# 2 where tables of several embeddings are, each with a prefix of its own.
FORMATS = (1, 2)
META_FILE = "meta.json"


@dataclasses.dataclass(frozen=True)
class Meta:
    """What a delta is, and what it follows.

    Attributes:
      sequence: Its number; those of a base count from 1.
      base: Fingerprint of the checkpoint that the first one follows.
      prefix: What the names of the tables' tensors begin with there; empty
        where those of several embeddings are.
      previous: Seal of the delta before; empty of the first.
      tables: By name: `num_rows` that changed, the names of `variables`, and
        of an open vocabulary `from_step` and `to_step`, its training steps.
        Of one of several embeddings also its `table` and `prefix` in the base.
      files: By name: `num_bytes` and `sha256`.
    """

    sequence: int
    base: str
    prefix: str
    previous: str
    tables: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]

    @property
    def seal(self) -> str:
        """A checksum of all of it."""
        return _seal(dataclasses.asdict(self))

    def in_base(self, table: str) -> tuple[str, str]:
        """Returns prefix and name of a table in the base.

        Args:
          table: What it is called here.
        """
        found = self.tables[table]
        return found.get("prefix", self.prefix), found.get("table", table)

    def to_json(self) -> str:
        """Returns the contents of the file."""
        is_of_several = any("prefix" in one for one in self.tables.values())
        found = {"format": FORMATS[is_of_several], **dataclasses.asdict(self)}
        return json.dumps({**found, "seal": self.seal}, indent=1) + "\n"


def meta_from_json(text: str, where: str) -> Meta:
    """Reads what `to_json` returned.

    Args:
      text: The contents of the file.
      where: Its path, for messages.

    Raises:
      ValueError: If it is cut, altered or of another format.
    """
    try:
        found = json.loads(text)
        version, seal = found.pop("format"), found.pop("seal")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{where!r} must be what tlm.DeltaWriter has written. Received: "
            "a file that was cut or altered."
        ) from None
    if version not in FORMATS:
        raise ValueError(
            f"{where!r} must be of format {FORMATS[0]} or {FORMATS[1]}, which "
            f"this version reads. Received: format {version!r}."
        )
    if seal != _seal(found):
        raise ValueError(
            f"{where!r} must be what tlm.DeltaWriter has written. Received: "
            "a file that was altered, its seal is of another one."
        )
    return Meta(**found)


def _seal(found: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(found, sort_keys=True).encode()
    ).hexdigest()


# The tensors of a delta, as a checkpoint of TensorFlow.
TENSORS = "delta"
_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Delta:
    """One that is complete.

    Attributes:
      path: Its directory.
      meta: What it says of itself.
    """

    path: str
    meta: Meta

    @property
    def tensors(self) -> str:
        """Prefix of the checkpoint of its tensors."""
        return os.path.join(self.path, TENSORS)


def name_of(sequence: int) -> str:
    """Returns the name of the directory of a delta.

    >>> name_of(12)
    '00000012'
    """
    return f"{sequence:08d}"


def read(directory: str, base: str) -> list[Delta]:
    """Returns all deltas in a directory, and reads each of their bytes.

    Args:
      directory: Where they are.
      base: Prefix of the checkpoint that they follow.

    Raises:
      ValueError: If one is missing, comes twice, follows another base or
        another delta, or a file of it was cut or altered; it says which.
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
                f"Deltas must follow each other without a gap. Received: delta "
                f"{number} after {len(found)} (directory {directory!r})."
            )
        path = os.path.join(directory, name)
        meta = _read_meta(path)
        if meta.sequence != number:
            raise ValueError(
                f"{path!r} must hold delta {number}. Received: delta "
                f"{meta.sequence}"
                + (" once more." if meta.sequence < number else ".")
            )
        if meta.base != expected:
            raise ValueError(
                f"Delta {number} must be of base {base!r}. Received: one of "
                f"another checkpoint ({path!r})."
            )
        if meta.previous != (found[-1].meta.seal if found else ""):
            raise ValueError(
                f"Delta {number} must continue delta {number - 1} of its "
                f"directory. Received: one that continues another ({path!r})."
            )
        _check_files(path, meta)
        found.append(Delta(path, meta))
    return found


def fingerprint(base: str) -> str:
    """Returns what tells a checkpoint from others.

    Its index holds a checksum of each tensor, so it is enough to read that.

    Raises:
      ValueError: If there is no such checkpoint.
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
                f"{num_bytes}; it was cut or altered."
            )
        if checksum(file) != expected["sha256"]:
            raise ValueError(
                f"{file!r} must have the checksum that {META_FILE!r} "
                "says. Received: another one; it was altered."
            )
