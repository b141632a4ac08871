"""Tables that are sharded over processes, with their checkpoints.

In each process, `DividedTable` holds the rows of one shard.

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
from typing import Any, NoReturn, Protocol

import numpy as np
import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import files, patches, paths, slice_specs, tf_private
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.divided.row_transfer import (
    RowTransfer,
    replaced_message,
)
from tf_layoutmap.embedding.processes import Processes
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import bucket_layout, checkpoint_files

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
    blocks = sorted(table.gather(), key=lambda one: one[0])
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


class DividedTable(tf_private.Trackable):
    """A table, or a variable with one row for each part of a table.

    Slot variables have one row for each row of the table. Variables of open
    vocabularies have one row for each bucket or segment.

    Shards are contiguous blocks of rows in the order of the processes. The
    sizes of the shards differ by at most one row. If a table has fewer rows
    than there are processes, each of the first processes has one row, and the
    remaining processes have no rows.

    Attributes:
      name: Name of the table or slot variable.
      shape: Unsharded shape, `[num_rows, dim]`. Rows of variables of open
        vocabularies can have another rank.
      dtype: Dtype of the stored rows.
      row_partition: Assignment of rows to processes.
      rows: `range` of the rows of this process.
      block: `tf.Variable` of shape `[len(rows), dim]` with the rows of this
        process. If the process has no rows, `block` has one row that is never
        read.
      replaced: Whether a resize has replaced the table. Reads then raise an
        error.
    """

    def __init__(
        self,
        name: str,
        block: Any,
        row_partition: partition.RowPartition,
        rank: int,
        transfer: RowTransfer,
    ):
        """Creates the table from the variable of this process.

        Args:
          name: Name of the table.
          block: Variable with the rows of this process.
          row_partition: Assignment of rows to processes.
          rank: Index of this process.
          transfer: Transfer of rows between the processes.
        """
        self.name = name
        self.shape = tf.TensorShape([row_partition.num_rows, *block.shape[1:]])
        self.dtype = tf.as_dtype(block.dtype)
        self.row_partition = row_partition
        first, size = (
            (row_partition.offsets[rank], row_partition.sizes[rank])
            if rank < row_partition.num_shards
            else (row_partition.num_rows, 0)
        )
        self.rows = range(first, first + size)
        self.block = block
        self.replaced = False
        self._rank = rank
        self._transfer = transfer
        self._restored_rows: _Rows | None = None

    def __repr__(self) -> str:
        return (
            f"<DividedTable {self.name!r} shape={tuple(self.shape)} "
            f"dtype={self.dtype.name} rows={self.rows}>"
        )

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns all rows, in all processes.

        All processes must call this method together, outside of `tf.function`.
        Each process requires memory for the unsharded table. `blocks` requires
        the memory of one block.

        Raises:
          RuntimeError: If the method is called inside a `tf.function`.
        """
        self._require_eager("numpy")
        found = self.empty_array()
        self.copy_to(found)
        return found

    def empty_array(self) -> np.ndarray[Any, Any]:
        """Returns an uninitialized array for all rows."""
        return np.empty(
            [known_size(self, axis) for axis in range(len(self.shape))],
            self.dtype.as_numpy_dtype,
        )

    def copy_to(self, values: np.ndarray[Any, Any]) -> None:
        """Copies all rows to an array, in all processes; see `numpy`."""
        self._require_eager("copy_to")
        for first, rows in self._transfer.gather_everywhere(self):
            values[first : first + known_size(rows, 0)] = rows.numpy()

    def blocks(self, rows_at_once: int | None = None) -> Iterator[tf.Tensor]:
        """Yields all rows in order, in all processes.

        All processes must call this method together, outside of `tf.function`,
        and must iterate over the complete result.

        Args:
          rows_at_once: Maximum number of rows of a block, equal in all
            processes. By default, a block has at most 1 MiB of float32 values.

        Yields:
          Consecutive rows, `[rows, dim]`. A block contains rows of one process.

        Raises:
          RuntimeError: If the method is called inside a `tf.function`.
        """
        self._require_eager("blocks")
        size = max(1, int(self.shape[1:].num_elements()))
        return self._transfer.blocks(
            self, rows_at_once or max(1, 2**18 // size)
        )

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns rows of the table, which their processes send.

        All processes must call this method together: either outside of
        `tf.function`, or inside a `tf.function` in a replica of the strategy.
        The processes can pass different indices.

        Args:
          indices: Row numbers, integers of any shape.
          name: Ignored.

        Returns:
          The rows, of shape `indices.shape + [dim]`.

        Raises:
          tf.errors.InvalidArgumentError: If an index of any process is out of
            range. All processes raise this error.
        """
        del name
        self.require_current()
        ids = tf.cast(tf.convert_to_tensor(indices), tf.int64)
        rows = self._transfer.sparse_read(self, tf.reshape(ids, [-1]))
        dim = known_size(self.block, 1)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], 0))
        rows.set_shape(ids.shape.concatenate([dim]))
        return rows

    def assign(self, value: Any) -> None:
        """Assigns the rows of this process from the unsharded table.

        Call the method in all processes with the same value.

        Args:
          value: All rows, `[num_rows, dim]`.

        Raises:
          ValueError: If `value` has another shape.
        """
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(
                f"Table {self.name!r} must be assigned a value of shape "
                f"{tuple(self.shape)}. Received: shape {tuple(value.shape)}."
            )
        if self.rows:
            self.block.assign(
                tf.cast(value[self.rows.start : self.rows.stop], self.dtype)
            )

    def _require_eager(self, method: str) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"`{method}` of table {self.name!r} must be called outside of "
                "tf.function, by all processes together, because the table is "
                "sharded over processes. Inside a tf.function, use "
                "`sparse_read` in a replica."
            )
        self.require_current()

    def require_current(self) -> None:
        """Raises a RuntimeError if a resize has replaced the table."""
        if self.replaced:
            raise RuntimeError(replaced_message(self.name))

    def _raise_conversion(self) -> NoReturn:
        """Raises an error, because a conversion can be in only one process.

        Raises:
          NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"Table {self.name!r} is sharded over processes, and is not "
            "converted to a tensor or an array implicitly, because all "
            "processes must send their rows. Call `numpy`, `blocks` or "
            "`sparse_read` in all processes. tlm.export writes a SavedModel. "
            "The attribute `block` has the rows of this process."
        )

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        """Raises an error; see `_raise_conversion`."""
        self._raise_conversion()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error; see `_raise_conversion`."""
        self._raise_conversion()

    def gather(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Sends all rows to the first process, in blocks.

        All processes must call this method together and must iterate over the
        complete result.

        Yields:
          In the first process, the index of the first row of each block and the
          values `[rows, dim]` of the block. In other processes, the iterator is
          empty.
        """
        self.require_current()
        return self._transfer.gather(self)

    def slice_spec(self, first: int, count: int) -> str:
        """Returns the slice spec of `count` rows, starting with row `first`."""
        return slice_specs.of_rows(self.shape.as_list(), first, count)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # There are no children, because a checkpoint contains the unsharded
        # table instead of `block`.
        return {}

    def _gather_saveables_for_checkpoint(self):
        def saveable(name: str = self.name):
            self._restored_rows = _Rows(self, name)
            return self._restored_rows

        return {tf_private.VARIABLE_VALUE_KEY: saveable}

    def _checkpoint_adapter(self, path: str) -> None:
        # TensorFlow's restore calls this method after it has created the
        # saveable, and before it reads the file.
        rows, self._restored_rows = self._restored_rows, None
        if path is not None and rows is not None:
            rows.read_local_rows()

    def _copy_trackable_to_cpu(self, object_map):
        # An asynchronous save calls this method before it returns. A thread of
        # each process later sends the rows of the copies to the first process.
        if self not in object_map:
            with tf.init_scope(), tf.device(embedding_tables.HOST):
                block = tf_private.ResourceVariable(
                    tf.zeros_like(self.block), trainable=False, name=self.name
                )
            object_map[self] = DividedTable(
                self.name,
                block,
                self.row_partition,
                self._rank,
                self._transfer.in_background(),
            )
        object_map[self].block.assign(self.block.read_value())


