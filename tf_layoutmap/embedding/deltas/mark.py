"""Finds the tables of a writer in a SavedModel, and describes them.

`DeltaWriter.mark_export` calls this module for SavedModels that `model.export`
or `tf.saved_model.save` has written. A table is found by its checkpoint key if
the SavedModel contains the embedding object, and otherwise by its values.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tf_layoutmap._core import files
from tf_layoutmap.embedding import checkpointing
from tf_layoutmap.embedding.deltas import base as base_file
from tf_layoutmap.serving_deltas import export_state
from tf_layoutmap.serving_deltas.chain import Position
from tf_layoutmap.serving_deltas.export_state import StoredTable, StoredVariable

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


def find_tables(path: str, tables: Mapping[str, Table]) -> list[StoredTable]:
    """Returns the descriptions of all tables.

    Args:
      path: Folder of the SavedModel.
      tables: Tables of the writer.

    Raises:
      ValueError: If the rows or keys of a table are not found once.
    """
    saved = _SavedModel(path)
    found = []
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
        found.append(
            StoredTable(
                table.name,
                table.prefix,
                int(rows.shape[0]),
                int(rows.shape[1]),
                tf.as_dtype(rows.dtype).name,
                variables,
            )
        )
    return found


def write_state(path: str, position: Position, tables: list[StoredTable]):
    """Writes the description into a SavedModel.

    Raises:
      OSError: If the file cannot be written.
    """
    content = export_state.make_state(path, position, tables).to_json()
    file = os.path.join(path, export_state.FILE)
    os.makedirs(os.path.dirname(file), exist_ok=True)
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
            self._reader = tf.train.load_checkpoint(self._prefix)
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
        suffix = checkpointing.key_of(base_file.ATTRIBUTE, table, name)
        found = [
            key
            for key in fitting
            if key == suffix or key.endswith(f"/{suffix}")
        ] or fitting
        found = [key for key in found if self._is_equal(key, variable)]
        if len(found) > 1:
            own_name = str(getattr(variable, "name", "")).removesuffix(":0")
            found = [key for key in found if self._names.get(key) == own_name]
        if len(found) == 1:
            return found[0]
        if name not in _REQUIRED:
            return None
        raise ValueError(
            f"SavedModel {self._path!r} must contain one variable that is "
            f"equal to {name!r} of table {table!r}, shape "
            f"{list(variable.shape)}. Received: {len(found)} of the "
            f"{len(fitting)} variables with this shape and dtype. "
            + (
                "Give the layers of the tables different names."
                if found
                else "Export the model and mark it before the next training "
                "step."
            )
        )

    def _is_equal(self, key: str, variable: Any) -> bool:
        """Returns whether a stored value is bitwise equal to a variable."""
        stored = np.asarray(self._reader.get_tensor(key))
        if stored.ndim == 2:
            return not base_file.differing_rows(stored, variable).size
        return stored.tobytes() == np.asarray(variable.numpy()).tobytes()


def _names_of_variables(path: str) -> dict[str, str]:
    """Returns the names of the variables of a SavedModel, by checkpoint key."""
    found = saved_model_pb2.SavedModel()
    with open(os.path.join(path, "saved_model.pb"), "rb") as file:
        found.ParseFromString(file.read())
    nodes = found.meta_graphs[0].object_graph_def.nodes
    names: dict[str, str] = {}
    todo: list[tuple[int, tuple[str, ...]]] = [(0, ())]
    visited = {0}
    while todo:
        number, way = todo.pop(0)
        if nodes[number].WhichOneof("kind") == "variable":
            names[checkpointing.key_of(*way)] = nodes[number].variable.name
        for child in nodes[number].children:
            if child.node_id not in visited:
                visited.add(child.node_id)
                todo.append((child.node_id, (*way, child.local_name)))
    return names
