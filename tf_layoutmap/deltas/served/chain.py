"""Reads and checks the deltas in a directory.

Each delta is a directory that contains `meta.json` and a checkpoint with the
tensors of the delta. On the local file system, the writer creates the directory
only after it has written all files to disk. On other file systems, it writes
`meta.json` last, and a directory without this file is ignored. `meta.json`
contains the checksums of the files, a checksum of itself, and the checksum of
the previous delta. A merged delta replaces several consecutive deltas. This
module imports TensorFlow only for paths that are not local.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from . import storage

# Version of the format of deltas.
FORMAT = 1
META_FILE = "meta.json"
# Prefix of the TensorFlow checkpoint with the tensors of a delta.
TENSORS = "delta"
_CHUNK_BYTES = 2**20
# Attributes of `Meta` that `meta.json` contains only if they are not empty.
_OPTIONAL = ("merged", "writers", "weights")


class FileOfDelta(TypedDict):
    """Description of a file; see `Meta.files`."""

    num_bytes: int
    sha256: str


class TableOfDelta(TypedDict):
    """Description of a table; see `Meta.tables`."""

    num_rows: int
    variables: list[str]
    from_step: NotRequired[int]
    to_step: NotRequired[int]
    table: NotRequired[str]
    prefix: NotRequired[str]


class WeightOfDelta(TypedDict):
    """Description of a weight; see `Meta.weights`."""

    key: str
    is_changed: bool
    is_state: bool


@dataclasses.dataclass(frozen=True)
class Meta:
    """Contents of `meta.json`, which describes a delta and its predecessor.

    Attributes:
      sequence: Number of the delta. The first delta of a base has number 1.
        The number of a merged delta is the number of its last delta.
      base: Fingerprint of the checkpoint on which the deltas are based.
      prefix: Prefix of the tables' checkpoint keys in the base. Empty if the
        delta contains several embeddings.
      previous: The property `link` of the previous delta, or an empty string
        for the first delta.
      tables: A dict for each table, by the name of the table. The name of the
        table of a `ShardedEmbedding` is the name of the layer. If tables of
        several layers have the same name, the name of the layer precedes it.
        `num_rows` is the number of changed rows, and `variables` is a list of
        the names of the table's variables. For an open vocabulary, `from_step`
        and `to_step` are its numbers of training steps at the previous delta
        and at this delta. If the delta contains several embeddings, or the name
        differs in the base, `table` and `prefix` are the name and the prefix of
        the table in the base.
      files: For each file: `num_bytes` and `sha256`.
      merged: The property `link` of each delta that a merged delta replaces, in
        order. Empty for a delta that is not merged.
      writers: Identifier of the writer of the delta, or of each delta that a
        merged delta replaces. Empty if the writers are not known.
      weights: A dict for each variable of the model that is not in a table.
        `is_changed` is whether the delta contains the value, `key` is the
        checkpoint key of the variable in the base, or an empty string, and
        `is_state` is whether only optimizers use the variable. Empty for the
        deltas of a writer that writes only tables.
    """

    sequence: int
    base: str
    prefix: str
    previous: str
    tables: dict[str, TableOfDelta]
    files: dict[str, FileOfDelta]
    merged: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    weights: dict[str, WeightOfDelta] = dataclasses.field(
        default_factory=dict[str, WeightOfDelta]
    )

    @property
    def seal(self) -> str:
        """Checksum of all attributes."""
        return _seal(self._attributes())

    @property
    def first(self) -> int:
        """Number of the first delta that this delta contains."""
        return self.sequence - max(len(self.merged), 1) + 1

    @property
    def link(self) -> str:
        """Checksum that the next delta stores as `previous`.

        The link of a merged delta is the link of its last delta.
        """
        return self.merged[-1] if self.merged else self.seal

    def link_after(self, sequence: int) -> str:
        """Returns the link of delta `sequence` according to this delta.

        Args:
          sequence: Number in `[first - 1, self.sequence]`.
        """
        if sequence == self.first - 1:
            return self.previous
        if sequence == self.sequence:
            return self.link
        return self.merged[sequence - self.first]

    def in_base(self, table: str) -> tuple[str, str]:
        """Returns the prefix and the name of a table in the base.

        Args:
          table: Name of the table in `tables`.
        """
        description = self.tables[table]
        return description.get("prefix", self.prefix), description.get(
            "table", table
        )

    def writer_of(self, sequence: int) -> str:
        """Returns the writer of a delta, or an empty string if unknown.

        Args:
          sequence: Number in `[first, self.sequence]`.
        """
        return self.writers[sequence - self.first] if self.writers else ""

    def to_json(self) -> str:
        """Returns the contents of `meta.json`."""
        contents = {"format": FORMAT, **self._attributes()}
        return json.dumps({**contents, "seal": self.seal}, indent=1) + "\n"

    def _attributes(self) -> dict[str, Any]:
        """Returns all attributes, without empty optional attributes."""
        attributes = dataclasses.asdict(self)
        for name in _OPTIONAL:
            if not attributes[name]:
                del attributes[name]
            elif isinstance(attributes[name], tuple):
                attributes[name] = list(attributes[name])
        return attributes


def meta_from_json(text: str, where: str) -> Meta:
    """Parses the text that `to_json` returned.

    Args:
      text: Contents of the file.
      where: Path of the file, for messages.

    Raises:
      ValueError: If the text is truncated, modified or in another format.
    """
    try:
        contents = json.loads(text)
        version, seal = contents.pop("format"), contents.pop("seal")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{where!r} must be a file that tlm.deltas.DeltaWriter has "
            "written. Received: a truncated or modified file."
        ) from None
    if version != FORMAT:
        raise ValueError(
            f"{where!r} must be of format {FORMAT}, which this version "
            f"supports. Received: format {version!r}."
        )
    if seal != _seal(contents):
        raise ValueError(
            f"{where!r} must be a file that tlm.deltas.DeltaWriter has "
            "written. Received: a modified file, whose seal does not match."
        )
    fields: dict[str, Any] = dict(contents)
    for name in ("merged", "writers"):
        fields[name] = tuple(contents.get(name, ()))
    return Meta(**fields)


def _seal(contents: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(contents, sort_keys=True).encode()
    ).hexdigest()


@dataclasses.dataclass(frozen=True)
class Delta:
    """A complete delta, which `DeltaWriter.write` returns.

    `meta.sequence` is the number of the delta, and `meta.tables` contains the
    number of changed rows of each table.

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


