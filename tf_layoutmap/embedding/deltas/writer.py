"""`DeltaWriter`: writes what changed in the tables of an embedding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.api import restore_checks
from tf_layoutmap.embedding.deltas import base as base_file
from tf_layoutmap.embedding.deltas import chain, compare, files, watched
from tf_layoutmap.embedding.deltas.chain import Delta
from tf_layoutmap.embedding.deltas.meta import Meta
from tf_layoutmap.files import operations
from tf_layoutmap.vocabulary import checkpoint_parts, state

Array = np.ndarray[Any, Any]


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
        self._base = checkpoint_parts.prefix_of(base)
        inner = watched.embeddings_of(embedding)
        self._fingerprint = chain.fingerprint(self._base)
        prefixes = [
            base_file.find_prefix(self._base, one, root) for one in inner
        ]
        for path in (
            *checkpoint_parts.data_files(self._base),
            f"{self._base}.index",
        ):
            operations.sync(path)
        os.makedirs(self._directory, exist_ok=True)
        files.remove_leftovers(self._directory)
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
        self._watched = watched.Watched(inner, prefixes)
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
        delta = files.write(
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
                compare.differing_rows(self._stored(table, name), variable)
                for name, variable in one.variables.items()
                if compare.has_rows(name)
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
        key = of_base.prefix + restore_checks.key_of(
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
