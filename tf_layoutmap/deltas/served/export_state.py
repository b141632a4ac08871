"""The file in a SavedModel that describes its tables and its last delta.

`tlm.export` and `tlm.deltas.DeltaWriter.mark_export` write the file, and
programs that apply deltas read it. The file is in the folder `assets.extra`,
which TensorFlow does not read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from . import chain, storage
from .packing import RowFormat

FILE = os.path.join("assets.extra", "tlm_deltas.json")
VARIABLES = os.path.join("variables", "variables")
# TensorFlow loads only folders with this file. On file systems that are not
# local, it is written last.
MODEL = "saved_model.pb"
# Suffix of the checkpoint keys of variables.
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
# Version of the format of the file.
_FORMAT = 1

# Names of variables in deltas.
PARAMETERS = "parameters"
KEYS = "vocabulary_keys"
SKETCH = "vocabulary_sketch"
SKETCH_ROWS = "vocabulary_sketch_rows"
# Variables that have one element for each row, in buckets.
LANES = (KEYS, "vocabulary_last_steps", "vocabulary_counts")
# Small variables that each delta contains in full.
WHOLE = ("vocabulary_sketch_sums", "vocabulary_numbers", "rounding_steps")
# Number of cells per block of a sketch.
SKETCH_CELLS = 16
# Key of an empty place in a bucket, and of the row that unknown keys share.
EMPTY_KEY = -(2**63)


@dataclasses.dataclass(frozen=True)
class StoredVariable:
    """A variable of a SavedModel that stores a variable of a table.

    Attributes:
      key: Key of the variable in the checkpoint of the SavedModel.
      shape: Shape of the variable in the SavedModel.
      dtype: Name of the dtype of the variable in the SavedModel.
      start: Row of the variable that stores row 0 of the table.
      kind: `RowFormat.kind` of packed rows, or an empty string if the variable
        stores the values of the table.
      blocks: First rows of the blocks in which the variable is stored on disk.
        Empty if the variable is stored in one block.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    kind: str = ""
    blocks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table of a SavedModel.

    Attributes:
      name: Name of the table in its embedding.
      prefix: Prefix of the embedding's checkpoint keys in the base.
      num_rows: Number of rows.
      dim: Number of columns.
      dtype: Name of the dtype of the rows in deltas.
      variables: Variables of the SavedModel, by the names of variables in
        deltas.
    """

    name: str
    prefix: str
    num_rows: int
    dim: int
    dtype: str
    variables: dict[str, StoredVariable]

    def row_format(self, variable: StoredVariable) -> RowFormat:
        """Returns the format of the rows in a variable."""
        return RowFormat(variable.kind or self.dtype, self.dim)


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A variable of a SavedModel that stores a weight, or some of its rows.

    Attributes:
      name: Name of the weight in deltas.
      shape: Shape of the weight.
      dtype: Name of the dtype of the weight.
      variable: The variable. If its `kind` is not empty, the weight is a table
        whose rows are stored in rows of the variable.
      first: First row of the weight that the variable stores, if the variable
        is smaller than the weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    variable: StoredVariable
    first: int = 0


@dataclasses.dataclass(frozen=True)
class ExportState:
    """Contents of the file.

    Attributes:
      base: Fingerprint of the checkpoint on which the deltas are based.
      sequence: Number of the last applied delta, or 0.
      link: `Meta.link` of the last applied delta, or an empty string.
      index: Checksum of the index of the SavedModel's variables.
      tables: Tables that deltas change.
      writer: Identifier of the writer that must write the next delta, or an
        empty string if a delta was applied. The tables of an export can contain
        changes after the last delta, which only this writer records.
      weights: Weights that deltas change.
    """

    base: str
    sequence: int
    link: str
    index: str
    tables: tuple[StoredTable, ...]
    writer: str = ""
    weights: tuple[StoredWeight, ...] = ()

    def variables(self) -> dict[str, StoredVariable]:
        """Returns all variables that deltas change, by checkpoint key."""
        variables = [
            variable
            for table in self.tables
            for variable in table.variables.values()
        ]
        variables += [weight.variable for weight in self.weights]
        return {variable.key: variable for variable in variables}

    def to_json(self) -> str:
        """Returns the contents of the file."""
        contents = {"format": _FORMAT, **dataclasses.asdict(self)}
        return (
            json.dumps({**contents, "seal": _seal(contents)}, indent=1) + "\n"
        )


def make_state(
    folder: str,
    position: chain.Position,
    tables: Sequence[StoredTable],
    weights: Sequence[StoredWeight] = (),
) -> ExportState:
    """Returns the state of a SavedModel that was written.

    Args:
      folder: Folder of the SavedModel.
      position: The last delta that the tables of the SavedModel contain.
      tables: Tables that deltas change.
      weights: Weights that deltas change.
    """
    return ExportState(
        position.base,
        position.sequence,
        position.link,
        index_checksum(folder),
        tuple(tables),
        position.writer,
        tuple(weights),
    )


def path_of(key: str) -> list[str]:
    """Returns the attributes that lead to the variable of a checkpoint key.

    >>> path_of("tables/0/.ATTRIBUTES/VARIABLE_VALUE")
    ['tables', '0']
    """
    # TensorFlow escapes dots and slashes in names of attributes.
    return [
        re.sub(r"\.[.S]", lambda match: "." if match[0] == ".." else "/", name)
        for name in key.removesuffix(VALUE).split("/")
    ]


def index_checksum(folder: str) -> str:
    """Returns the checksum of the index of a SavedModel's variables."""
    return chain.checksum(os.path.join(folder, f"{VARIABLES}.index"))


