"""Checkpoints of tables that are sharded over processes.

`save` writes a checkpoint without holding all rows in memory. TensorFlow's
saver reads the values of all tensors before it writes the first tensor.
Therefore `save` works in three steps:

- TensorFlow's saver writes all other tensors to a temporary file.
- All processes send their rows to the first process, which writes these rows to
  several files.
- TensorFlow merges all files into one checkpoint.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap._core import files, paths, tf_private
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import checkpoint_files

# Number of bytes that the first process collects in memory before it writes a
# file. The value is small because the C library does not return all of this
# memory to the system. With files of 128 MiB, the process used 300 MB more
# memory after its first save than before.
PART_BYTES = 1 << 25
# Maximum number of files of a checkpoint. If the tables do not fit into this
# number of files with `PART_BYTES` each, the files become larger.
_MOST_PARTS = 256


class GatherableTable(Protocol):
    """A table whose rows can be gathered in the first process.

    Attributes:
      dtype: Dtype of the stored rows.
      shape: Shape of the unsharded table.
    """

    dtype: tf.DType
    shape: tf.TensorShape

    def gather(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Yields the index of the first row and the values of each block."""
        ...

    def slice_spec(self, first: int, count: int) -> str:
        """Returns the slice spec of `count` rows, starting with row `first`."""
        ...


class _PendingTables(threading.local):
    """The tables that `save` in this thread writes after all other tensors.

    Attributes:
      tables: List of tables and their checkpoint keys. None if this thread does
        not run `save`.
    """

    tables: list[tuple[GatherableTable, str]] | None = None


_pending = _PendingTables()


def register_table(table: GatherableTable, key: str) -> bool:
    """Registers a table that `save` writes after all other tensors.

    Args:
      table: The table.
      key: Name of the table's tensor in the checkpoint.

    Returns:
      Whether the table is registered. False if this thread does not run `save`.
    """
    if _pending.tables is None:
        return False
    _pending.tables.append((table, key))
    return True


def gather_rows(table: GatherableTable) -> tf.Tensor | None:
    """Returns all rows in the first process, and None in other processes."""
    blocks = sorted(table.gather(), key=lambda rule: rule[0])
    return tf.concat([rows for _, rows in blocks], 0) if blocks else None


def save(
    original: Callable[..., Any],
    saver: Any,
    file_prefix: Any,
    checkpoint_number: Any = None,
    session: Any = None,
    options: Any = None,
) -> Any:
    """Saves a checkpoint, with sharded tables in several files."""
    if not tf.executing_eagerly() or not isinstance(
        file_prefix, (str, os.PathLike)
    ):
        return original(saver, file_prefix, checkpoint_number, session, options)
    target = os.fspath(file_prefix)
    if checkpoint_number:
        target = f"{target}-{int(checkpoint_number)}"
    files = _TableFiles(f"{target}.being-written")
    _pending.tables = sharded_tables = []
    try:
        try:
            files.run_unless_failed(
                original, saver, files.aside, None, session, options
            )
        finally:
            _pending.tables = None
        files.set_total_bytes(
            sum(
                table.dtype.size * table.shape.num_elements()
                for table, _ in sharded_tables
            )
        )
        for table, key in sharded_tables:
            files.add(table, key)
        return files.commit(target)
    finally:
        files.remove()


