"""Record of the rows that change in the tables of one or several embeddings."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_layoutmap._core import checks
from tf_layoutmap.deltas import weights
from tf_layoutmap.deltas.mark import Table
from tf_layoutmap.deltas.served.chain import Meta
from tf_layoutmap.embedding import processes
from tf_layoutmap.embedding.backend import Backend, EngineChanges
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
      RuntimeError: If an embedding is not built.
      NotImplementedError: If the tables of an embedding are on SparseCores.
    """
    objects = embedding if isinstance(embedding, list | tuple) else [embedding]
    embeddings: list[Any] = []
    for member in objects:
        if isinstance(member, TableAccess) or weights.is_table_layer(member):
            inner_embeddings = [getattr(member, "embedding", member)]
            if any(inner_embeddings[0] is other for other in embeddings):
                raise ValueError(
                    checks.message(
                        "embedding", "a list without duplicates", embedding
                    )
                )
        else:
            inner_embeddings = (
                weights.embeddings_below(member)
                if hasattr(member, "_trackable_children")
                else []
            )
        if not inner_embeddings:
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
        for inner in inner_embeddings:
            inner._state.check_built("DeltaWriter")
            # A backend that does not support deltas raises an error.
            _ = inner._state.backend.store
            if all(inner is not other for other in embeddings):
                embeddings.append(inner)
    if not embeddings:
        raise ValueError(
            checks.message("embedding", "at least one embedding", embedding)
        )
    return embeddings, list(objects)


# The title of each table of an embedding, and the name of the layer that holds
# the embedding, or an empty string.
Titles = dict[str, tuple[str, str]]


def titles_of(
    embeddings: Sequence[Any], objects: Sequence[Any]
) -> list[Titles]:
    """Returns the names that the program has given to tables.

    The title of a table is its name. The table of a `ShardedEmbedding` always
    has the same name, because checkpoints do not depend on the names of layers.
    Its title is the name of the layer.

    Args:
      embeddings: The embeddings.
      objects: Layers, and objects that contain layers.
    """
    layers: dict[int, Any] = {}
    for member in objects:
        for layer in weights.table_layers_below(member):
            layers.setdefault(id(layer.embedding), layer)
    all_titles: list[Titles] = []
    for embedding in embeddings:
        layer = layers.get(id(embedding))
        tables = list(embedding._variables)
        titles = list(tables)
        if layer is not None and len(tables) == 1:
            # The layer reports its only vocabulary under this name.
            titles = list(layer._named_vocabularies()) or titles
        owner = "" if layer is None else str(layer.name)
        all_titles.append(
            {table: (title, owner) for table, title in zip(tables, titles)}
        )
    return all_titles


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
        label for labels in candidates.values() for label in labels
    )
    paths = {(prefix, table): prefix + table for prefix, table in candidates}
    labels = {
        key: next(
            (label for label in options if label and counts[label] == 1),
            paths[key],
        )
        for key, options in candidates.items()
    }
    if len(set(labels.values())) < len(labels):
        labels = paths
    if before is not None:
        used = {before.in_base(label): label for label in before.tables}
        if used.keys() == labels.keys():
            return used
    return labels


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
        self._parts: list[tuple[Backend, EngineChanges, dict[str, str]]] = []
        labels = labels_of(prefixes, titles, before)
        for embedding, prefix in zip(embeddings, prefixes, strict=True):
            own_labels = {
                table: labels[prefix, table] for table in embedding._variables
            }
            for table, by_name in embedding._variables.items():
                self.tables[own_labels[table]] = Table(table, prefix, by_name)
            backend: Backend = embedding._state.backend
            self._parts.append((backend, backend.watch_changes(), own_labels))
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
            names = [table.name for table in backend.store.spec.tables]
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
        for embedding, _ in self._prefixes:
            shared = open_tables.owners_by_name(embedding._state.spec)
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
        for other, prefix in self._prefixes:
            if other is embedding:
                return prefix
        return None

    def flush(self) -> None:
        """Applies the pending pipelined updates, or updates host copies."""
        for backend, _, _ in self._parts:
            backend.flush()

    def check_replaced(self) -> bool:
        """Returns whether all rows may have changed since the last call."""
        before, self._num_replaced = (
            self._num_replaced,
            self._count_replaced(),
        )
        return before != self._num_replaced

    def take(
        self, also: Mapping[str, Array], changes_by_table: dict[str, Any]
    ) -> None:
        """Copies the rows that were written since the last call.

        Args:
          also: Additional rows to copy, by table.
          changes_by_table: Dict to which the changes of each table are added.
            If the copy of an embedding raises an error, the dict still contains
            the changes of all embeddings that were copied earlier.

        Raises:
          RuntimeError: See `EngineChanges.take`.
        """
        for _, changes, labels in self._parts:
            own_rows = {
                table: also[label]
                for table, label in labels.items()
                if label in also
            }
            changes_by_table.update(
                {
                    labels[table]: table_changes
                    for table, table_changes in changes.take(own_rows).items()
                }
            )

    def _count_replaced(self) -> int:
        return sum(changes.num_replaced for _, changes, _ in self._parts)


def processes_of(embeddings: Sequence[Any]) -> processes.Processes | None:
    """Returns the processes of the embeddings' strategy, or None."""
    for embedding in embeddings:
        if embedding._state.replicas.has_processes:
            return processes.of_strategy(embedding._state.replicas.strategy)
    return None
