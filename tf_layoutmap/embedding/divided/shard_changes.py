"""The record of the rows that change in the shards of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_layoutmap.embedding.host import changes


class ShardChanges:
    """A recorder of the rows that are written to the shards of this process.

    Rows are numbered by their index in the unsharded table.
    """

    def __init__(
        self,
        shards: changes.Changes,
        rows: Mapping[str, range],
        whole: Mapping[str, Mapping[str, Any]],
    ):
        """Creates the recorder.

        Args:
          shards: Recorder of the shards, which numbers the local rows.
          rows: Rows of this process, by table.
          whole: Small variables of vocabularies, which are copied in full, by
            table and name.
        """
        self._shards = shards
        self._rows = rows
        self._whole = whole

    @property
    def num_replaced(self) -> int:
        """Number of times that all values may have been replaced."""
        return self._shards.num_replaced

    @num_replaced.setter
    def num_replaced(self, count: int):
        self._shards.num_replaced = count

    def take(
        self, also: Mapping[str, np.ndarray[Any, Any]]
    ) -> dict[str, changes.TableChanges]:
        """Copies the rows written since the last call; see `EngineChanges`.

        All processes must call the method together.

        Args:
          also: Additional rows of this process to copy, by table.
        """
        found = self._shards.take(
            {
                table: rows - self._rows[table].start
                for table, rows in also.items()
            }
        )
        return {
            table: dataclasses.replace(
                one,
                rows=one.rows + self._rows[table].start,
                whole={
                    **one.whole,
                    **{
                        name: whole.numpy()
                        for name, whole in self._whole[table].items()
                    },
                },
            )
            for table, one in found.items()
        }
