"""Record of the rows that change in the tables of one or several embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from tf_layoutmap._core import checks
from tf_layoutmap.embedding.backend import EngineBackend, EngineChanges
from tf_layoutmap.embedding.deltas import weights
from tf_layoutmap.embedding.deltas.mark import Table
from tf_layoutmap.embedding.divided.tables import DividedTable
from tf_layoutmap.embedding.host import processes
from tf_layoutmap.embedding.servers.changes import ServerChanges
from tf_layoutmap.embedding.spec import open_tables
from tf_layoutmap.embedding.table_access import TableAccess

Array = np.ndarray[Any, Any]


def embeddings_of(embedding: Any) -> tuple[list[Any], list[Any]]:
    """Returns the embeddings and the models in a writer's first argument.

    Returns:
      The `tlm.TPUEmbedding` objects, and all objects of the argument.

    Raises:
      TypeError: If `embedding` contains another object.
      ValueError: If an embedding occurs twice, or `embedding` is an empty list.
      RuntimeError: If an embedding is not built, or is on a TPU.
    """
    given = embedding if isinstance(embedding, list | tuple) else [embedding]
    found: list[Any] = []
    for one in given:
        if isinstance(one, TableAccess) or weights.is_table_layer(one):
            own = [getattr(one, "embedding", one)]
            if any(own[0] is other for other in found):
                raise ValueError(
                    checks.message(
                        "embedding", "a list without duplicates", embedding
                    )
                )
        else:
            own = (
                weights.embeddings_below(one)
                if hasattr(one, "_trackable_children")
                else []
            )
        if not own:
            raise TypeError(
                checks.message(
                    "embedding",
                    "a tlm.TPUEmbedding, a tlm.layers.TPUEmbedding, a "
                    "tlm.layers.ShardedEmbedding with an open vocabulary, a "
                    "model that contains one of them and is built, or a list "
                    "of these objects",
                    embedding,
                )
            )
        for inner in own:
            inner._state.require_host("DeltaWriter")
            if all(inner is not other for other in found):
                found.append(inner)
    if not found:
        raise ValueError(
            checks.message("embedding", "at least one embedding", embedding)
        )
    return found, list(given)


class WatchedTables:
    """Record of the rows that are written to the tables of embeddings.

    Attributes:
      has_several_embeddings: Whether more than one embedding is recorded.
      is_on_servers: Whether the tables are on parameter servers.
      tables: Tables by name. The names are the names of the tables in a delta.
        If there are several embeddings, the prefix of the embedding precedes
        the name of the table.
    """

    def __init__(self, embeddings: Sequence[Any], prefixes: Sequence[str]):
        """Starts to record, and invalidates earlier records.

        Args:
          embeddings: The embeddings that `embeddings_of` returns.
          prefixes: Prefix of each embedding in the base.
        """
        self._prefixes = list(zip(embeddings, prefixes, strict=True))
        self.has_several_embeddings = len(embeddings) > 1
        self.tables: dict[str, Table] = {}
        self._parts: list[tuple[EngineBackend, EngineChanges, str]] = []
        for one, prefix in zip(embeddings, prefixes, strict=True):
            label = prefix if self.has_several_embeddings else ""
            for table, by_name in one._variables.items():
                self.tables[label + table] = Table(table, prefix, by_name)
            backend = cast(
                EngineBackend, one._state.require_host("DeltaWriter")
            )
            self._parts.append((backend, backend.watch_changes(), label))
        self.is_on_servers = any(
            isinstance(changes, ServerChanges) for _, changes, _ in self._parts
        )
        self._num_replaced = self._count_replaced()

    def is_sharded(self) -> dict[str, bool]:
        """Returns whether each table is sharded over processes, by name."""
        return {
            name: any(
                isinstance(variable, DividedTable)
                for variable in one.variables.values()
            )
            for name, one in self.tables.items()
        }

    def check_can_serve(self) -> None:
        """Checks that deltas can be applied to served models.

        Raises:
          NotImplementedError: If tables share a vocabulary. A served model
            replaces a key and its row together, and each of these tables would
            need a separate copy of the keys.
        """
        for one, _ in self._prefixes:
            shared = open_tables.owners_by_name(one._state.spec)
            if shared:
                raise NotImplementedError(
                    "Deltas of served models do not support tables that share "
                    "a vocabulary. Export the complete model again, or use "
                    "a separate tlm.OpenVocabulary for each table. Received: "
                    "tables that share the vocabulary of another table, "
                    f"{shared}."
                )

    def prefix_of(self, embedding: Any) -> str | None:
        """Returns the prefix of an embedding in the base.

        Returns None if the changes of the embedding are not recorded.
        """
        for one, prefix in self._prefixes:
            if one is embedding:
                return prefix
        return None

    def flush(self) -> None:
        """Applies the pending pipelined updates."""
        for backend, _, _ in self._parts:
            backend.flush()

    def check_replaced(self) -> bool:
        """Returns whether all rows may have changed since the last call."""
        before, self._num_replaced = (
            self._num_replaced,
            self._count_replaced(),
        )
        return before != self._num_replaced

    def take(self, also: Mapping[str, Array], found: dict[str, Any]) -> None:
        """Copies the rows that were written since the last call.

        Args:
          also: Additional rows to copy, by table.
          found: Dict to which the changes of each table are added. If the copy
            of an embedding raises an error, the dict still contains the changes
            of all embeddings that were copied earlier.

        Raises:
          RuntimeError: See `EngineChanges.take`.
        """
        for _, changes, label in self._parts:
            own = {
                table.removeprefix(label): rows
                for table, rows in also.items()
                if table.startswith(label)
            }
            found.update(
                {label + table: one for table, one in changes.take(own).items()}
            )

    def _count_replaced(self) -> int:
        return sum(changes.num_replaced for _, changes, _ in self._parts)


def processes_of(embeddings: Sequence[Any]) -> processes.Processes | None:
    """Returns the processes of the embeddings' strategy, or None."""
    for one in embeddings:
        if one._state.replicas.has_processes:
            return processes.of_strategy(one._state.replicas.strategy)
    return None
