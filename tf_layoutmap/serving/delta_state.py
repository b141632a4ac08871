"""Describes the tables of an export for the programs that apply deltas."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap.deltas import mark
from tf_layoutmap.deltas.served import export_state, storage
from tf_layoutmap.deltas.served.chain import Position
from tf_layoutmap.deltas.weights import name_of
from tf_layoutmap.deltas.writer import DeltaWriter
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.serving.endpoints import Exported
from tf_layoutmap.serving.stored_tables import StoredTable
from tf_layoutmap.vocabulary import checkpoint_files


def check_writer(writer: DeltaWriter, tables: Sequence[TableToExport]) -> None:
    """Checks that a writer writes changes of at least one table of a model.

    Raises:
      ValueError: If it does not.
      NotImplementedError: If tables share an open vocabulary.
    """
    writer._check_can_serve()
    if all(writer._prefix_of(table.owner) is None for table in tables):
        raise ValueError(
            "Argument `delta_writer` must be a writer of tables of the model, "
            f"which are {[table.name for table in tables]}. Received: a writer "
            "of other tables."
        )


def write(
    folder: str,
    writer: DeltaWriter,
    position: Position,
    tables: Sequence[StoredTable],
    module: Exported,
) -> None:
    """Writes the description into an exported SavedModel.

    A warning names the variables that deltas do not change.

    Args:
      folder: Folder of the SavedModel.
      writer: Writer of the deltas.
      position: The last delta of the writer before the export.
      tables: The stored tables.
      module: The exported module.
    """
    described: list[export_state.StoredTable] = []
    weights: list[export_state.StoredWeight] = []
    missing: list[str] = []
    for stored in tables:
        table = stored.table
        prefix = writer._prefix_of(table.owner)
        if prefix is not None:
            described.append(
                export_state.StoredTable(
                    table.name_in_owner,
                    prefix,
                    table.num_rows,
                    table.dim,
                    table.dtype,
                    _variables_of(stored, module),
                )
            )
        elif (label := writer._label_of(table.weight)) is not None:
            weights.append(
                export_state.StoredWeight(
                    label,
                    (table.num_rows, table.dim),
                    table.dtype,
                    _variable_of(stored),
                )
            )
        else:
            missing.append(table.name)
    for number, variable in enumerate(module.variables_of_model):
        label = writer._label_of(variable)
        if label is None:
            missing.append(name_of(variable))
        else:
            shape = tuple(variable.shape)
            dtype = tf.as_dtype(variable.dtype).name
            key = checkpoint_files.key_of("variables_of_model", str(number))
            weights.append(
                export_state.StoredWeight(
                    label,
                    shape,
                    dtype,
                    export_state.StoredVariable(key, shape, dtype),
                )
            )
    mark.warn_about_missing(missing)
    content = export_state.make_state(
        folder, position, described, weights
    ).to_json()
    path = os.path.join(folder, export_state.FILE)
    storage.make_folders(os.path.dirname(path))
    storage.write_text(path, content)


def _variables_of(
    stored: StoredTable, module: Exported
) -> dict[str, export_state.StoredVariable]:
    """Returns the descriptions of the variables of a table."""
    variables = {export_state.PARAMETERS: _variable_of(stored)}
    if stored.keys is not None:
        number = [id(variable) for variable in module.keys].index(
            id(stored.keys.variable)
        )
        variables[export_state.KEYS] = export_state.StoredVariable(
            checkpoint_files.key_of("keys", str(number)),
            stored.keys.shape,
            stored.keys.variable.dtype.name,
        )
    return variables


def _variable_of(stored: StoredTable) -> export_state.StoredVariable:
    """Returns the description of the variable that stores a table."""
    variable = stored.variable
    return export_state.StoredVariable(
        variable.key,
        (variable.num_rows, variable.form.width),
        variable.dtype.name,
        stored.start,
        variable.form.kind,
        variable.block_starts,
    )
