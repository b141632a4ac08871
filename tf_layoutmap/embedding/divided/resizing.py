"""Resizing of vocabularies whose tables are sharded over processes.

All processes call `resize` together. Each process gathers the keys, counts and
steps of the vocabulary, and computes the new place of each key. The results are
equal in all processes. Each process then reads the rows of its new shard from
the processes that own them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tf_layoutmap.embedding import processes
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.embedding.divided import vocabulary as divided_vocabulary
from tf_layoutmap.embedding.divided.tables import DividedTable
from tf_layoutmap.embedding.host import resizing as host_resizing
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import conversion as vocabulary_conversion
from tf_layoutmap.vocabulary import state

Array = np.ndarray[Any, Any]
Variables = dict[str, dict[str, Any]]

# Maximum number of float32 values that a process requests at a time.
_MAX_VALUES = 2**18


def resize(
    spec: config.EmbeddingSpec,
    table: int,
    old: Mapping[str, Mapping[str, Any]],
    create: Callable[[config.EmbeddingSpec], Variables],
    group: processes.Processes,
    call: str,
) -> host_resizing.Resized:
    """Creates variables for tables with a new capacity, and copies the rows.

    The old variables are not changed. The memory of each process must hold the
    keys, counts and steps of the full vocabulary, its old and new shards, and a
    copy of the new shard of one variable at a time.

    Args:
      spec: Spec with the new capacity.
      table: Index of a table. All tables with the same vocabulary are resized.
      old: Old variables by name, by the name of the table.
      create: Function that creates the variables of this process for a spec.
      group: The processes.
      call: Name of the call, for messages.

    Returns:
      The resized tables. `dropped` has arrays only in the first process, and
      only if the vocabulary has `on_evict`.

    Raises:
      Exception: The error of this process. If an error occurs in only some
        processes, the other processes raise a RuntimeError.
    """
    sharing = open_specs.sharing(spec, table)
    owner = spec.tables[sharing[0]].name
    settings = spec.tables[table].vocabulary.settings
    vocabulary = _gather_vocabulary(old[owner], group, call)
    keys = vocabulary[state.KEYS].ravel()
    moved, variables = None, {}
    with group.failing_together(call):
        moved = vocabulary_conversion.move_vocabulary(
            vocabulary.__getitem__,
            settings,
            has_sketch=state.SKETCH in vocabulary,
        )
        variables = create(open_specs.spec_of_sharing(spec, table))
        for name, value in moved.vocabulary.items():
            variables[owner][name].assign(value)
    assert moved is not None
    vocabulary.clear()
    moved = dataclasses.replace(moved, vocabulary={})
    dropped = {}
    for number in sharing:
        name = spec.tables[number].name
        _copy_table(old[name], variables[name], moved, group, call)
        if settings.on_evict is not None:
            rows = _dropped_rows(old[name], moved.dropped, group, call)
            if group.is_first:
                dropped[number] = [keys[moved.dropped], *rows]
    return host_resizing.Resized(spec, variables, moved.conversion, dropped)


def discard_variables(old: Mapping[str, Any]) -> None:
    """Frees the memory of variables that a resize has replaced.

    Later reads of these variables raise errors.
    """
    for variable in old.values():
        if isinstance(variable, divided_vocabulary.DividedNumbers):
            # Steps that were traced before the resize read the variable before
            # the engine raises the error that says what to do.
            variable.replaced = True
        elif isinstance(variable, DividedTable):
            variable.replaced = True
            host_resizing.empty_shards([variable.block])
        else:
            host_resizing.empty_variables({"variable": variable})


def _gather_vocabulary(
    variables: Mapping[str, Any], group: processes.Processes, call: str
) -> dict[str, Array]:
    """Returns the variables of a vocabulary, gathered in all processes."""
    sharded = {
        name: variable
        for name, variable in variables.items()
        if name in state.NAMES and name != state.NUMBERS
    }
    values: dict[str, Array] = {}
    with group.failing_together(call):
        values = {name: one.empty_array() for name, one in sharded.items()}
    for name, one in sharded.items():
        one.copy_to(values[name])
    return {**values, state.NUMBERS: variables[state.NUMBERS].numpy()}


def _copy_table(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    moved: vocabulary_conversion.MovedRows,
    group: processes.Processes,
    call: str,
) -> None:
    """Copies the rows and slot variables of a table to new variables."""
    rows = new[embedding_tables.PARAMETERS]
    num_old_rows = old[embedding_tables.PARAMETERS].row_partition.num_rows
    # The last row, which unknown keys share, also moves.
    order = np.argsort(moved.targets, kind="stable")
    targets = np.append(moved.targets[order], moved.num_rows - 1)
    sources = np.append(moved.sources[order], num_old_rows - 1)
    # The position in `targets` at which each process begins, and the end.
    bounds = np.searchsorted(targets, rows.row_partition.offsets)
    own = slice(*np.searchsorted(targets, [rows.rows.start, rows.rows.stop]))
    for name, variable in new.items():
        if name == embedding_tables.ROUNDING_STEPS:
            variable.assign(old[name].read_value())
        elif isinstance(variable, DividedTable) and name not in state.NAMES:
            _copy_rows(
                old[name],
                variable,
                sources[own],
                targets[own] - rows.rows.start,
                int(np.diff(bounds).max()),
                group,
                call,
            )


def _copy_rows(
    old: DividedTable,
    new: DividedTable,
    sources: Array,
    places: Array,
    most_rows: int,
    group: processes.Processes,
    call: str,
) -> None:
    """Copies rows to the shard of this process; all other rows are zeros.

    Args:
      old: Table with the rows.
      new: Table whose shard is written.
      sources: Rows of `old` that this process needs.
      places: Row of each of them in the shard of this process.
      most_rows: Largest number of rows that a process needs.
      group: The processes.
      call: Name of the call, for messages.
    """
    values = np.zeros([0])
    with group.failing_together(call):
        values = np.zeros(
            [len(new.rows), known_size(new.block, 1)],
            new.dtype.as_numpy_dtype,
        )
    for first, rows in _read_rows(old, sources, most_rows):
        values[places[first : first + len(rows)]] = rows
    with group.failing_together(call):
        if new.rows:
            new.block.assign(values)


def _dropped_rows(
    old: Mapping[str, Any],
    dropped: Array,
    group: processes.Processes,
    call: str,
) -> list[Array]:
    """Returns rows and slot variables of dropped keys in the first process.

    In the other processes, the arrays have no rows.
    """
    found = []
    own = dropped if group.is_first else dropped[:0]
    for name, variable in old.items():
        if not isinstance(variable, DividedTable) or name in state.NAMES:
            continue
        values = np.zeros([0])
        with group.failing_together(call):
            values = np.empty(
                [len(own), known_size(variable.block, 1)],
                variable.dtype.as_numpy_dtype,
            )
        for first, rows in _read_rows(variable, own, len(dropped)):
            values[first : first + len(rows)] = rows
        found.append(values)
    return found


def _read_rows(
    table: DividedTable, ids: Array, most_rows: int
) -> Iterator[tuple[int, Array]]:
    """Yields rows in blocks, with the index of the first row of each block.

    All processes must call the function together.

    Args:
      table: The table.
      ids: Rows that this process needs.
      most_rows: Largest number of rows that a process needs.
    """
    size = max(1, _MAX_VALUES // known_size(table.block, 1))
    for first in range(0, most_rows, size):
        yield first, table.sparse_read(ids[first : first + size]).numpy()
