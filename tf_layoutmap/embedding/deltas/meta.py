"""What `meta.json` of a delta says, sealed by a checksum.

Pure: no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

# 2 where tables of several embeddings are, each with a prefix of its own.
FORMATS = (1, 2)
FILE = "meta.json"


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


def from_json(text: str, where: str) -> Meta:
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
