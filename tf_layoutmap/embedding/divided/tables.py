"""Tables that are sharded over processes, with collectives and checkpoints.

In each process, `DividedTable` holds the rows of one shard. `Group` exchanges
vectors of unequal sizes between the processes. `Group` uses TensorFlow's
collectives, which are not part of the public strategy API. The all-to-all
collective requires blocks of equal size. Therefore `Group` pads all blocks to
the size of the largest block, and its callers exchange the sizes first.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import paths, tf_private
from tf_layoutmap._patches import engine
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import checkpoint_files

# Timeout of collectives. A process can wait this long while another process
# writes a checkpoint. If a process dies, the other processes detect the closed
# connection before the timeout.
TIMEOUT_SECONDS = 600

_INT32 = (tf.uint32, tf.int32)


class Group:
    """The processes of a `MultiWorkerMirroredStrategy`.

    Attributes:
      size: Number of processes.
      rank: Index of this process.
    """

    def __init__(self, strategy: Any):
        """Reads the processes of a strategy in cross-replica context.

        Raises:
          NotImplementedError: If a process has several replicas.
        """
        self._launcher = tf_private.host_collectives_of(strategy)
        self.size = int(strategy.num_replicas_in_sync)
        if len(strategy.extended.worker_devices) != 1:
            raise NotImplementedError(
                'Argument `over_processes` must be "copied" if a process has '
                "several devices, because a process that owns a shard must "
                'have one replica. Received: "sharded" with the devices '
                f"{strategy.extended.worker_devices}."
            )
        # Strategies do not have an attribute for the index of the process.
        self.rank = int(
            strategy.run(
                lambda: (
                    tf.distribute.get_replica_context().replica_id_in_sync_group
                )
            )
        )

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensors of all processes, concatenated along axis 0.

        Args:
          tensor: Tensor of this process. All processes must pass tensors with
            the same shape.
        """
        launcher = self._launcher
        with tf.device(tf_private.device_of_collectives(launcher)):
            return tf_private.all_gather(
                tensor,
                timeout=TIMEOUT_SECONDS,
                **tf_private.collective_arguments(launcher),
            )

    def exchange(
        self,
        blocks: Sequence[tf.Tensor],
        sizes: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Sends a block to each process, and returns the received blocks.

        Args:
          blocks: One vector of float32, int32 or uint32 for each receiving
            process.
          sizes: `[size, size]` int64 sizes of the blocks by sender and
            receiver. The tensor must be equal in all processes.

        Returns:
          The block that this process has received from each process.
        """
        dtype = blocks[0].dtype
        largest = tf.maximum(tf.reduce_max(sizes), 1)
        padded = tf.stack(
            [
                tf.pad(
                    tf.bitcast(one, tf.int32) if dtype in _INT32 else one,
                    [[0, largest - tf.size(one, tf.int64)]],
                )
                for one in blocks
            ]
        )
        launcher = self._launcher
        with tf.device(tf_private.device_of_collectives(launcher)):
            received = tf_private.all_to_all(
                padded,
                timeout=TIMEOUT_SECONDS,
                **tf_private.collective_arguments(launcher),
            )
        received = tf.ensure_shape(received, [self.size, None])
        return [
            tf.bitcast(received[other, : sizes[other, self.rank]], dtype)
            for other in range(self.size)
        ]


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
            # If the checkpoint has a single file or is on a remote file system,
            # TensorFlow writes the merged checkpoint directly to `target`.
            if len(self._prefixes) == 1 or not paths.is_local(target):
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
        for path in tf.io.gfile.glob(f"{self.aside}*"):
            tf.io.gfile.remove(path)

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
    dtypes = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
    return [(name, "", tf.as_dtype(dtypes[name])) for name in sorted(dtypes)]


# Number of float32 values (1 MiB) that each process sends to the first process
# at a time. The first process would not return the memory of much larger blocks
# to the system.
_CHUNK = 2**18


class DividedTable(tf_private.Trackable):
    """A table or a slot variable that is sharded over processes.

    Shards are contiguous blocks of rows in the order of the processes. The
    sizes of the shards differ by at most one row. If a table has fewer rows
    than there are processes, each of the first processes has one row, and the
    remaining processes have no rows.

    Attributes:
      name: Name of the table or slot variable.
      shape: Unsharded shape, `[num_rows, dim]`.
      dtype: Dtype of the stored rows.
      row_partition: Assignment of rows to processes.
      rows: `range` of the rows of this process.
      block: `tf.Variable` of shape `[len(rows), dim]` with the rows of this
        process. If the process has no rows, `block` has one row that is never
        read.
    """

    def __init__(
        self,
        name: str,
        block: Any,
        row_partition: partition.RowPartition,
        rank: int,
        gather: Callable[[Any], Iterator[tuple[int, tf.Tensor]]],
    ):
        """Creates the table from the variable of this process.

        Args:
          name: Name of the table.
          block: Variable with the rows of this process.
          row_partition: Assignment of rows to processes.
          rank: Index of this process.
          gather: Function that implements the method `gather`. The argument of
            the function is the table.
        """
        self.name = name
        self.shape = tf.TensorShape(
            [row_partition.num_rows, known_size(block, 1)]
        )
        self.dtype = tf.as_dtype(block.dtype)
        self.row_partition = row_partition
        first, size = (
            (row_partition.offsets[rank], row_partition.sizes[rank])
            if rank < row_partition.num_shards
            else (row_partition.num_rows, 0)
        )
        self.rows = range(first, first + size)
        self.block = block
        self._gather = gather
        self._restored_rows: _Rows | None = None

    def __repr__(self) -> str:
        return (
            f"<DividedTable {self.name!r} shape={tuple(self.shape)} "
            f"dtype={self.dtype.name} rows={self.rows}>"
        )

    def numpy(self) -> Any:
        """Raises an error, because no process has all rows of the table.

        Raises:
          NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"Table {self.name!r} is sharded over processes, and no process "
            "has all of its rows. Save a checkpoint and restore it into a "
            "TPUEmbedding in one process, or with "
            'over_processes="copied", which also supports exports. The '
            "attribute `block` has the rows of this process."
        )

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        """Raises an error; see `numpy`."""
        return self.numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error; see `numpy`."""
        return self.numpy()

    def gather(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Sends all rows to the first process, in blocks.

        All processes must call this method together and must iterate over the
        complete result.

        Yields:
          In the first process, the index of the first row of each block and the
          values `[rows, dim]` of the block. In other processes, the iterator is
          empty.
        """
        return self._gather(self)

    def slice_spec(self, first: int, count: int) -> str:
        """Returns the slice spec of `count` rows, starting with row `first`."""
        shape = self.shape.as_list()
        return tf.Variable.SaveSliceInfo(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
            full_name=self.name,
            full_shape=shape,
            var_offset=[first, 0],
            var_shape=[count, shape[1]],
        ).spec

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
        # TensorFlow catches `NotImplementedError` here, and would then write a
        # checkpoint from a second thread, whose collectives would run at the
        # same time as the collectives of the steps.
        raise RuntimeError(
            "Tables that are sharded over processes do not support "
            "asynchronous checkpoints, because all processes participate in a "
            "save. Use CheckpointOptions without `enable_async` (table "
            f"{self.name!r})."
        )


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
            self._table.numpy()

    def read_local_rows(self):
        """Limits the restore to the rows of this process."""
        rows = self._table.rows
        self.specs = (
            [self._spec(self._table.slice_spec(rows.start, len(rows)))]
            if rows
            else []
        )

    def restore(self, restored_tensors, restored_shapes):
        del restored_shapes
        self._check_no_saved_model()
        if not self.specs:
            return None
        return self._table.block.assign(restored_tensors[0])


