"""The rows of tables on a TPU that a delta contains.

A TPU updates its rows and does not record which rows change. All rows may
therefore have changed since the previous delta, and the writer of deltas
compares the host copies of the tables with its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.changes import (
    ChangedValues,
    PartOfRows,
    TableChanges,
)
from tf_layoutmap.embedding.table_store import TableStore

Array = np.ndarray[Any, Any]


class HostCopyChanges:
    """Implementation of `EngineChanges` for the host copies of tables.

    Attributes:
      num_replaced: Number of times that the host copies were updated.
      is_current: Whether this record is the last that was created.
    """

    def __init__(self, store: TableStore):
        """Stores the host copies.

        Args:
          store: Store of the host copies.
        """
        self.num_replaced = 0
        self.is_current = True
        self._store = store

    def take(self, also: Mapping[str, Array]) -> dict[str, TableChanges]:
        """Copies rows of the host copies; see `EngineChanges`.

        Args:
          also: The rows of each table that differ from the files.

        Raises:
          RuntimeError: If a later record exists.
        """
        if not self.is_current:
            raise RuntimeError(
                "An embedding can have only one writer at a time. Received: a "
                "call of `write` after another tlm.deltas.DeltaWriter was "
                "created for the embedding. Use the last writer."
            )
        return {
            table.name: self._copy(
                self._store.variables[table.name],
                np.asarray(also.get(table.name, ()), np.int64),
            )
            for table in self._store.spec.tables
        }

    def _copy(self, variables: Mapping[str, Any], rows: Array) -> TableChanges:
        values = {}
        for name, variable in variables.items():
            copied = variable.sparse_read(tf.constant(rows))
            values[name] = ChangedValues(
                [PartOfRows(None, 0, copied)],
                tuple(copied.shape),
                copied.dtype,
            )
        return TableChanges(rows, values, {})
