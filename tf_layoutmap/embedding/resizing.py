"""Resizing of tables with open vocabularies.

`resize` creates new variables for a table with another capacity, and copies the
rows to these variables. If tables are sharded over processes, all processes
call `resize` together. Each process reads the keys, counts and steps of the
full vocabulary, and computes the new row of each key. The results are equal in
all processes. Each process then reads the rows of its new parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding import processes, tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.embedding.table_store import TableStore, Variables
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import conversion as vocabulary_conversion
from tf_layoutmap.vocabulary import parts, state

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
    """The result of resizing a table.

    Attributes:
      spec: Spec of the embedding with the new capacity.
      variables: New variables by name, by the name of the table. The dict
        contains all tables that share the vocabulary.
      conversion: Numbers of kept and dropped keys.
      dropped: Arrays with the dropped keys, their rows and the values of their
        slot variables, by index of the table. Empty if the vocabulary has no
        `on_evict`, and in all processes except the first one.
    """

    spec: config.EmbeddingSpec
    variables: Variables
    conversion: state.Conversion
    dropped: dict[int, list[Array]]


def spec_with_capacity(
    spec: config.EmbeddingSpec,
    table: int,
    capacity: int,
) -> config.EmbeddingSpec:
    """Returns the spec with a new capacity for one vocabulary.

    Raises:
      TypeError: If `OpenVocabulary` does not accept the type of `capacity`.
      ValueError: If `OpenVocabulary` does not accept the value of `capacity`.
    """
    settings = dataclasses.replace(
        spec.tables[table].vocabulary.settings, capacity=capacity
    )
    new_tables = list(spec.tables)
    for number in open_specs.sharing(spec, table):
        old = new_tables[number]
        new_tables[number] = dataclasses.replace(
            old,
            num_rows=settings.num_rows,
            vocabulary=dataclasses.replace(old.vocabulary, settings=settings),
        )
    return dataclasses.replace(spec, tables=tuple(new_tables))


def resize(
    store: TableStore, spec: config.EmbeddingSpec, table: int, call: str
) -> Resized:
    """Creates variables for tables with a new capacity, and copies the rows.

    The old variables are not changed. The memory must hold the keys of the full
    vocabulary, the old and the new variables, and a copy of one new variable at
    a time.

    Args:
      store: Store of the old variables.
      spec: Spec with the new capacity.
      table: Index of a table. All tables with the same vocabulary are resized.
      call: Name of the call, for messages.

    Raises:
      Exception: The error of this process. If an error occurs in only some
        processes, the other processes raise a RuntimeError.
    """
    group = store.group
    owner, *_ = sharing = open_specs.sharing(spec, table)
    names = [spec.tables[number].name for number in sharing]
    settings = spec.tables[table].vocabulary.settings
    old = store.variables
    vocabulary = _read_vocabulary(store, names[0], call)
    keys = vocabulary[parts.KEYS].ravel()
    new = moved = None
    with processes.failing_together(group, call):
        moved = vocabulary_conversion.move_vocabulary(
            vocabulary.__getitem__,
            settings,
            has_sketch=parts.SKETCH in vocabulary,
        )
        of_sharing = open_specs.spec_of_sharing(spec, table)
        with _scope_of(old[names[0]]):
            new = store.with_tables(of_sharing, store.create(of_sharing))
        for name, value in moved.vocabulary.items():
            new.variables[names[0]][name].assign(value)
    assert new is not None and moved is not None
    vocabulary.clear()
    moved = dataclasses.replace(moved, vocabulary={})
    dropped = {}
    for place, number in enumerate(sharing):
        _copy_table(old[names[place]], new, place, moved, call)
        if settings.on_evict is not None:
            rows = _dropped_rows(store, number, moved.dropped, call)
            if group is None or group.is_first:
                dropped[number] = [keys[moved.dropped], *rows]
    return Resized(spec, new.variables, moved.conversion, dropped)


def _read_vocabulary(
    store: TableStore, table: str, call: str
) -> dict[str, Array]:
    """Returns the full variables of a vocabulary, in all processes."""
    variables = {
        name: variable
        for name, variable in store.variables[table].items()
        if name in parts.NAMES
    }
    return store.read_together(variables, call)


def _scope_of(variables: Mapping[str, Any]) -> Any:
    """Returns the strategy scope in which the variables were created."""
    shard = tables.shards_of(variables[tables.PARAMETERS])[0]
    strategy = getattr(shard, "_distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _copy_table(
    old: Mapping[str, Any],
    new: TableStore,
    table: int,
    moved: vocabulary_conversion.MovedRows,
    call: str,
) -> None:
    """Copies the rows and slot variables of a table to new variables."""
    variables = new.variables[new.spec.tables[table].name]
    num_old_rows = int(old[tables.PARAMETERS].shape[0])
    # The last row, which unknown keys share, also moves.
    order = np.argsort(moved.targets, kind="stable")
    targets = np.append(moved.targets[order], moved.num_rows - 1)
    sources = np.append(moved.sources[order], num_old_rows - 1)
    most_rows = max(
        int(np.diff(np.searchsorted(targets, [rows.start, rows.stop]))[0])
        for rows in new.rows_by_process(table)
    )
    local = new.local_rows(table)
    places = slice(*np.searchsorted(targets, [local.start, local.stop]))
    for name, variable in variables.items():
        if name == tables.ROUNDING_STEPS:
            variable.assign(old[name].numpy())
        elif name not in parts.NAMES:
            # Rows without a key are zeros.
            values = _rows_together(
                new,
                old[name],
                len(local),
                sources[places],
                most_rows,
                call,
                targets[places] - local.start,
            )
            with processes.failing_together(new.group, call):
                new.assign_local(variable, values)


def _dropped_rows(
    store: TableStore, table: int, dropped: Array, call: str
) -> list[Array]:
    """Returns rows and slot variables of dropped keys in the first process.

    In the other processes, the arrays have no rows.
    """
    spec = store.spec.tables[table]
    group = store.group
    rows = dropped if group is None or group.is_first else dropped[:0]
    return [
        _rows_together(
            store,
            store.variables[spec.name][name],
            len(rows),
            rows,
            len(dropped),
            call,
            np.arange(len(rows)),
        )
        for name in (
            tables.PARAMETERS,
            *(slot.name for slot in spec.slots),
        )
    ]


def _rows_together(
    store: TableStore,
    variable: Any,
    num_rows: int,
    ids: Array,
    most_rows: int,
    call: str,
    places: Array,
) -> Array:
    """Reads rows of a variable into an array of zeros.

    Args:
      store: Store of the tables.
      variable: The variable.
      num_rows: Number of rows of the array.
      ids: Rows to read, which can differ between processes.
      most_rows: Largest number of rows that a process reads.
      call: Name of the call, for messages.
      places: Index of each row in the array.
    """
    values = np.zeros([0])
    with processes.failing_together(store.group, call):
        values = np.zeros(
            [num_rows, known_size(variable, 1)],
            tf.as_dtype(variable.dtype).as_numpy_dtype,
        )
    for first, rows in _read_rows(store, variable, ids, most_rows):
        values[places[first : first + len(rows)]] = rows
    return values


def _read_rows(
    store: TableStore, variable: Any, ids: Array, most_rows: int
) -> Iterator[tuple[int, Array]]:
    """Yields rows in blocks, with the index of the first row of each block.

    All processes must call the function together.
    """
    size = max(1, store.values_per_read // known_size(variable, 1))
    for first in range(0, most_rows, size):
        yield first, variable.sparse_read(ids[first : first + size]).numpy()
