"""Describes the tables of an export for the programs that apply deltas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.deltas import mark
from tf_layoutmap.deltas.served import export_state, storage
from tf_layoutmap.deltas.served.chain import Position
from tf_layoutmap.deltas.weights import name_of
from tf_layoutmap.deltas.writer import DeltaWriter
from tf_layoutmap.embedding import checkpointing
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.serving import stored_tables
from tf_layoutmap.serving.sources import Source
from tf_layoutmap.serving.subjects import Holder


def check_writer(writer: DeltaWriter, holders: Sequence[Holder]) -> None:
    """Checks that a writer writes changes of at least one table of a model.

    Raises:
      ValueError: If it does not.
      NotImplementedError: If tables share an open vocabulary.
    """
    writer._check_can_serve()
    if all(writer._prefix_of(holder.owner) is None for holder in holders):
        names = [source.name for one in holders for source in one.sources]
        raise ValueError(
            "Argument `delta_writer` must be a writer of tables of the model, "
            f"which are {names}. Received: a writer of other tables."
        )


def write(
    folder: str,
    writer: DeltaWriter,
    position: Position,
    holders: Sequence[Holder],
    tables: Sequence[stored_tables.StoredTable],
    variables: Sequence[Any],
) -> None:
    """Writes the description into an exported SavedModel.

    A warning names the variables that deltas do not change.

    Args:
      folder: Folder of the SavedModel.
      writer: Writer of the deltas.
      position: The last delta of the writer before the export.
      holders: Holders of the tables.
      tables: Stored tables of all holders, in order.
      variables: `Exported.variables_of_model`.
    """
    found: list[export_state.StoredTable] = []
    weights: list[export_state.StoredWeight] = []
    missing: list[str] = []
    rest = iter(tables)
    # Number of key variables of the previous holders.
    num_keys = 0
    for holder in holders:
        own = [next(rest) for _ in holder.sources]
        prefix = writer._prefix_of(holder.owner)
        if prefix is not None:
            found += _tables_of(holder, own, prefix, num_keys)
        else:
            for source, one in zip(holder.sources, own):
                label = writer._label_of(source.direct_reads())
                if label is None:
                    missing.append(source.name)
                else:
                    weights.append(_weight_of(label, source, one))
        num_keys += len(holder.keys)
    for number, variable in enumerate(variables):
        label = writer._label_of(variable)
        if label is None:
            missing.append(name_of(variable))
        else:
            shape = tuple(variable.shape)
            dtype = tf.as_dtype(variable.dtype).name
            key = checkpointing.key_of("variables_of_model", str(number))
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
        folder, position, found, weights
    ).to_json()
    path = os.path.join(folder, export_state.FILE)
    storage.make_folders(os.path.dirname(path))
    storage.write_text(path, content)


def _tables_of(
    holder: Holder,
    stored: Sequence[stored_tables.StoredTable],
    prefix: str,
    num_keys: int,
) -> list[export_state.StoredTable]:
    """Returns the descriptions of the tables of an embedding."""
    owner: Any = holder.owner
    # `Exported.keys` contains the keys of all tables with open vocabularies, in
    # the order of the tables.
    keys = iter(enumerate(holder.keys, num_keys))
    found = []
    for table, source, one in zip(
        LayerAccess(owner).spec.tables, holder.sources, stored
    ):
        variables = {export_state.PARAMETERS: _variable_of(one)}
        if table.vocabulary is not None:
            number, of_table = next(keys)
            variables[export_state.KEYS] = export_state.StoredVariable(
                checkpointing.key_of("keys", str(number)),
                of_table.shape,
                of_table.variable.dtype.name,
            )
        found.append(
            export_state.StoredTable(
                table.name,
                prefix,
                source.num_rows,
                source.dim,
                source.dtype,
                variables,
            )
        )
    return found


def _variable_of(
    stored: stored_tables.StoredTable,
) -> export_state.StoredVariable:
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


def _weight_of(
    label: str, source: Source, stored: stored_tables.StoredTable
) -> export_state.StoredWeight:
    """Returns the description of a table that is not in an embedding."""
    return export_state.StoredWeight(
        label,
        (source.num_rows, source.dim),
        source.dtype,
        _variable_of(stored),
    )
