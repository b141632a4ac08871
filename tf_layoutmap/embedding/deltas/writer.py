"""`DeltaWriter`: writes what changed in the tables of an embedding."""

# DOC-MERGE: The tables whose changes one writer takes, of one embedding or several.
from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, files
from tf_layoutmap.embedding import checkpointing
from tf_layoutmap.embedding.backend import EngineBackend, EngineChanges
from tf_layoutmap.embedding.deltas import base as base_file
from tf_layoutmap.embedding.deltas import chain
from tf_layoutmap.embedding.deltas.chain import Delta, Meta
from tf_layoutmap.embedding.table_access import TableAccess
from tf_layoutmap.vocabulary import checkpoint_files, state

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
                checks.message(
                    "embedding",
                    "a tlm.TPUEmbedding, a tlm.layers.TPUEmbedding, a "
                    "tlm.layers.ShardedEmbedding with an open vocabulary, or a "
                    "list of them",
                    embedding,
                )
            )
        if any(inner is other for other in found):
            raise ValueError(
                checks.message(
                    "embedding", "embeddings that each come once", embedding
                )
            )
        inner._state.require_host("DeltaWriter")
        found.append(inner)
    if not found:
        raise ValueError(
            checks.message("embedding", "at least one embedding", embedding)
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


class DeltaWriter:
    """Writes what changed in the tables of an embedding since a checkpoint.

    A delta holds the rows that were written since the one before: of the
    table, of its slot variables, and of an open vocabulary the keys, steps and
    counts, where an empty key stands for one that was evicted. Base and deltas
    hold to the bit what a checkpoint would; `tlm.apply_deltas` makes it.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(1000, 4, initializer=tf.ones, name="words")
    >>> embedding = tlm.TPUEmbedding(
    ...     {"title": tpu.FeatureConfig(words)}, tpu.Adagrad(0.1))
    >>> embedding.build()
    >>> where = tempfile.mkdtemp()
    >>> base = tf.train.Checkpoint(embedding=embedding).save(where + "/base")
    >>> writer = tlm.DeltaWriter(embedding, where + "/deltas", base=base)
    >>> embedding.enqueue({"title": tf.constant([3, 5])})
    >>> _ = embedding.dequeue()
    >>> embedding.apply_gradients({"title": tf.ones([2, 4])})
    >>> delta = writer.write()
    >>> delta.meta.sequence, delta.meta.tables["words"]["num_rows"]
    (1, 2)
    >>> full = tlm.apply_deltas(base, where + "/deltas")
    >>> _ = tf.train.Checkpoint(embedding=embedding).restore(full)

    What steps, evictions and restores write is noted as they do. A program
    that assigns to a table itself calls `write(compare=True)` next.

    An embedding has one writer at a time: an earlier one refuses to write. A
    process that starts again restores what `apply_deltas` gives, and makes a
    writer of the same base and directory, which goes on.
    """

    def __init__(
        self,
        embedding: Any,
        directory: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str],
        root: Any = None,
    ):
        """Compares the tables with the base and the deltas that there are.

        What differs is written with the next delta. One variable at a time is
        held twice in memory. On a local file system.

        Args:
          embedding: A `tlm.TPUEmbedding` that is built, a
            `tlm.layers.TPUEmbedding`, a `tlm.layers.ShardedEmbedding` with an
            open vocabulary, or several of them in a list, whose changes are
            then in the same deltas. Each is copied at one moment of its own.
          directory: Of the deltas; it is made if it is not there.
          base: Prefix of a checkpoint that holds the embedding.
          root: The object that was saved as `base`, such as the
            `tf.train.Checkpoint`; needed where the base holds several tables
            of one name and shape.

        Raises:
          TypeError: If `embedding` is none.
          ValueError: If the base does not hold these tables, or the directory
            has deltas of another base or of other tables, or one that was cut
            or altered.
          RuntimeError: If the embedding is not built, or on a TPU.
          NotImplementedError: Under a strategy of several processes.
        """
        self._directory = os.fspath(directory)
        self._base = checkpoint_files.prefix_of(base)
        inner = embeddings_of(embedding)
        self._fingerprint = chain.fingerprint(self._base)
        prefixes = [
            base_file.find_prefix(self._base, one, root) for one in inner
        ]
        for path in (
            *checkpoint_files.data_files(self._base),
            f"{self._base}.index",
        ):
            files.sync(path)
        os.makedirs(self._directory, exist_ok=True)
        remove_leftovers(self._directory)
        self._deltas = chain.read(self._directory, self._base)
        self._thread = futures.ThreadPoolExecutor(
            1, thread_name_prefix="tlm-deltas"
        )
        self._writing: futures.Future[Delta] | None = None
        # By table: rows to write besides those that are noted, the counts of
        # keys without a row, and the step, as the last delta has them.
        self._also: dict[str, Array] = {}
        self._sketches: dict[str, Array] = {}
        self._steps: dict[str, int] = {}
        self._watched = Watched(inner, prefixes)
        self._prefix = "" if self._watched.is_of_several else prefixes[0]
        if self._deltas:
            self._check_tables(self._deltas[-1].meta.tables)
        self._compare()
        for table, one in self._watched.tables.items():
            if state.NUMBERS in one.variables:
                self._steps[table] = int(self._stored(table, state.NUMBERS)[0])
            if state.SKETCH in one.variables:
                self._sketches[table] = self._stored(table, state.SKETCH)

    @property
    def deltas(self) -> list[Delta]:
        """Those that are complete, in their order."""
        return list(self._deltas)

    def write(
        self,
        *,
        wait: bool = True,
        compare: bool = False,
    ) -> Delta | None:
        """Writes what changed since the delta before.

        Steps wait while the changed rows are copied, at one moment and in
        memory; files are written afterwards. A pipelined update lands first.

        Args:
          wait: False: the files are written by a thread, and this returns.
            The next call, or `finish`, raises what went wrong; the rows are
            then in the next delta.
          compare: Whether to compare all rows with the deltas before, as at
            the beginning, for a program that has assigned to a table itself.

        Returns:
          The delta; None if it is still being written.

        Raises:
          RuntimeError: If another writer has begun since, or a vocabulary was
            resized: make a new one, of a new base.
          OSError: If it cannot be written.
        """
        if not tf.executing_eagerly():
            raise RuntimeError("`write` must be called outside tf.function.")
        self.finish()
        self._watched.flush()
        if self._watched.was_replaced() or compare:
            self._compare()
        found: dict[str, Any] = {}
        try:
            self._watched.take(self._also, found)
        finally:
            # Until they are on the disk.
            self._also.update({table: one.rows for table, one in found.items()})
        self._writing = self._thread.submit(self._write, found)
        return self.finish() if wait else None

    def finish(self) -> Delta | None:
        """Waits for what a thread is writing.

        Returns:
          The delta; None if nothing was being written.

        Raises:
          OSError: If it could not be written; the next one has its rows.
        """
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def _write(self, found: Mapping[str, Any]) -> Delta:
        tensors: dict[str, Any] = {}
        tables: dict[str, dict[str, Any]] = {}
        sketches, steps = {}, {}
        for table, one in found.items():
            tables[table] = {
                "num_rows": len(one.rows),
                "variables": [*one.values, *one.whole],
            }
            if self._watched.is_of_several:
                of_base = self._watched.tables[table]
                tables[table].update(table=of_base.name, prefix=of_base.prefix)
            if state.NUMBERS in one.whole:
                steps[table] = int(one.whole[state.NUMBERS][0])
                tables[table].update(
                    from_step=self._steps[table], to_step=steps[table]
                )
            parts = {base_file.ROWS: one.rows, **one.values, **one.whole}
            if state.SKETCH in parts:
                sketches[table] = parts[state.SKETCH]
                parts.update(
                    _changed_cells(self._sketches[table], sketches[table])
                )
            tensors.update(
                {f"{table}/{name}": value for name, value in parts.items()}
            )
        sequence = len(self._deltas) + 1
        delta = write_files(
            self._directory,
            sequence,
            tensors,
            lambda of_files: Meta(
                sequence,
                self._fingerprint,
                self._prefix,
                self._deltas[-1].meta.seal if self._deltas else "",
                tables,
                of_files,
            ),
        )
        self._deltas.append(delta)
        self._sketches, self._steps, self._also = sketches, steps, {}
        return delta

    def _compare(self) -> None:
        """Finds the rows that are not as base and deltas have them."""
        for table, one in self._watched.tables.items():
            rows = [self._also.get(table, np.zeros([0], np.int64))]
            rows += [
                base_file.differing_rows(self._stored(table, name), variable)
                for name, variable in one.variables.items()
                if base_file.has_rows(name)
            ]
            self._also[table] = np.unique(np.concatenate(rows))

    def _check_tables(self, before: Mapping[str, Any]) -> None:
        """Refuses to go on with deltas of other tables."""
        if before.keys() != self._watched.tables.keys():
            raise ValueError(
                "The deltas in a directory must all be of the same tables, "
                f"which are {sorted(before)} so far. Received: "
                f"{sorted(self._watched.tables)} (directory "
                f"{self._directory!r})."
            )

    def _stored(self, table: str, name: str) -> Array:
        of_base = self._watched.tables[table]
        key = of_base.prefix + checkpointing.key_of(
            base_file.ATTRIBUTE, of_base.name, name
        )
        return base_file.read(
            base_file.reader_of(self._base), key, self._deltas, table, name
        )