def read(folder: str) -> ExportState:
    """Reads the file of a SavedModel.

    Raises:
      ValueError: If the file does not exist, was truncated or modified, or
        belongs to another SavedModel.
    """
    path = os.path.join(folder, FILE)
    try:
        if storage.is_unfinished(folder, MODEL):
            raise ValueError(
                f"{folder!r} must be a complete SavedModel. Received: a folder "
                f"without {MODEL!r}, which is being written, or whose writer "
                "was killed."
            )
        text = storage.read_text(path)
    except OSError as error:
        raise ValueError(
            f"{folder!r} must be a SavedModel that was written with "
            "`tlm.export(..., delta_writer=writer)`, or marked by "
            f"`tlm.deltas.DeltaWriter.mark_export`. Received: {error}."
        ) from None
    state = _from_json(text, path)
    try:
        index = index_checksum(folder)
    except OSError as error:
        raise ValueError(
            f"{folder!r} must be a complete SavedModel. Received: {error}."
        ) from None
    if index != state.index:
        raise ValueError(
            f"{path!r} must describe the variables of its SavedModel. "
            "Received: a file of another SavedModel; the variables were "
            "written again after this file."
        )
    return state


def _from_json(text: str, path: str) -> ExportState:
    try:
        contents = json.loads(text)
        seal, version = contents.pop("seal"), contents["format"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path!r} must be a file that tf_layoutmap has written. Received: "
            "a truncated or modified file."
        ) from None
    if version != _FORMAT:
        raise ValueError(
            f"{path!r} must be of format {_FORMAT}, which this version "
            f"supports. Received: format {version!r}."
        )
    if seal != _seal(contents):
        raise ValueError(
            f"{path!r} must be a file that tf_layoutmap has written. Received: "
            "a modified file, whose seal does not match."
        )
    contents.pop("format")
    tables = tuple(
        StoredTable(
            **{
                **table,
                "variables": {
                    name: _stored_variable(variable)
                    for name, variable in table["variables"].items()
                },
            }
        )
        for table in contents.pop("tables")
    )
    weights = tuple(
        StoredWeight(
            **{
                **weight,
                "shape": tuple(weight["shape"]),
                "variable": _stored_variable(weight["variable"]),
            }
        )
        for weight in contents.pop("weights")
    )
    return ExportState(**contents, tables=tables, weights=weights)


def _stored_variable(fields: dict[str, Any]) -> StoredVariable:
    return StoredVariable(
        **{
            **fields,
            "shape": tuple(fields["shape"]),
            "blocks": tuple(fields["blocks"]),
        }
    )


def _seal(contents: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(contents, sort_keys=True).encode()
    ).hexdigest()
