"""Finds the variables of a writer in a SavedModel, and describes them.

`DeltaWriter.mark_export` calls this module for SavedModels that `model.export`
or `tf.saved_model.save` has written. A table is found by its checkpoint key if
the SavedModel contains the embedding object, and otherwise by its values. A
weight is found by its name, and must have the current value.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tf_layoutmap._core import files, user_warnings
from tf_layoutmap.deltas import base as base_file
from tf_layoutmap.deltas.served import export_state, storage
from tf_layoutmap.deltas.served.chain import Position
from tf_layoutmap.deltas.served.changes import as_array
from tf_layoutmap.deltas.served.export_state import (
    StoredTable,
    StoredVariable,
    StoredWeight,
)
from tf_layoutmap.deltas.weights import (
    Weight,
    digest,
    name_of,
    variable_of,
)
from tf_layoutmap.embedding.table_variable import shards_of
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import checkpoint_files

# Variables that must be found. Lookups do not read the values of the other
# variables.
_REQUIRED = (export_state.PARAMETERS, export_state.KEYS)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A table whose changes are written to deltas.

    Attributes:
      name: Name of the table in the embedding.
      prefix: Prefix of the embedding's checkpoint keys in the base.
      variables: Variables of the table, by name.
    """

    name: str
    prefix: str
    variables: Mapping[str, Any]


def find_variables(
    path: str,
    tables: Mapping[str, Table],
    weights: Sequence[Weight],
    ignored: Collection[str],
) -> tuple[list[StoredTable], list[StoredWeight]]:
    """Returns the descriptions of all tables and weights of a SavedModel.

    A warning names the variables that are not found.

    Args:
      path: Folder of the SavedModel.
      tables: Tables of the writer.
      weights: Weights of the writer.
      ignored: Names of variables that are not used in lookups.

    Raises:
      ValueError: If the rows or keys of a table are not found once, or a
        variable has the name of a weight and another value.
    """
    saved = _SavedModel(path)
    marked = _find_tables(saved, tables)
    done = {
        variable.key
        for table in marked
        for variable in table.variables.values()
    }
    of_tables = {
        name_of(shard)
        for table in tables.values()
        for variable in table.variables.values()
        for shard in (variable, *getattr(variable, "variables", ()))
    }
    stored, missing = [], []
    pieces = [piece for weight in weights for piece in _pieces_of(weight)]
    for key in sorted(saved.variables()):
        name = saved.name_of(key)
        if key in done or name in of_tables or name in ignored:
            continue
        piece = saved.find_piece(key, pieces)
        if piece is None:
            missing.append(name or key.removesuffix(export_state.VALUE))
        else:
            stored.append(piece.as_stored(key))
    warn_about_missing(missing)
    return marked, stored


