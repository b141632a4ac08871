"""`TableToExport`, a table that a layer or an embedding offers to `export`."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_layoutmap.vocabulary.state import Vocabulary


@dataclasses.dataclass(frozen=True)
class TableToExport:
    """A table that `tlm.export` stores in a SavedModel.

    Attributes:
      owner: The object whose lookup the export replaces: a `ShardedEmbedding`,
        or the `TPUEmbedding` that holds the table.
      name_in_owner: Name of the table in `owner`.
      name: Name of the table in arguments, messages and the report. The names
        of all tables of an export are unique.
      weight: The object that a model reads without a lookup: a `tf.Variable`, a
        `ShardedVariable`, a Keras variable on a mesh, or a table that is
        sharded over processes.
      num_rows: Number of rows.
      dim: Number of columns.
      dtype: Name of the dtype of the rows.
      alias: The config or layer that identifies the table in arguments.
      vocabulary: The open vocabulary, or None. Tables that share a vocabulary
        have the same object.
    """

    owner: Any
    name_in_owner: str
    name: str
    weight: Any
    num_rows: int
    dim: int
    dtype: str
    alias: object
    vocabulary: Vocabulary | None = None