class _Rows(tf_private.SaveableObject):
    """A saveable that saves the full table and restores the local rows.

    The first process saves the full table. Each process restores only the rows
    of its shard.
    """

    def __init__(self, table: DividedTable, key: str):
        self._table = table
        self._key = key
        super().__init__(None, [self._spec("")], key)

    def _spec(self, slice_spec: str):
        return tf_private.SaveSpec(
            self._value,
            slice_spec,
            self._key,
            self._table.dtype,
            self._table.block.device,
        )

    def _value(self) -> tf.Tensor | None:
        self._check_no_saved_model()
        if register_table(self._table, self._key):
            return None
        return gather_rows(self._table)

    def _check_no_saved_model(self):
        # When a program writes a SavedModel, TensorFlow traces the functions
        # that save and restore variables. In this case, the methods of this
        # class raise an error, because no process has the full table.
        if not tf.executing_eagerly():
            self._table._raise_conversion()

    def read_local_rows(self):
        """Limits the restore to the rows of this process.

        If TensorFlow cannot read slices of the dtype, the full table is read,
        and `restore` selects the rows.
        """
        rows = self._table.rows
        if not rows:
            self.specs = []
        elif self._table.dtype in tf_private.SLICEABLE_DTYPES:
            spec = self._table.slice_spec(rows.start, len(rows))
            self.specs = [self._spec(spec)]

    def restore(self, restored_tensors, restored_shapes):
        del restored_shapes
        self._check_no_saved_model()
        if not self.specs:
            return None
        value = restored_tensors[0]
        if self._table.dtype not in tf_private.SLICEABLE_DTYPES:
            if value.shape != self._table.shape:
                raise ValueError(
                    f"The checkpoint must contain table {self._table.name!r} "
                    f"with the shape {self._table.shape}. Received: a tensor "
                    f"of shape {value.shape}. Restore the checkpoint into an "
                    "embedding with the same number of rows."
                )
            rows = self._table.rows
            value = value[rows.start : rows.stop]
        return self._table.block.assign(value)


