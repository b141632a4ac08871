"""The deltas in a directory, in their order, refused unless they are whole.

Pure: no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re

from tf_layoutmap.embedding.deltas import meta as meta_file
from tf_layoutmap.embedding.deltas.meta import Meta

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
    file = os.path.join(path, meta_file.FILE)
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            text = opened.read()
    except OSError as error:
        raise ValueError(
            f"{path!r} must hold {meta_file.FILE!r}. Received: {error}."
        ) from None
    return meta_file.from_json(text, file)


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
                f"{file!r} must have the checksum that {meta_file.FILE!r} "
                "says. Received: another one; it was altered."
            )