def _changed_cells(before: Array, after: Array) -> dict[str, Array]:
    """The counts of keys without a row, where they changed."""
    before, after = (
        one.reshape(-1, base_file.SKETCH_CELLS) for one in (before, after)
    )
    rows = np.flatnonzero((before != after).any(1))
    return {state.SKETCH: after[rows], base_file.SKETCH_ROWS: rows}


# What begins the names of folders in which deltas are being written. Programs
# that look for deltas by their numbers do not find them.
_ASIDE = ".writing-"


def remove_leftovers(directory: str) -> None:
    """Removes what processes that were killed have left half-written."""
    for name in os.listdir(directory):
        delta = re.match(re.escape(_ASIDE) + r"\d{8}(?=\.)", name)
        if delta:
            files.remove_leftovers(os.path.join(directory, delta[0]))


def write_files(
    directory: str,
    sequence: int,
    tensors: Mapping[str, np.ndarray[Any, Any]],
    make_meta: Callable[[dict[str, dict[str, Any]]], Meta],
) -> Delta:
    """Writes a delta aside, waits until the disk has it, and renames it.

    Args:
      directory: That of all deltas.
      sequence: Its number.
      tensors: By name.
      make_meta: Takes sizes and checksums by name of the file.

    Raises:
      OSError: If it cannot be written, or there is one of this number.
    """
    path = os.path.join(directory, chain.name_of(sequence))
    aside = os.path.join(directory, f"{_ASIDE}{chain.name_of(sequence)}")
    with files.staged(os.path.abspath(aside)) as folder:
        new = os.path.join(folder, "new")
        os.mkdir(new)
        with tf.device("CPU:0"), files.os_errors(path):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(new, chain.TENSORS),
                tensor_names=list(tensors),
                shape_and_slices=[""] * len(tensors),
                tensors=list(tensors.values()),
            )
        meta = make_meta(
            {
                name: {
                    "num_bytes": os.path.getsize(os.path.join(new, name)),
                    "sha256": chain.checksum(os.path.join(new, name)),
                }
                for name in sorted(os.listdir(new))
            }
        )
        with open(
            os.path.join(new, chain.META_FILE), "w", encoding="utf-8"
        ) as file:
            file.write(meta.to_json())
        files.sync_tree(new)
        if os.path.exists(path):
            raise FileExistsError(
                f"{path!r} is there already: another writer has written it."
            )
        os.rename(new, path)
        files.sync(directory)
    return Delta(path, meta)