@dataclasses.dataclass(frozen=True)
class Position:
    """The last delta of a chain.

    Attributes:
      base: Fingerprint of the checkpoint on which the deltas are based.
      sequence: Number of the last delta, or 0.
      link: `Meta.link` of the last delta, or an empty string.
      writer: Identifier of the writer that must write the next delta. Empty if
        any writer may write it.
    """

    base: str
    sequence: int
    link: str
    writer: str = ""


def weight_tensor(label: str) -> str:
    """Returns the name of a weight's tensor in a delta.

    The names of other tensors begin with the name of a table.
    """
    return f".WEIGHTS/{label}"


def directory_name(sequence: int, first: int | None = None) -> str:
    """Returns the directory name of a delta.

    >>> directory_name(12), directory_name(12, first=3)
    ('00000012', '00000003-00000012')

    Args:
      sequence: Number of the delta.
      first: Number of the first delta of a merged delta.
    """
    name = f"{sequence:08d}"
    return name if first is None else f"{first:08d}-{name}"


def numbers_of(name: str) -> tuple[int, int] | None:
    """Returns the first and the last number in a directory name of a delta.

    >>> numbers_of("00000012"), numbers_of("00000003-00000012")
    ((12, 12), (3, 12))
    >>> numbers_of("full-00000012") is None
    True
    """
    match = re.fullmatch(r"(?:(\d{8})-)?(\d{8})", name)
    if match is None:
        return None
    last = int(match[2])
    return (last if match[1] is None else int(match[1])), last


def last_sequence(deltas: Sequence[Delta]) -> int:
    """Returns the number of the last delta, or 0 if there is none."""
    return deltas[-1].meta.sequence if deltas else 0