def warn_about_missing(names: Sequence[str]) -> None:
    """Warns that deltas do not change some variables of a SavedModel."""
    # `model.export` stores some variables twice.
    unique = sorted(set(names))
    if unique:
        user_warnings.warn(
            f"Deltas of this writer do not change {len(unique)} variables of "
            f"the SavedModel: {', '.join(unique[:5])}"
            + (", ..." if len(unique) > 5 else "")
            + ". If the variables are trained, the served model combines new "
            "rows with old weights: pass the model, not only its tables, to "
            "tlm.deltas.DeltaWriter."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    """A weight, or some of its rows, as a variable of a SavedModel.

    Attributes:
      weight: The weight.
      name: Name of the variable.
      shape: Shape of the variable.
      first: First row of the weight that the variable stores.
    """

    weight: Weight
    name: str
    shape: list[int]
    first: int = 0

    @functools.cached_property
    def digest(self) -> bytes:
        """Checksum of the current value."""
        value = self.weight.read()
        if self.shape:
            value = value[self.first : self.first + self.shape[0]]
        return digest(value)

    def as_stored(self, key: str) -> StoredWeight:
        variable = self.weight.variable
        dtype = tf.as_dtype(variable.dtype).name
        return StoredWeight(
            self.weight.label,
            tuple(variable.shape),
            dtype,
            StoredVariable(key, tuple(self.shape), dtype),
            self.first,
        )


def _pieces_of(weight: Weight) -> list[_Piece]:
    """Returns the variables in which a SavedModel can store a weight."""
    variable = variable_of(weight.variable)
    pieces = [_Piece(weight, name_of(variable), list(variable.shape))]
    if (
        isinstance(variable, ShardedVariable)
        and variable.partition.is_contiguous
    ):
        first = 0
        for shard in variable.variables:
            shape = [known_size(shard, axis) for axis in (0, 1)]
            pieces.append(_Piece(weight, name_of(shard), shape, first))
            first += shape[0]
    return pieces


def _find_tables(
    saved: _SavedModel, tables: Mapping[str, Table]
) -> list[StoredTable]:
    stored_tables = []
    for table in tables.values():
        variables = {}
        for name, variable in table.variables.items():
            key = saved.find(table.name, name, variable)
            if key is not None:
                variables[name] = StoredVariable(
                    key,
                    tuple(variable.shape),
                    tf.as_dtype(variable.dtype).name,
                )
        rows = table.variables[export_state.PARAMETERS]
        stored_tables.append(
            StoredTable(
                table.name,
                table.prefix,
                int(rows.shape[0]),
                int(rows.shape[1]),
                tf.as_dtype(rows.dtype).name,
                variables,
            )
        )
    return stored_tables


def write_state(
    path: str,
    position: Position,
    tables: Sequence[StoredTable],
    weights: Sequence[StoredWeight],
) -> None:
    """Writes the description into a SavedModel.

    Raises:
      OSError: If the file cannot be written.
    """
    content = export_state.make_state(path, position, tables, weights).to_json()
    file = os.path.join(path, export_state.FILE)
    storage.make_folders(os.path.dirname(file))
    files.write_text(file, content)


class _SavedModel:
    """The variables of a SavedModel on disk."""

    def __init__(self, path: str):
        """Reads the names of the variables.

        Raises:
          ValueError: If `path` is not a SavedModel.
        """
        self._path = path
        self._prefix = os.path.join(path, export_state.VARIABLES)
        try:
            self._reader = storage.open_checkpoint(self._prefix)
            self._names = _names_of_variables(path)
        except (tf.errors.OpError, OSError, ValueError) as error:
            raise ValueError(
                "Argument `path` must be the folder of a SavedModel. "
                f"Received: path={path!r} ({error})."
            ) from None
        self._shapes = self._reader.get_variable_to_shape_map()
        self._dtypes = self._reader.get_variable_to_dtype_map()

    def find(self, table: str, name: str, variable: Any) -> str | None:
        """Returns the checkpoint key of a variable of a table.

        Returns None if the variable is not required and is not found once.

        Args:
          table: Name of the table.
          name: Name of the variable in deltas.
          variable: The variable with the current value.

        Raises:
          ValueError: If the variable is required and is not found once.
        """
        fitting = [
            key
            for key, shape in self._shapes.items()
            if shape == list(variable.shape)
            and self._dtypes[key] == tf.as_dtype(variable.dtype)
        ]
        suffix = checkpoint_files.key_of(base_file.ATTRIBUTE, table, name)
        keys = [
            key
            for key in fitting
            if key == suffix or key.endswith(f"/{suffix}")
        ] or fitting
        keys = [key for key in keys if self._is_equal(key, variable)]
        if len(keys) > 1:
            own_name = str(getattr(variable, "name", "")).removesuffix(":0")
            keys = [key for key in keys if self._names.get(key) == own_name]
        if len(keys) == 1:
            return keys[0]
        if name not in _REQUIRED:
            return None
        raise ValueError(
            f"SavedModel {self._path!r} must contain one variable that is "
            f"equal to {name!r} of table {table!r}, shape "
            f"{list(variable.shape)}. Received: {len(keys)} of the "
            f"{len(fitting)} variables with this shape and dtype. "
            + (
                "Give the layers of the tables different names."
                if keys
                else "Export the model and mark it before the next training "
                "step."
            )
        )

    def variables(self) -> list[str]:
        """Returns the keys of all variables."""
        return [key for key in self._shapes if key.endswith(export_state.VALUE)]

    def name_of(self, key: str) -> str:
        """Returns the name of the variable of a key, or an empty string."""
        return self._names.get(key, "")

    def find_piece(self, key: str, pieces: Sequence[_Piece]) -> _Piece | None:
        """Returns the weight that a variable stores, or None.

        Raises:
          ValueError: If the weight with this name has another value, or there
            are several such weights.
        """
        name, shape = self.name_of(key), self._shapes[key]
        fitting = [
            piece
            for piece in pieces
            if piece.shape == shape
            and tf.as_dtype(piece.weight.variable.dtype) == self._dtypes[key]
        ]
        # During the export of a functional model, the name of a table begins
        # with the names of layers.
        named = [piece for piece in fitting if piece.name == name] or [
            piece for piece in fitting if name.endswith(f"/{piece.name}")
        ]
        if not named:
            return None
        stored = digest(as_array(self._reader.get_tensor(key)))
        equal = [piece for piece in named if piece.digest == stored]
        if len(equal) > 1:
            # TensorFlow gives unnamed variables the same name.
            equal = [
                piece
                for piece in equal
                if _ends_with(piece.weight.label, key)
                or _ends_with(key, piece.weight.label)
            ] or equal
        if len(equal) == 1:
            return equal[0]
        raise ValueError(
            f"SavedModel {self._path!r} must contain the current value of each "
            f"weight once. Received: {len(equal)} of {len(named)} weights with "
            f"the name {name!r} and shape {shape} have the stored value. "
            + (
                "Give the layers of the model different names."
                if equal
                else "Export the model and mark it before the next training "
                "step."
            )
        )

    def _is_equal(self, key: str, variable: Any) -> bool:
        """Returns whether a stored value is bitwise equal to a variable."""
        stored = np.asarray(self._reader.get_tensor(key))
        if stored.ndim == 2:
            return not base_file.differing_rows(
                stored, shards_of(variable)
            ).size
        return stored.tobytes() == np.asarray(variable.numpy()).tobytes()


def _ends_with(longer: str, shorter: str) -> bool:
    """Returns whether the path of a key ends with the path of another key."""
    longer, shorter = (
        f"/{key.removesuffix(export_state.VALUE)}" for key in (longer, shorter)
    )
    return longer.endswith(shorter)


def _names_of_variables(path: str) -> dict[str, str]:
    """Returns the names of the variables of a SavedModel, by checkpoint key."""
    saved_model = saved_model_pb2.SavedModel()
    saved_model.ParseFromString(
        storage.read_bytes(os.path.join(path, "saved_model.pb"))
    )
    nodes = saved_model.meta_graphs[0].object_graph_def.nodes
    names: dict[str, str] = {}
    todo: list[tuple[int, tuple[str, ...]]] = [(0, ())]
    visited = {0}
    while todo:
        number, way = todo.pop(0)
        if nodes[number].WhichOneof("kind") == "variable":
            names[checkpoint_files.key_of(*way)] = nodes[number].variable.name
        for child in nodes[number].children:
            if child.node_id not in visited:
                visited.add(child.node_id)
                todo.append((child.node_id, (*way, child.local_name)))
    return names
