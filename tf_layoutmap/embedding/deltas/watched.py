"""The tables whose changes one writer takes, of one embedding or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from tf_layoutmap import _checks
from tf_layoutmap.embedding.api.backend import EngineBackend, EngineChanges
from tf_layoutmap.embedding.api.table_access import TableAccess

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """One of them.

    Attributes:
      name: Of the table in its embedding.
      prefix: What the names of its embedding's tensors begin with in the base.
      variables: By name.
    """

    name: str
    prefix: str
    variables: Mapping[str, Any]


def embeddings_of(embedding: Any) -> list[Any]:
    """Returns the `tlm.TPUEmbedding`s of what a writer is given.

    Raises:
      TypeError: If it has none.
      ValueError: If one comes twice.
      RuntimeError: If one is not built, or on a TPU.
    """
    given = embedding if isinstance(embedding, list | tuple) else [embedding]
    found: list[Any] = []
    for one in given:
        inner = getattr(one, "embedding", one)
        if not isinstance(inner, TableAccess):
            raise TypeError(
                _checks.message(
                    "embedding",
                    "a tlm.TPUEmbedding, a tlm.layers.TPUEmbedding, a "
                    "tlm.layers.ShardedEmbedding with an open vocabulary, or a "
                    "list of them",
                    embedding,
                )
            )
        if any(inner is other for other in found):
            raise ValueError(
                _checks.message(
                    "embedding", "embeddings that each come once", embedding
                )
            )
        inner._state.require_host("DeltaWriter")
        found.append(inner)
    if not found:
        raise ValueError(
            _checks.message("embedding", "at least one embedding", embedding)
        )
    return found


class Watched:
    """What is written to the tables, from now on.

    Attributes:
      tables: By what a delta calls them: their names, after the prefix where
        there are several embeddings.
    """

    def __init__(self, embeddings: Sequence[Any], prefixes: Sequence[str]):
        """Begins to watch; whoever watched before is refused from now on.

        Args:
          embeddings: What `embeddings_of` returned.
          prefixes: Of each, in the base.
        """
        self.is_of_several = len(embeddings) > 1
        self.tables: dict[str, Table] = {}
        self._parts: list[tuple[EngineBackend, EngineChanges, str]] = []
        for one, prefix in zip(embeddings, prefixes, strict=True):
            label = prefix if self.is_of_several else ""
            for table, by_name in one._variables.items():
                self.tables[label + table] = Table(table, prefix, by_name)
            backend = cast(
                EngineBackend, one._state.require_host("DeltaWriter")
            )
            self._parts.append((backend, backend.watch_changes(), label))
        self._num_replaced = self._count_replaced()

    def flush(self) -> None:
        """Lands the updates that pipelining holds back."""
        for backend, _, _ in self._parts:
            backend.flush()

    def was_replaced(self) -> bool:
        """Whether all values may have been replaced since the last call."""
        before, self._num_replaced = (
            self._num_replaced,
            self._count_replaced(),
        )
        return before != self._num_replaced

    def take(self, also: Mapping[str, Array], found: dict[str, Any]) -> None:
        """Copies what was written since the last call.

        Args:
          also: By table, rows to copy besides.
          found: Becomes what changed, by table; if it fails, of those that
            were copied before.

        Raises:
          RuntimeError: As of `EngineChanges.take`.
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
