"""Record of the rows that change in the tables of one or several embeddings."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from tf_layoutmap._core import checks
from tf_layoutmap.deltas import weights
from tf_layoutmap.deltas.mark import Table
from tf_layoutmap.deltas.served.chain import Meta
from tf_layoutmap.embedding import processes
from tf_layoutmap.embedding.backend import EngineBackend, EngineChanges
from tf_layoutmap.embedding.configs import open_tables
from tf_layoutmap.embedding.table_access import TableAccess
from tf_layoutmap.vocabulary.parts import Part

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


# The title of each table of an embedding, and the name of the layer that holds
# the embedding, or an empty string.
Titles = dict[str, tuple[str, str]]


def titles_of(embeddings: Sequence[Any], given: Sequence[Any]) -> list[Titles]:
    """Returns the names that the program has given to tables.

    The title of a table is its name. The table of a `ShardedEmbedding` always
    has the same name, because checkpoints do not depend on the names of layers.
    Its title is the name of the layer.

    Args:
      embeddings: The embeddings.
      given: Layers, and objects that contain layers.
    """
    layers: dict[int, Any] = {}
    for one in given:
        for layer in weights.table_layers_below(one):
            layers.setdefault(id(layer.embedding), layer)
    found: list[Titles] = []
    for one in embeddings:
        layer = layers.get(id(one))
        tables = list(one._variables)
        titles = list(tables)
        if layer is not None and len(tables) == 1:
            # The layer reports its only vocabulary under this name.
            titles = list(layer._named_vocabularies()) or titles
        owner = "" if layer is None else str(layer.name)
        found.append(
            {table: (title, owner) for table, title in zip(tables, titles)}
        )
    return found


def labels_of(
    prefixes: Sequence[str], titles: Sequence[Titles], before: Meta | None
) -> dict[tuple[str, str], str]:
    """Returns the label of each table in deltas.

    The label is the title of the table. If several tables have the same title,
    the name of the layer precedes it. If this is not unique either, the label
    is the prefix of the embedding and the name of the table.

    >>> one = {"words": ("words", "")}
    >>> labels_of(["model/layer-1/"], [one], None)
    {('model/layer-1/', 'words'): 'words'}
    >>> labels_of(["a/", "b/"], [one, {"words": ("words", "titles")}], None)
    {('a/', 'words'): 'a/words', ('b/', 'words'): 'titles/words'}

    Args:
      prefixes: Prefix of each embedding in the base.
      titles: Result of `titles_of`.
      before: Description of an existing delta, or None. All deltas of a
        directory have the same labels, also if a later program gives other
        names to its layers.

    Returns:
      The labels by prefix and name of the table.
    """
    candidates = {
        (prefix, table): (title, f"{owner}/{title}" if owner else "")
        for prefix, by_table in zip(prefixes, titles, strict=True)
        for table, (title, owner) in by_table.items()
    }
    counts = collections.Counter(
        one for some in candidates.values() for one in some
    )
    paths = {(prefix, table): prefix + table for prefix, table in candidates}
    found = {
        key: next((one for one in some if one and counts[one] == 1), paths[key])
        for key, some in candidates.items()
    }
    if len(set(found.values())) < len(found):
        found = paths
    if before is not None:
        used = {before.in_base(label): label for label in before.tables}
        if used.keys() == found.keys():
            return used
    return found


class WatchedTables:
    """Record of the rows that are written to the tables of embeddings.

    Attributes:
      has_several_embeddings: Whether more than one embedding is recorded.
      tables: Tables by label. The labels are the names of the tables in a
        delta: see `labels_of`.
    """

    def __init__(
        self,
        embeddings: Sequence[Any],
        prefixes: Sequence[str],
        titles: Sequence[Titles],
        before: Meta | None,
    ):
        """Starts to record, and invalidates earlier records.

        Args:
          embeddings: The embeddings that `embeddings_of` returns.
          prefixes: Prefix of each embedding in the base.
          titles: Result of `titles_of` for `embeddings`.
          before: Description of an existing delta, whose labels are used again;
            None if there are no deltas.
        """
        self._prefixes = list(zip(embeddings, prefixes, strict=True))
        self.has_several_embeddings = len(embeddings) > 1
        self.tables: dict[str, Table] = {}
        # The backend, the changes, and the label of each table of an embedding.
        self._parts: list[
            tuple[EngineBackend, EngineChanges, dict[str, str]]
        ] = []
        labels = labels_of(prefixes, titles, before)
        for one, prefix in zip(embeddings, prefixes, strict=True):
            own = {table: labels[prefix, table] for table in one._variables}
            for table, by_name in one._variables.items():
                self.tables[own[table]] = Table(table, prefix, by_name)
            backend = cast(
                EngineBackend, one._state.require_host("DeltaWriter")
            )
            self._parts.append((backend, backend.watch_changes(), own))
        self._num_replaced = self._count_replaced()

    def is_sharded(self) -> dict[str, bool]:
        """Returns whether each table is sharded over processes, by label."""
        return {
            label: backend.store.is_sharded
            for backend, _, labels in self._parts
            for label in labels.values()
        }

    def parts(self, table: str) -> list[Part]:
        """Returns the parts of a table that this process can read.

        Args:
          table: Label of the table.
        """
        for backend, _, labels in self._parts:
            names = [one.name for one in backend.store.spec.tables]
            for number, name in enumerate(names):
                if labels[name] == table:
                    return [
                        part
                        for part in backend.store.local_parts(number)
                        if part.rows
                    ]
        raise KeyError(table)

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
                    "a separate tlm.vocabulary.OpenVocabulary for each table. "
                    "Received: tables that share the vocabulary of another "
                    "table, "
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
        for _, changes, labels in self._parts:
            own = {
                table: also[label]
                for table, label in labels.items()
                if label in also
            }
            found.update(
                {labels[table]: one for table, one in changes.take(own).items()}
            )

    def _count_replaced(self) -> int:
        return sum(changes.num_replaced for _, changes, _ in self._parts)


def processes_of(embeddings: Sequence[Any]) -> processes.Processes | None:
    """Returns the processes of the embeddings' strategy, or None."""
    for one in embeddings:
        if one._state.replicas.has_processes:
            return processes.of_strategy(one._state.replicas.strategy)
    return None
