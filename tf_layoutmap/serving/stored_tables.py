"""The variables of an export, and the tables and keys that they hold.

`store_tables` assigns tables to variables, and `StoredKeys` holds the keys of
an open vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap.deltas.served import packing
from tf_layoutmap.deltas.served.packing import RowFormat
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.serving.stored_variable import StoredVariable
from tf_layoutmap.vocabulary import (
    bucket_layout,
    key_tensors,
    state,
    stock_find,
)


class StoredKeys:
    """A copy of the keys of a vocabulary in one unsharded variable.

    Attributes:
      variable: `[num_buckets, 8]` int64, in the layout of
        `Vocabulary.key_variable`.
    """

    def __init__(self, vocabulary: state.Vocabulary):
        """Initializes the copy with the current keys."""
        self._name = vocabulary.name
        self._num_buckets = int(vocabulary.key_variable.shape[0])
        self._kind_name = vocabulary.stats()["key_type"]
        with tf.device("CPU:0"):
            self.variable = tf.Variable(
                vocabulary.read_keys_by_row(),
                trainable=False,
                name="keys",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of `variable`."""
        return self._num_buckets, bucket_layout.KEYS_PER_BUCKET

    def rows_of(self, keys: tf.Tensor, kind: int) -> tf.Tensor:
        """Returns the row of each key; the last row for an unknown key.

        Args:
          keys: `[num_keys]` int64; hashes if the ids are strings.
          kind: Kind of the ids, one of `key_tensors.KINDS`.

        Raises:
          ValueError: If the table has keys of a different kind.
        """
        if self._kind_name not in (None, key_tensors.KINDS[kind]):
            raise ValueError(
                f"The ids of table {self._name!r} must be {self._kind_name}, "
                f"as those before. Received: {key_tensors.KINDS[kind]}."
            )
        return stock_find.find_rows(self.variable, self._num_buckets, keys)


def copy_keys(tables: Sequence[TableToExport]) -> list[StoredKeys | None]:
    """Returns the keys of each table, or None for a table without keys.

    Tables that share a vocabulary share one copy of its keys.
    """
    vocabularies = {id(table.vocabulary): table.vocabulary for table in tables}
    copies = {
        key: None if vocabulary is None else StoredKeys(vocabulary)
        for key, vocabulary in vocabularies.items()
    }
    return [copies[id(table.vocabulary)] for table in tables]


def id_type(vocabulary: state.Vocabulary) -> tf.DType:
    """Returns the dtype of a table's ids; int64 for a table without keys."""
    is_strings = (
        vocabulary.stats()["key_type"]
        == (key_tensors.KINDS[key_tensors.STRINGS])
    )
    return tf.string if is_strings else tf.int64


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTable:
    """A table that is stored in consecutive rows of a variable.

    Attributes:
      table: The table.
      variable: The variable with the rows.
      start: Row of the variable that contains row 0 of the table.
      keys: The keys of the table, or None.
    """

    table: TableToExport
    variable: StoredVariable
    start: int
    keys: StoredKeys | None = None


def store_tables(
    tables: Sequence[TableToExport],
    kinds: Sequence[str],
    keys: Sequence[StoredKeys | None],
    *,
    fuse: bool,
) -> list[StoredTable]:
    """Creates the variables of an export, and assigns the tables to them.

    Args:
      tables: The tables.
      kinds: Requested storage type of each table, one of `packing.KINDS`.
      keys: Keys of each table, or None.
      fuse: Whether tables with the same format share a variable. If False, each
        table has a separate variable.

    Returns:
      The stored tables, in the order of `tables`.
    """
    formats = [
        packing.choose(kind, table.dtype, table.dim)
        for kind, table in zip(kinds, tables)
    ]
    num_rows: dict[RowFormat | int, int] = {}
    starts: list[int] = []
    # Tables with the same group share a variable.
    groups = formats if fuse else range(len(tables))
    for group, table in zip(groups, tables):
        starts.append(num_rows.get(group, 0))
        num_rows[group] = starts[-1] + table.num_rows
    form_of = dict(zip(groups, formats))
    variables = {
        group: StoredVariable(f"tables_{index}", size, form_of[group])
        for index, (group, size) in enumerate(num_rows.items())
    }
    return [
        StoredTable(table, variables[group], start, keys_of_table)
        for table, group, start, keys_of_table in zip(
            tables, groups, starts, keys
        )
    ]
