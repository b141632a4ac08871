"""Converts deltas to new values of the variables of a SavedModel.

`read_changes` reads several deltas at once. A row that several deltas contain
is written only once, with its last values.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import chain, export_state, packing, storage
from .chain import Delta
from .export_state import (
    ExportState,
    StoredTable,
    StoredVariable,
    StoredWeight,
)

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class VariableChanges:
    """New values of a part of a variable.

    Attributes:
      variable: The variable of the SavedModel.
      view: Shape in which the changed parts of the variable are rows.
      rows: `[num_rows]` int64, rows of the view, without duplicates.
      values: `[num_rows, ...]`, new values of the rows, in the dtype of the
        variable.
    """

    variable: StoredVariable
    view: tuple[int, ...]
    rows: Array
    values: Array

    @property
    def is_rows(self) -> bool:
        """Whether the rows of the view are rows of the variable."""
        return self.view == (-1, *self.variable.shape[1:])

    @property
    def is_lanes(self) -> bool:
        """Whether the rows of the view are single elements of buckets."""
        return self.view == (-1,)

    def apply_to(self, value: Array) -> Array:
        """Returns a copy of the value of the variable with the changes."""
        changed = np.array(value).reshape(self.view)
        changed[self.rows] = self.values
        return changed.reshape(value.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class TableChanges:
    """New values of one table.

    Attributes:
      table: The table of the SavedModel.
      variables: Changes by the name of the variable in deltas.
    """

    table: StoredTable
    variables: dict[str, VariableChanges]


@dataclasses.dataclass(frozen=True, eq=False)
class Changes:
    """The changes of all pending deltas.

    Attributes:
      state: State of the SavedModel after the changes; `index` is the old one.
      tables: Changes of each table; empty without pending deltas.
      weights: New values of the weights that changed.
    """

    state: ExportState
    tables: tuple[TableChanges, ...]
    weights: tuple[VariableChanges, ...] = ()

    def by_key(self) -> dict[str, list[VariableChanges]]:
        """Returns all changes by the checkpoint key of the variable."""
        changes_by_key: dict[str, list[VariableChanges]] = {}
        for table in self.tables:
            for change in table.variables.values():
                changes_by_key.setdefault(change.variable.key, []).append(
                    change
                )
        for change in self.weights:
            changes_by_key.setdefault(change.variable.key, []).append(change)
        return changes_by_key


def read_changes(
    state: ExportState,
    deltas: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> Changes:
    """Reads and checks all deltas that follow the last applied delta.

    Args:
      state: State of the SavedModel.
      deltas: Directory of the deltas, or a list of paths of deltas.

    Raises:
      ValueError: If a delta is missing, is repeated, has another base or
        another predecessor, was truncated or modified, or does not match the
        tables and weights of the SavedModel.
    """
    if isinstance(deltas, str | os.PathLike):
        directory = os.fspath(deltas)
        paths = chain.pending_paths(directory, state.sequence)
        if state.sequence:
            chain.check_applied(directory, state.sequence, state.link)
    else:
        paths = [os.fspath(path) for path in deltas]
    new_deltas = chain.read_chain(
        paths,
        state.base,
        "of the model",
        state.sequence,
        state.link,
        state.writer,
    )
    if not new_deltas:
        return Changes(state, ())
    last = new_deltas[-1].meta
    return Changes(
        dataclasses.replace(
            state, sequence=last.sequence, link=last.link, writer=""
        ),
        tuple(_table_changes(table, new_deltas) for table in state.tables),
        _weight_changes(state, new_deltas),
    )


def as_array(value: Any) -> Array:
    """Converts the value of a tensor to an array.

    The value of a scalar string is a Python object, which NumPy would convert
    to a string of fixed length without trailing zeros.
    """
    if isinstance(value, bytes):
        return np.array(value, dtype=object)
    return np.asarray(value)


def last_occurrences(indices: Sequence[Array]) -> tuple[Array, Array]:
    """Returns the unique values of arrays, and their last positions.

    >>> values, at = last_occurrences([np.array([2, 5]), np.array([1, 5])])
    >>> values.tolist(), at.tolist()
    ([1, 2, 5], [2, 0, 3])

    Args:
      indices: Arrays of integers, `[num_indices]`.

    Returns:
      The unique values in ascending order, and for each value its last position
      in the concatenated arrays.
    """
    all_indices = np.concatenate(indices)
    values, reversed_at = np.unique(all_indices[::-1], return_index=True)
    return values, len(all_indices) - 1 - reversed_at


class _Reader:
    """Reads the tensors of one table from several deltas."""

    def __init__(self, table: StoredTable, deltas: Sequence[Delta]):
        self._table = table
        self._deltas = deltas
        self._labels = [_label_of(table, delta) for delta in deltas]
        self._readers = [
            storage.open_checkpoint(delta.tensors) for delta in deltas
        ]

    def read(
        self, name: str, dtype: str, inner_shape: tuple[int, ...] | None
    ) -> list[Array]:
        """Returns a tensor of each delta.

        Args:
          name: Name of the variable.
          dtype: Required dtype.
          inner_shape: Required shape without the first dimension; None for any
            shape.

        Raises:
          ValueError: If a tensor is missing, or has another dtype or shape.
        """
        values = []
        for delta, label, reader in zip(
            self._deltas, self._labels, self._readers
        ):
            key = f"{label}/{name}"
            where = f"tensor {key!r} of delta {delta.path!r}"
            if not reader.has_tensor(key):
                raise ValueError(
                    f"Table {self._table.name!r} of the model requires the "
                    f"{where}. Received: a delta without this tensor."
                )
            value = storage.read_tensor(reader, delta.tensors, key)
            if value.dtype.name != dtype:
                raise ValueError(
                    f"Table {self._table.name!r} of the model requires values "
                    f"of dtype {dtype}. Received: {value.dtype.name} ({where})."
                )
            if inner_shape is not None and value.shape[1:] != inner_shape:
                raise ValueError(
                    f"Table {self._table.name!r} of the model requires values "
                    f"of shape {['n', *inner_shape]}. Received: shape "
                    f"{list(value.shape)} ({where})."
                )
            values.append(value)
        return values


def _label_of(table: StoredTable, delta: Delta) -> str:
    """Returns the name of a table in a delta.

    Raises:
      ValueError: If the delta does not contain the table.
    """
    for label in delta.meta.tables:
        if delta.meta.in_base(label) == (table.prefix, table.name):
            return label
    raise ValueError(
        f"Each delta must contain table {table.name!r} of the model. Received: "
        f"tables {sorted(delta.meta.tables)} (delta {delta.path!r})."
    )


def _table_changes(table: StoredTable, deltas: Sequence[Delta]) -> TableChanges:
    reader = _Reader(table, deltas)
    all_rows = reader.read("rows", "int64", ())
    rows, at = last_occurrences(all_rows)
    if rows.size and (rows[0] < 0 or rows[-1] >= table.num_rows):
        raise ValueError(
            f"Rows of table {table.name!r} must be in [0, {table.num_rows}). "
            f"Received: rows {rows[0]} to {rows[-1]} (deltas "
            f"{deltas[0].path!r} to {deltas[-1].path!r})."
        )

    def read_rows(name: str, dtype: str, *inner: int) -> Array:
        """Returns the last values of each row."""
        values = reader.read(name, dtype, inner)
        for delta, array, delta_rows in zip(deltas, values, all_rows):
            if len(array) != len(delta_rows):
                raise ValueError(
                    f"Tensor {name!r} of table {table.name!r} must have "
                    f"{len(delta_rows)} rows. Received: {len(array)} (delta "
                    f"{delta.path!r})."
                )
        return _selected(values, at)

    changes = {}
    for name, variable in table.variables.items():
        if name == export_state.PARAMETERS:
            values = _pack(
                table, variable, rows, read_rows(name, table.dtype, table.dim)
            )
        elif name in export_state.LANES:
            values = read_rows(name, variable.dtype)
        elif name == export_state.SKETCH:
            changes[name] = _sketch_changes(reader, variable)
            continue
        elif name in export_state.WHOLE:
            changes[name] = VariableChanges(
                variable,
                (1, *variable.shape),
                np.zeros([1], np.int64),
                _checked_whole(reader, name, variable)[np.newaxis],
            )
            continue
        else:
            values = read_rows(name, variable.dtype, *variable.shape[1:])
        changes[name] = _row_changes(name, variable, rows, values)
    return TableChanges(table, changes)


def _selected(values: Sequence[Array], at: Array) -> Array:
    """Returns the rows `at` of the concatenated arrays.

    If these are all rows in their order, as for a single delta with ascending
    rows, the function does not copy them.
    """
    if len(values) == 1 and len(at) == len(values[0]):
        if np.array_equal(at, np.arange(len(at))):
            return values[0]
    return np.take(np.concatenate(values), at, axis=0)


def _row_changes(
    name: str, variable: StoredVariable, rows: Array, values: Array
) -> VariableChanges:
    if name not in export_state.LANES:
        view = (-1, *variable.shape[1:])
        return VariableChanges(variable, view, rows + variable.start, values)
    # The row that unknown keys share has no lane.
    is_lane = rows < int(np.prod(variable.shape, dtype=np.int64))
    return VariableChanges(variable, (-1,), rows[is_lane], values[is_lane])


def _sketch_changes(
    reader: _Reader, variable: StoredVariable
) -> VariableChanges:
    cells = export_state.SKETCH_CELLS
    rows, at = last_occurrences(
        reader.read(export_state.SKETCH_ROWS, "int64", ())
    )
    values = reader.read(export_state.SKETCH, variable.dtype, (cells,))
    return VariableChanges(
        variable, (-1, cells), rows, np.concatenate(values)[at]
    )


def _checked_whole(
    reader: _Reader, name: str, variable: StoredVariable
) -> Array:
    value = reader.read(name, variable.dtype, None)[-1]
    if value.shape != variable.shape:
        raise ValueError(
            f"Variable {name!r} of the model requires shape "
            f"{list(variable.shape)}. Received: {list(value.shape)}."
        )
    return value


def _weight_changes(
    state: ExportState, deltas: Sequence[Delta]
) -> tuple[VariableChanges, ...]:
    """Returns the last values of all weights that changed.

    Raises:
      ValueError: If the weights of the model and of the deltas do not match.
    """
    _check_weights(state, deltas)
    changed = [
        (
            delta,
            storage.open_checkpoint(delta.tensors),
            {
                label
                for label, weight in delta.meta.weights.items()
                if weight["is_changed"]
            },
        )
        for delta in reversed(deltas)
    ]
    weight_changes = []
    for weight in state.weights:
        for delta, reader, labels in changed:
            if weight.name in labels:
                value = _read_weight(weight, delta, reader)
                weight_changes.append(_changes_of_weight(weight, value))
                break
    return tuple(weight_changes)


def _check_weights(state: ExportState, deltas: Sequence[Delta]) -> None:
    """Checks that each delta contains all weights of a SavedModel.

    Raises:
      ValueError: If the rows of a delta would be combined with weights of
        another training step.
    """
    for delta in deltas:
        labels = delta.meta.weights
        missing = [
            weight.name for weight in state.weights if weight.name not in labels
        ]
        if missing:
            raise ValueError(
                "Each delta must record all weights of the model. Received: a "
                f"delta without {missing[:3]} ({len(missing)} of "
                f"{len(state.weights)} weights; delta {delta.path!r}). "
                "Pass the model to tlm.deltas.DeltaWriter, or export the model "
                "again with the writer of this delta."
            )


def _read_weight(weight: StoredWeight, delta: Delta, reader: Any) -> Array:
    """Reads the value of a weight from a delta.

    Raises:
      ValueError: If the value is missing or has another dtype or shape.
    """
    key = chain.weight_tensor(weight.name)
    where = f"tensor {key!r} of delta {delta.path!r}"
    if not reader.has_tensor(key):
        raise ValueError(f"The deltas must have {where}. Received: none.")
    value = as_array(reader.get_tensor(key))
    # The values of strings are Python objects.
    dtype = "string" if value.dtype == object else value.dtype.name
    if dtype != weight.dtype or value.shape != weight.shape:
        raise ValueError(
            f"Weight {weight.name!r} of the model requires dtype "
            f"{weight.dtype} and shape {list(weight.shape)}. Received: "
            f"{dtype}, {list(value.shape)} ({where})."
        )
    return value


def _changes_of_weight(weight: StoredWeight, value: Array) -> VariableChanges:
    variable = weight.variable
    if variable.kind:
        # The SavedModel stores the weight like a table of an embedding.
        form = packing.RowFormat(variable.kind, weight.shape[1])
        return VariableChanges(
            variable,
            (-1, *variable.shape[1:]),
            np.arange(len(value), dtype=np.int64) + variable.start,
            _pack_rows(weight.name, form, value, np.arange(len(value))),
        )
    if variable.shape != weight.shape:
        value = value[weight.first : weight.first + variable.shape[0]]
    return VariableChanges(
        variable,
        (1, *variable.shape),
        np.zeros([1], np.int64),
        value[np.newaxis],
    )


def _pack(
    table: StoredTable, variable: StoredVariable, rows: Array, values: Array
) -> Array:
    """Converts rows to the format of the SavedModel.

    Raises:
      ValueError: If the format cannot represent a row.
    """
    return _pack_rows(table.name, table.row_format(variable), values, rows)


def _pack_rows(
    name: str, form: packing.RowFormat, values: Array, rows: Array
) -> Array:
    try:
        return packing.pack(values, form)
    except packing.UnfitRowError as error:
        raise ValueError(
            f"Table {name!r} of the model is stored as {form.kind}, and "
            f"row {rows[error.row]} of the deltas {error.reason}. Export the "
            'table with row_format="float32".'
        ) from error
