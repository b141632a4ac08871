"""`DeltaWriter`: writes the changes of a model since a checkpoint as deltas.

`watched.py` records the changes of one or several embeddings, and `weights.py`
finds all other variables of a model. `delta_files.py` writes the files of one
delta, and `parts.py` the parts of a delta that servers or several processes
write.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, files
from tf_layoutmap.deltas import base as base_file
from tf_layoutmap.deltas import delta_files, mark, parts, watched
from tf_layoutmap.deltas import weights as model_weights
from tf_layoutmap.deltas.served import chain, storage
from tf_layoutmap.deltas.served.chain import Delta, Meta, Position
from tf_layoutmap.deltas.weights import (
    BaseGraph,
    ModelWeights,
    Weight,
)
from tf_layoutmap.embedding import processes
from tf_layoutmap.vocabulary import checkpoint_files
from tf_layoutmap.vocabulary.parts import NUMBERS, SKETCH

if TYPE_CHECKING:
    from tf_layoutmap._core.types import AnyEmbedding, KerasLayer

Array = np.ndarray[Any, Any]


class DeltaWriter:
    """A writer of deltas: the changes of a model since a checkpoint.

    A delta contains the rows of the table and of its slot variables that were
    written since the previous delta. For an open vocabulary, the delta also
    contains the keys, steps and counts of these rows. For an evicted key, the
    delta contains the empty key.

    If the writer is created for a model, or with `root`, a delta also contains
    the values of all other variables that have changed: kernels, biases,
    statistics, and the state of optimizers. A table that is not in an
    embedding, such as the table of a `ShardedEmbedding` without an open
    vocabulary, is such a variable, and each delta contains all of its rows.
    Call `write` between two training steps, so that the rows and the other
    variables belong to the same step.

    `tlm.deltas.apply` writes a full checkpoint from the base and its deltas.
    The tables and weights in the full checkpoint are bitwise identical to the
    variables in a regular checkpoint.

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
    >>> writer = tlm.deltas.DeltaWriter(embedding, where + "/deltas", base=base)
    >>> embedding.enqueue({"title": tf.constant([3, 5])})
    >>> _ = embedding.dequeue()
    >>> embedding.apply_gradients({"title": tf.ones([2, 4])})
    >>> delta = writer.write()
    >>> delta.meta.sequence, delta.meta.tables["words"]["num_rows"]
    (1, 2)
    >>> full = tlm.deltas.apply(base, where + "/deltas")
    >>> _ = tf.train.Checkpoint(embedding=embedding).restore(full)

    The writer automatically records all rows that steps, evictions and restores
    change. If user code assigns values to a table, the next call of `write`
    must be `write(compare=True)`. If the tables are on a TPU, each `write`
    copies all rows from the TPU, and compares them with the base and deltas.

    Under `MultiWorkerMirroredStrategy`, all processes create the writer and
    call its methods together. The directory and the base must be on a file
    system that all processes share. If tables are sharded over processes, each
    process writes the rows that it owns. If each process has all tables, the
    first process writes the delta. With `write(wait=False)`, the delta appears
    in the directory during the next call of `write` or `finish`.

    Under `ParameterServerStrategy`, the coordinator creates the writer and
    calls its methods while no step is in flight. Each server records which of
    its rows change, and writes the values of these rows. The directory and the
    base must be on a file system that the coordinator and all servers share.

    An embedding can have only one writer at a time. After a program creates
    another writer, the method `write` of the earlier writer raises an error.
    After a restart, the program restores the checkpoint that `tlm.deltas.apply`
    returns, and creates a writer with the same base and directory. The new
    writer continues the sequence of deltas.
    """

    def __init__(
        self,
        embedding: AnyEmbedding | KerasLayer | Sequence[AnyEmbedding],
        directory: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str],
        root: object = None,
        weights: Literal["all", "tables"] = "all",
    ):
        """Compares the variables with the base and existing deltas.

        The next delta contains all rows and weights that differ. The comparison
        requires memory for a second copy of one variable at a time. The base
        and the deltas can be on any file system of TensorFlow.

        Args:
          embedding: A built Keras 3 or tf_keras model, or a `tf.Module`, that
            contains embeddings; a `tlm.TPUEmbedding`, a
            `tlm.layers.TPUEmbedding`, or a `tlm.layers.ShardedEmbedding` with
            an open vocabulary; or a list of these objects. If `embedding` is a
            list, each delta contains the changes of all embeddings in the list.
            A delta is a consistent snapshot of each embedding, but different
            embeddings in a delta can be at different steps.
          directory: Directory of the deltas. The writer creates the directory
            if it does not exist.
          base: Prefix of a checkpoint that holds the embedding.
          root: The object that was saved as `base`, such as the
            `tf.train.Checkpoint`. `root` is required if the base contains
            several tables with the same name and shape. The deltas contain the
            variables of `root`.
          weights: `"all"` writes the tables and all other variables of the
            models and of `root`. `"tables"` writes only the tables, and warns
            if there are other weights: a served model would combine new rows
            with old weights.

        Raises:
          TypeError: If `embedding` has another type.
          ValueError: If the base does not contain the tables of `embedding`.
            The constructor also raises this error if the directory contains
            deltas of another base, deltas of other tables, deltas with weights
            that this writer does not write, or a truncated or modified delta.
          RuntimeError: If the embedding is not built, or if the constructor has
            failed in another process.
          NotImplementedError: If the tables are on SparseCores.
        """
        self._directory = storage.local_path(os.fspath(directory))
        self._base = checkpoint_files.prefix_of(base)
        checks.check_one_of("weights", weights, ("all", "tables"))
        embeddings, objects = watched.embeddings_of(embedding)
        # The processes of the strategy, or None if there is one process.
        self._processes = watched.processes_of(embeddings)
        with processes.failing_together(
            self._processes, "tlm.deltas.DeltaWriter"
        ):
            if self._processes is None or self._processes.is_first:
                self._prepare_files()
        self._identifier = uuid.uuid4().hex
        titles = watched.titles_of(embeddings, [*objects, root])
        if self._processes is not None:
            # Keras can give other names to the layers of another process.
            self._identifier, titles = json.loads(
                self._processes.gather_texts(
                    json.dumps([self._identifier, titles])
                )[0]
            )
        self._thread = futures.ThreadPoolExecutor(
            1, thread_name_prefix="tlm-deltas"
        )
        # Waits for the delta that is being written, and returns it.
        self._writing: Callable[[], Delta] | None = None
        # Rows that the next delta must contain in addition to the recorded
        # rows, by table.
        self._extra_rows: dict[str, Array] = {}
        # The sketch and the training step of each table at the last delta.
        self._sketches: dict[str, Array] = {}
        self._steps: dict[str, int] = {}
        # The checksum of each weight at the last delta, by label.
        self._digests: dict[str, bytes] = {}
        # Whether the next delta contains all weights. An export can contain
        # values that are neither in the last delta nor current.
        self._writes_all_weights = False
        # The weights that the next delta describes.
        self._weights: list[Weight] = []
        with processes.failing_together(
            self._processes, "tlm.deltas.DeltaWriter"
        ):
            self._read_files(
                embeddings, objects, root, weights == "all", titles
            )

    def _prepare_files(self) -> None:
        """Creates the directory, and flushes the base to disk."""
        chain.fingerprint(self._base)
        for path in (
            *checkpoint_files.data_files(self._base),
            f"{self._base}.index",
        ):
            files.sync(path)
        storage.make_folders(self._directory)
        delta_files.remove_leftovers(self._directory)

    def _read_files(
        self,
        embeddings: Sequence[Any],
        objects: Sequence[Any],
        root: object,
        has_weights: bool,
        titles: Sequence[watched.Titles],
    ) -> None:
        """Compares the variables with the base and existing deltas."""
        self._fingerprint = chain.fingerprint(self._base)
        graph = BaseGraph(self._base, root)
        self._model_weights = ModelWeights(
            [*objects, *([] if root is None else [root])], graph
        )
        prefixes = [
            prefix
            if (prefix := graph.prefix_of(embedding)) is not None
            else base_file.find_prefix(self._base, embedding, root)
            for embedding in embeddings
        ]
        self._has_weights = has_weights
        self._deltas = chain.read_deltas(self._directory, self._base)
        before = self._deltas[-1].meta if self._deltas else None
        self._watched = watched.WatchedTables(
            embeddings, prefixes, titles, before
        )
        self._prefix = (
            "" if self._watched.has_several_embeddings else prefixes[0]
        )
        if before is not None:
            self._check_tables(before)
        self._find_weights()
        if has_weights:
            model_weights.check_same(
                self._weights, self._deltas, self._directory
            )
        else:
            model_weights.warn_about_others(self._model_weights.find())
        self._compare()
        for table, watched_table in self._watched.tables.items():
            if NUMBERS in watched_table.variables:
                self._steps[table] = int(self._stored(table, NUMBERS)[0])
            if SKETCH in watched_table.variables:
                self._sketches[table] = self._stored(table, SKETCH)

    @property
    def deltas(self) -> list[Delta]:
        """All complete deltas, in the order in which they were written."""
        return list(self._deltas)

    def write(
        self,
        *,
        wait: bool = True,
        compare: bool = False,
    ) -> Delta | None:
        """Writes the changes since the previous delta.

        The method first applies a pending pipelined update. Then the method
        copies the changed rows in memory. No step runs during this copy. Then
        the method copies the changed weights of the model, so no step of the
        model should run during the call. After the copies, steps can run again
        while a background thread writes the files.

        Args:
          wait: Whether to wait until the files are written. If False, a
            background thread writes the files. If the thread fails, the next
            call of `write` or `finish` raises the error of the thread, and the
            next delta contains the rows that the thread could not write.
          compare: Whether to compare all rows with the base and the deltas, as
            in the constructor. Must be True if user code has assigned values to
            a table.

        Returns:
          The delta, or None if the background thread is still writing the
          delta.

        Raises:
          RuntimeError: If another writer has been created for the embedding, or
            a vocabulary was resized. After a resize, create a new base and a
            new writer. The method also raises this error if steps of workers
            run during the call.
          OSError: If the delta cannot be written, or another process has
            failed.
          tlm.ps.ServerLostError, tlm.ps.StepDeadlineError: If a parameter
            server is lost or does not respond. Another call of `write` cannot
            succeed, so these errors are not an `OSError`. Start the program
            again.
        """
        if not tf.executing_eagerly():
            raise RuntimeError("`write` must be called outside tf.function.")
        self.finish()
        copies = _Copies({}, [], {}, {})
        if self._processes is None:
            self._take(copies, compare)
            self._writing = self._thread.submit(self._write, copies).result
        else:
            error = None
            try:
                self._take(copies, compare)
            except Exception as caught:
                error = caught
            self._writing = self._write_part(copies, error)
        return self.finish() if wait else None

    def _take(self, copies: _Copies, compare: bool) -> None:
        """Copies the changed rows and weights."""
        self._watched.flush()
        if self._watched.check_replaced() or compare:
            # `tlm.deltas.prune` may have merged the deltas.
            self._deltas = chain.read_deltas(self._directory, self._base)
            self._compare()
        try:
            self._watched.take(self._extra_rows, copies.tables)
        finally:
            # `_record` clears `_extra_rows` after these rows are on disk.
            for table, changes in copies.tables.items():
                self._extra_rows[table] = changes.rows
        self._find_weights()
        copies.weights = self._weights
        copies.values, copies.digests = model_weights.changed(
            self._weights, {} if self._writes_all_weights else self._digests
        )

    def _find_weights(self) -> None:
        """Finds the current weights, and reads new ones from the files."""
        if not self._has_weights:
            return
        self._weights = self._model_weights.find()
        new = [
            weight
            for weight in self._weights
            if weight.label not in self._digests
        ]
        base = base_file.open_checkpoint(self._base) if new else None
        for weight in new:
            value = weight.stored(base, self._deltas)
            if value is not None:
                self._digests[weight.label] = model_weights.digest(value)

    def finish(self) -> Delta | None:
        """Waits until the background thread has written the delta.

        Returns:
          The delta that the thread wrote, or None if the thread was idle.

        Raises:
          OSError: If the thread could not write the delta. The next delta then
            contains the rows of the failed delta.
          tlm.ps.ServerLostError, tlm.ps.StepDeadlineError: As for `write`.
        """
        writing, self._writing = self._writing, None
        return None if writing is None else writing()

    def mark_export(self, path: str | os.PathLike[str]) -> None:
        """Enables deltas for a SavedModel that contains the current tables.

        The method adds a file to a SavedModel that `model.export` or
        `tf.saved_model.save` has written, for `tlm.deltas.ServedModel` and
        `tlm.deltas.update_export`. `tlm.export(..., delta_writer=writer)`
        writes this file itself. The method finds the tables and weights by
        comparing all names and values with the SavedModel, so call the method
        before the next training step. If the SavedModel contains variables that
        are neither in a table nor a weight of the writer, the method issues a
        warning that names them, because deltas do not change these variables.

        Args:
          path: Folder of the SavedModel.

        Raises:
          ValueError: If the SavedModel does not contain exactly one variable
            that is bitwise equal to the rows of a table, or to the keys of its
            open vocabulary, or contains another value of a weight.
          NotImplementedError: If tables share an open vocabulary, or are
            sharded over processes.
          RuntimeError: If another thread writes a delta during the call.
          OSError: If the file cannot be written.
        """
        self._check_can_serve()
        sharded = [
            table
            for table, is_sharded in self._watched.is_sharded().items()
            if is_sharded
        ]
        if sharded:
            raise NotImplementedError(
                "`mark_export` does not support tables that are sharded over "
                "processes, because `model.export` cannot write them. Use "
                "tlm.export(..., delta_writer=writer). Received: tables "
                f"{sharded}."
            )
        position = self._position()
        tables, weights = mark.find_variables(
            os.fspath(path),
            self._watched.tables,
            self._current_weights(),
            self._model_weights.names_of_table_layers(),
        )
        self._check_position(position)
        mark.write_state(os.fspath(path), position, tables, weights)

    def _current_weights(self) -> list[Weight]:
        """Returns the weights that the next delta describes."""
        self._find_weights()
        return self._weights

    def _label_of(self, variable: Any) -> str | None:
        """Returns the label of a weight, or None if it is not written."""
        self._find_weights()
        if not self._has_weights:
            return None
        return self._model_weights.label_of(variable)

    def _check_can_serve(self) -> None:
        self._watched.check_can_serve()

    def _prefix_of(self, embedding: Any) -> str | None:
        """Returns the prefix of an embedding's checkpoint keys in the base.

        Returns None if the writer does not write the changes of `embedding`.
        """
        return self._watched.prefix_of(embedding)

    def _position(self) -> Position:
        """Waits for the background thread, and returns the last delta.

        An export calls the method, so the next delta contains all weights.

        Raises:
          OSError: If the thread could not write the delta.
        """
        self.finish()
        self._writes_all_weights = self._has_weights
        return self._last_position()

    def _last_position(self) -> Position:
        return Position(
            self._fingerprint,
            chain.last_sequence(self._deltas),
            self._deltas[-1].meta.link if self._deltas else "",
            self._identifier,
        )

    def _check_position(self, position: Position) -> None:
        """Checks that no delta was written since `_position` was called.

        A table that was read in the meantime could otherwise contain changes
        after the new delta.

        Raises:
          RuntimeError: If a delta was written.
        """
        if self._position() != position:
            raise RuntimeError(
                "No delta may be written during an export. Received: a delta "
                f"after delta {position.sequence} (directory "
                f"{self._directory!r}). Export the model again."
            )

    def _write(self, copies: _Copies) -> Delta:
        contents = self._contents(copies)
        return self._record(
            delta_files.write_files(
                self._next_path(),
                {
                    **{
                        f"{table}/{name}": value
                        for table, by_name in contents.tensors.items()
                        for name, value in by_name.items()
                    },
                    **copies.tensors_of_weights(),
                },
                lambda of_files: self._meta(contents, of_files),
            ),
            contents,
        )

    def _write_part(
        self, copies: _Copies, error: Exception | None
    ) -> Callable[[], Delta]:
        """Starts to write the part of this process.

        Returns:
          A function that waits for all processes, and returns the delta.
        """
        assert self._processes is not None
        delta = parts.ProcessesDelta(
            self._processes,
            self._next_path(),
            delta_files.staging_path(self._next_path()),
            self._last_position(),
            copies.tables,
            self._watched.is_sharded(),
            error,
        )
        contents = self._contents(copies)
        slices = []
        for table, by_name in contents.tensors.items():
            contents.tables[table]["num_rows"] = delta.num_rows(table)
            for name, value in by_name.items():
                slices += delta.slices_of(table, name, value)
        if self._processes.is_first:
            # All processes have the same values.
            for name, value in copies.tensors_of_weights().items():
                slices += parts.slices_of(name, value)
        wait = self._thread.submit(delta.write_part, slices).result
        return lambda: self._record(
            delta.finish(wait, lambda of_files: self._meta(contents, of_files)),
            contents,
        )

    def _next_path(self) -> str:
        sequence = chain.last_sequence(self._deltas) + 1
        return os.path.join(self._directory, chain.directory_name(sequence))

    def _contents(self, copies: _Copies) -> _Contents:
        """Returns the tensors and the descriptions of all tables."""
        contents = _Contents({}, {}, {}, {}, copies)
        for table, changes in copies.tables.items():
            contents.tables[table] = {
                "num_rows": len(changes.rows),
                "variables": [*changes.values, *changes.whole],
            }
            of_base = self._watched.tables[table]
            if self._watched.has_several_embeddings or of_base.name != table:
                contents.tables[table].update(
                    table=of_base.name, prefix=of_base.prefix
                )
            if NUMBERS in changes.whole:
                contents.steps[table] = int(changes.whole[NUMBERS][0])
                contents.tables[table].update(
                    from_step=self._steps[table], to_step=contents.steps[table]
                )
            tensors = {
                base_file.ROWS: changes.rows,
                **changes.values,
                **changes.whole,
            }
            if SKETCH in tensors:
                contents.sketches[table] = tensors[SKETCH]
                tensors.update(
                    base_file.changed_cells(
                        self._sketches[table], contents.sketches[table]
                    )
                )
            contents.tensors[table] = tensors
        return contents

    def _meta(
        self, contents: _Contents, of_files: dict[str, chain.FileOfDelta]
    ) -> Meta:
        return Meta(
            chain.last_sequence(self._deltas) + 1,
            self._fingerprint,
            self._prefix,
            self._deltas[-1].meta.link if self._deltas else "",
            contents.tables,
            of_files,
            writers=(self._identifier,),
            weights={
                weight.label: {
                    "key": weight.key,
                    "is_changed": weight.label in contents.copies.values,
                    "is_state": weight.is_state,
                }
                for weight in contents.copies.weights
            },
        )

    def _record(self, delta: Delta, contents: _Contents) -> Delta:
        """Records that a delta is complete."""
        self._deltas.append(delta)
        self._sketches, self._steps = contents.sketches, contents.steps
        self._digests.update(contents.copies.digests)
        self._writes_all_weights = False
        self._extra_rows = {}
        return delta

    def _compare(self) -> None:
        """Adds all rows that differ from the files to `_extra_rows`."""
        for table, watched_table in self._watched.tables.items():
            rows = [self._extra_rows.get(table, np.zeros([0], np.int64))]
            for name, variable in watched_table.variables.items():
                if base_file.has_rows(name):
                    rows += self._differing_rows(table, name, variable)
            self._extra_rows[table] = np.unique(np.concatenate(rows))

    def _differing_rows(
        self, table: str, name: str, variable: Any
    ) -> list[Array]:
        """Returns the rows of each part that differ from the files."""
        reader = self._stored_rows(table, name, variable)
        differing = []
        for part in self._watched.parts(table):
            rows = part.buckets if name in base_file.LANES else part.rows
            if rows:
                differing.append(
                    base_file.differing_rows(
                        reader.read(rows.start, rows.stop),
                        part.variables[name],
                        rows.start,
                    )
                )
        return differing

    def _check_tables(self, before: Meta) -> None:
        """Raises a ValueError if existing deltas contain other tables."""
        tables = {
            (table.prefix, table.name)
            for table in self._watched.tables.values()
        }
        if {before.in_base(label) for label in before.tables} != tables:
            raise ValueError(
                "All deltas in a directory must be of the same tables. The "
                f"existing deltas are of tables {sorted(before.tables)}. "
                "Received: "
                f"{sorted(self._watched.tables)} (directory "
                f"{self._directory!r})."
            )

    def _stored(self, table: str, name: str) -> Array:
        """Reads the value of a variable from the base and the deltas."""
        return base_file.read_variable(
            base_file.open_checkpoint(self._base),
            self._key_of(table, name),
            self._deltas,
            table,
            name,
        )

    def _stored_rows(
        self, table: str, name: str, variable: Any
    ) -> base_file.StoredRows:
        """Returns a reader of the rows of a variable."""
        return base_file.StoredRows(
            self._base,
            self._key_of(table, name),
            self._deltas,
            (table, name),
            variable,
        )

    def _key_of(self, table: str, name: str) -> str:
        """Returns the key of a variable's tensor in the base."""
        of_base = self._watched.tables[table]
        return of_base.prefix + checkpoint_files.key_of(
            base_file.ATTRIBUTE, of_base.name, name
        )


@dataclasses.dataclass(eq=False)
class _Copies:
    """Copies of the rows and weights of a delta.

    Attributes:
      tables: Changes by table.
      weights: All weights.
      values: Values of the weights that changed, by label.
      digests: Checksums of all weights, by label.
    """

    tables: dict[str, Any]
    weights: list[Weight]
    values: dict[str, Array]
    digests: dict[str, bytes]

    def tensors_of_weights(self) -> dict[str, Array]:
        """Returns the values of the weights that changed, by tensor name."""
        return {
            chain.weight_tensor(label): value
            for label, value in self.values.items()
        }


@dataclasses.dataclass(frozen=True, eq=False)
class _Contents:
    """The contents of a delta, without its files.

    Attributes:
      tensors: Tensors of each table, by name.
      tables: Attribute `tables` of the `Meta` of the delta.
      sketches: The sketch of each table with a sketch.
      steps: The training step of each table with an open vocabulary.
      copies: The rows and weights.
    """

    tensors: dict[str, dict[str, Array]]
    tables: dict[str, chain.TableOfDelta]
    sketches: dict[str, Array]
    steps: dict[str, int]
    copies: _Copies