class DividedTables:
    """A creator of the sharded tables of an embedding."""

    def __init__(self, group: Group, strategy: Any):
        """Stores the processes, and patches TensorFlow's saver."""
        self._group = group
        self._strategy = strategy
        engine.ensure("sharded_tables")

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
            row_partition = partition.RowPartition.div(
                table.num_rows, min(group.size, table.num_rows)
            )
            for name, variable in variables[table.name].items():
                if name != embedding_tables.ROUNDING_STEPS:
                    variables[table.name][name] = DividedTable(
                        table.name
                        if name == embedding_tables.PARAMETERS
                        else f"{table.name}/{name}",
                        variable,
                        row_partition,
                        group.rank,
                        self._gather,
                    )
        return variables

    def _gather(self, table: DividedTable) -> Iterator[tuple[int, tf.Tensor]]:
        """Sends all rows to the first process; see `DividedTable.gather`."""
        sizes = table.row_partition.sizes
        rows_at_once = max(1, _CHUNK // known_size(table.block, 1))
        for first in range(0, max(sizes), rows_at_once):
            size = min(rows_at_once, max(sizes) - first)
            local_rows = table.block[first : first + size]
            missing = size - int(local_rows.shape[0])
            # All processes gather float32 values. The conversion of 16-bit
            # values to float32 is exact.
            gathered = self._all_gather(
                tf.cast(tf.pad(local_rows, [[0, missing], [0, 0]]), tf.float32)
            )
            if self._group.rank == 0:
                for shard, begin in enumerate(
                    range(0, len(sizes) * size, size)
                ):
                    count = min(size, max(0, sizes[shard] - first))
                    if count:
                        yield (
                            table.row_partition.offsets[shard] + first,
                            tf.cast(
                                gathered[begin : begin + count], table.dtype
                            ),
                        )

    @tf.function(reduce_retracing=True)
    def _all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        return self._strategy.experimental_local_results(
            self._strategy.run(self._group.all_gather, (rows,))
        )[0]