def read_deltas(directory: str, base: str) -> list[Delta]:
    """Reads all deltas in a directory, and verifies their checksums.

    If a merged delta and the deltas that it replaces exist, only the merged
    delta is read.

    Args:
      directory: Directory of the deltas.
      base: Prefix of the checkpoint on which the deltas are based.

    Raises:
      ValueError: If a delta is missing, occurs twice, has another base or
        another predecessor, or contains a truncated or modified file. The
        message names the delta.
    """
    chosen = _consecutive(directory, 0)
    return read_chain(
        [os.path.join(directory, name) for name in chosen],
        fingerprint(base),
        base,
    )


def pending_paths(directory: str, sequence: int) -> list[str]:
    """Returns the paths of the deltas in a directory that follow a delta.

    Args:
      directory: Directory of the deltas.
      sequence: Number of the last applied delta, or 0. If no delta of the
        directory begins with the next number, the first path is a merged delta
        that contains the next number.

    Raises:
      ValueError: If a delta is missing.
    """
    return [
        os.path.join(directory, name)
        for name in _consecutive(directory, sequence)
    ]


def _consecutive(directory: str, sequence: int) -> list[str]:
    """Returns the names of the deltas that follow delta `sequence`, in order.

    Raises:
      ValueError: If a delta is missing, or `directory` is not a directory.
    """
    if not storage.is_folder(directory):
        raise ValueError(
            "Argument `directory` must be a directory with deltas. Received: "
            f"directory={directory!r}."
        )
    names = _names_after(directory, sequence)
    selected: list[str] = []
    last = sequence
    while any(end > last for _, end in names):
        # Prefers deltas that begin with the next number, and longer deltas.
        begin, end = max(
            (
                numbers
                for numbers in names
                if numbers[0] <= last + 1 <= numbers[1]
            ),
            default=(0, 0),
        )
        if end == 0:
            number = min(begin for begin, end in names if end > last)
            raise ValueError(
                f"Deltas must have consecutive numbers. Received: delta "
                f"{number} after {last} (directory {directory!r})."
            )
        selected.append(names[begin, end])
        last = end
    return selected


def _names_after(directory: str, sequence: int) -> dict[tuple[int, int], str]:
    """Returns the names of complete deltas, by first and last number.

    A delta on the local file system is complete. On other file systems, a delta
    is complete if it contains `meta.json`, and the list of names can be out of
    date. Consecutive deltas that the list does not contain are found by their
    names.

    Args:
      directory: Directory of the deltas.
      sequence: Number of a delta. On file systems that are not local, only
        deltas that end after it are returned.
    """
    names = {
        numbers: name
        for name in storage.names_in(directory)
        if (numbers := numbers_of(name)) is not None
    }
    if storage.is_local(directory):
        return names

    def is_complete(name: str) -> bool:
        return storage.is_file(os.path.join(directory, name, META_FILE))

    complete = {
        numbers: name
        for numbers, name in names.items()
        if numbers[1] > sequence and is_complete(name)
    }
    last = sequence
    while True:
        ends = [end for begin, end in complete if begin <= last + 1 <= end]
        if ends:
            last = max(ends)
        elif is_complete(directory_name(last + 1)):
            last += 1
            complete[last, last] = directory_name(last)
        else:
            return complete