class _TableFiles:
    """The temporary files of a checkpoint with sharded tables.

    After an error, the object writes no more files. However, the object still
    gathers the rows of all tables, because the other processes wait for this
    process.

    Attributes:
      aside: Prefix of all file names. The prefix is also the name of the first
        file, which contains all tensors that are not sharded.
    """

    def __init__(self, aside: str):
        """Sets the prefix of the files, without writing a file."""
        self.aside = aside
        self._prefixes = [aside]
        self._error: Exception | None = None
        self._num_bytes = 0
        self._most_bytes = PART_BYTES
        self._slices: list[tuple[str, str, tf.Tensor]] = []
        # For each file except the first file: name, slice spec and dtype of its
        # tensors.
        self._written: list[list[tuple[str, str, tf.DType]]] = []

    def set_total_bytes(self, num_bytes: int) -> None:
        """Computes the size of a file from the total size of all tables."""
        self._most_bytes = max(PART_BYTES, num_bytes // _MOST_PARTS)

    def run_unless_failed(
        self, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Calls a function and stores its error, except after an error."""
        if self._error is None:
            try:
                function(*arguments)
            except Exception as error:
                self._error = error

    def add(self, table: GatherableTable, key: str) -> None:
        """Writes a table. All processes must call this method."""
        if table.dtype not in tf_private.SLICEABLE_DTYPES:
            rows = gather_rows(table)
            if rows is not None:
                self._slices.append((key, "", rows))
                self._flush()
            return
        for first, rows in table.gather():
            self._slices.append(
                (key, table.slice_spec(first, known_size(rows, 0)), rows)
            )
            self._num_bytes += rows.dtype.size * int(tf.size(rows))
            if self._num_bytes >= self._most_bytes:
                self._flush()

    def commit(self, target: str) -> tf.Tensor:
        """Merges all files into one checkpoint, and returns its name.

        Raises:
          Exception: The error of an earlier write, if any write failed.
          OSError: If the files cannot be renamed.
        """
        if self._slices:
            self._flush()
        if self._error is not None:
            raise self._error
        with tf.device("/cpu:0"):
            # If the checkpoint has a single file, or its rename would be a copy
            # that replaces nothing, TensorFlow writes the merged checkpoint
            # directly to `target`.
            if len(self._prefixes) == 1 or not (
                paths.is_local(target) or storage.is_file(f"{target}.index")
            ):
                self._merge(target)
            else:
                place = checkpoint_files.located(target)
                in_use = checkpoint_files.counts_in_use(place)
                while len(self._prefixes) in in_use and len(self._prefixes) > 1:
                    self._join_last()
                new = checkpoint_files.located(f"{self.aside}-new")
                self._merge(new)
                checkpoint_files.replace_checkpoint(new, place)
            return tf.constant(target)

    def remove(self) -> None:
        """Removes the remaining temporary files."""
        for path in files.with_prefix(self.aside):
            storage.remove(path)

    def _merge(self, target: str) -> None:
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=self._prefixes,
            destination_prefix=target,
            delete_old_dirs=False,
        )

    def _join_last(self) -> None:
        """Merges the last two files into one file."""
        first = [_tensors_of(self.aside)] if len(self._prefixes) == 2 else []
        values: list[tf.Tensor] = []
        contents: list[tuple[str, str, tf.DType]] = []
        for prefix, written in zip(
            self._prefixes[-2:], [*first, *self._written[-2:]]
        ):
            names, specs, dtypes = zip(*written)
            values += tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=list(names),
                shape_and_slices=list(specs),
                dtypes=list(dtypes),
            )
            contents += written
        names, specs, _ = zip(*contents)
        joined = f"{self.aside}-joined-{len(self._prefixes)}"
        tf.raw_ops.SaveV2(
            prefix=joined,
            tensor_names=list(names),
            shape_and_slices=list(specs),
            tensors=values,
        )
        self._prefixes[-2:] = [joined]
        self._written[-2:] = [contents]

    def _flush(self) -> None:
        names, specs, values = zip(*self._slices)
        self._slices, self._num_bytes = [], 0
        self._written.append(
            [
                (name, spec, value.dtype)
                for name, spec, value in zip(names, specs, values)
            ]
        )
        self._prefixes.append(f"{self.aside}-{len(self._prefixes)}")
        with tf.device("/cpu:0"):
            self.run_unless_failed(
                functools.partial(
                    tf.raw_ops.SaveV2,
                    prefix=self._prefixes[-1],
                    tensor_names=list(names),
                    shape_and_slices=list(specs),
                    tensors=list(values),
                )
            )


def _tensors_of(prefix: str) -> list[tuple[str, str, tf.DType]]:
    """Returns name, slice spec and dtype of all tensors in a checkpoint."""
    dtypes = storage.open_checkpoint(prefix).get_variable_to_dtype_map()
    return [(name, "", tf.as_dtype(dtypes[name])) for name in sorted(dtypes)]