class DividedTables:
    """A creator of the sharded tables of an embedding.

    Attributes:
      transfer: Transfer of rows between the processes.
    """

    def __init__(self, group: Processes):
        """Stores the processes, and patches TensorFlow's saver."""
        self._group = group
        self.transfer = RowTransfer(group)
        patches.ensure("sharded_tables")

    def create(self, spec: config.EmbeddingSpec) -> dict[str, dict[str, Any]]:
        """Creates the variables of this process.

        For a given seed, the initial values equal the rows of an unsharded
        table in a single process.

        Returns:
          `DividedTable` objects in the structure that `tables.create_tables`
          returns.
        """
        group = self._group
        variables = embedding_tables.create_tables(
            spec, partition.FixedShardsPartitioner(group.size), only=group.rank
        )
        for table in spec.tables:
            row_partition = _partition_of(table, group.size)
            for name, variable in variables[table.name].items():
                if name != embedding_tables.ROUNDING_STEPS:
                    variables[table.name][name] = DividedTable(
                        table.name
                        if name == embedding_tables.PARAMETERS
                        else f"{table.name}/{name}",
                        variable,
                        row_partition,
                        group.rank,
                        self.transfer,
                    )
        return variables


def _partition_of(
    table: config.TableSpec, num_processes: int
) -> partition.RowPartition:
    """Returns the assignment of the rows of a table to processes."""
    if table.vocabulary is None:
        return partition.RowPartition.div(
            table.num_rows, min(num_processes, table.num_rows)
        )
    return bucket_layout.row_partition(
        bucket_layout.partition_over_processes(
            table.vocabulary.settings.num_buckets, num_processes
        )
    )