def read_chain(
    paths: Sequence[str],
    base: str,
    base_name: str,
    sequence: int | None = 0,
    link: str = "",
    writer: str = "",
) -> list[Delta]:
    """Reads consecutive deltas, and verifies their checksums.

    Args:
      paths: Paths of the deltas, in order.
      base: Fingerprint of the checkpoint on which the deltas are based. An
        empty string accepts any base that is the same for all deltas.
      base_name: Name of the base, for messages.
      sequence: Number of the delta after which the first delta is applied. A
        merged delta may begin earlier. None accepts any first delta.
      link: `Meta.link` of delta `sequence`.
      writer: See `Position.writer`.

    Raises:
      ValueError: If a delta is missing, is repeated, has another base or
        another predecessor, or contains a truncated or modified file. The
        message names the delta.
    """
    deltas: list[Delta] = []
    for path in paths:
        delta = Delta(path, _read_meta(path))
        meta = delta.meta
        if sequence is None:
            sequence, link = meta.first - 1, meta.previous
        base = base or meta.base
        _check_number(path, meta, sequence)
        if meta.base != base:
            raise ValueError(
                f"Delta {meta.sequence} must be of base {base_name!r}. "
                f"Received: a delta of another checkpoint ({path!r})."
            )
        if meta.link_after(sequence) != link:
            raise ValueError(
                f"Delta {meta.sequence} must follow delta {sequence} of its "
                "directory. Received: a delta that follows another one "
                f"({path!r})."
            )
        if writer and meta.writer_of(sequence + 1) != writer:
            raise ValueError(
                f"Delta {sequence + 1} must be of the tlm.deltas.DeltaWriter "
                "that was passed when the model was exported. Received: a "
                f"delta of another writer ({path!r}). The training was "
                "restarted after the export, and the model can contain rows of "
                "steps that were lost. Export the model again."
            )
        _check_files(path, meta)
        deltas.append(delta)
        writer = ""
        sequence, link = meta.sequence, meta.link
    return deltas


def check_applied(directory: str, sequence: int, link: str) -> None:
    """Checks that the deltas in a directory contain an applied delta.

    The check reads one `meta.json`. It is omitted if no delta of the directory
    contains the number.

    Args:
      directory: Directory of the deltas.
      sequence: Number of the last applied delta.
      link: `Meta.link` of the last applied delta.

    Raises:
      ValueError: If the delta with this number is another delta.
    """
    names = _names_after(directory, sequence - 1)
    for numbers, name in sorted(names.items(), key=lambda entry: entry[1]):
        if not numbers[0] <= sequence <= numbers[1]:
            continue
        path = os.path.join(directory, name)
        if _read_meta(path).link_after(sequence) != link:
            raise ValueError(
                f"{path!r} must contain the delta {sequence} that was applied "
                "to the model. Received: another delta with this number. "
                "Export the model again."
            )
        return


def _check_number(path: str, meta: Meta, sequence: int) -> None:
    """Checks the number of a delta after delta `sequence`.

    Raises:
      ValueError: If the directory has the number of another delta, or a delta
        is repeated or missing.
    """
    name = storage.name_of(storage.absolute(path))
    numbers = numbers_of(name)
    if numbers is not None and numbers != (meta.first, meta.sequence):
        raise ValueError(
            f"{path!r} must hold delta {numbers[1]}. Received: delta "
            f"{meta.sequence}"
            + (" again." if meta.sequence < numbers[1] else ".")
        )
    if meta.sequence <= sequence:
        raise ValueError(
            f"{path!r} must be a delta that follows delta {sequence}. "
            f"Received: delta {meta.sequence}, which was already applied."
        )
    if meta.first > sequence + 1:
        raise ValueError(
            f"Deltas must have consecutive numbers. Received: delta "
            f"{meta.first} after {sequence} ({path!r})."
        )


def fingerprint(base: str) -> str:
    """Returns a checksum that identifies a checkpoint.

    The function reads only the index file of the checkpoint, which contains a
    checksum of each tensor.

    Raises:
      ValueError: If no checkpoint has this prefix.
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
    digest = hashlib.sha256()
    with storage.reading(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_meta(path: str) -> Meta:
    file = os.path.join(path, META_FILE)
    try:
        text = storage.read_text(file)
    except OSError as error:
        raise ValueError(
            f"{path!r} must hold {META_FILE!r}. Received: {error}."
        ) from None
    return meta_from_json(text, file)


def _check_files(path: str, meta: Meta) -> None:
    for name, expected in meta.files.items():
        file = os.path.join(path, name)
        if not storage.is_file(file):
            raise ValueError(
                f"Delta {meta.sequence} must have the file {file!r}. "
                "Received: none."
            )
        num_bytes = storage.size(file)
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
