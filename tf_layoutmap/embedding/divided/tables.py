"""Tables of which each process has the rows of one shard."""

# DOC-MERGE: Writes divided tables into a checkpoint, a part of them in memory at a time.
#
# TensorFlow asks for the values of all tensors before it writes the first. So a
# save of it writes everything else, aside, and is told that tables have no value;
# then the processes bring their rows to the first, which writes them in files of
# some size as they come, and TensorFlow makes one checkpoint of all files.
#
# DOC-MERGE: What processes send to each other in a step: vectors of unequal sizes.
#
# TensorFlow's collectives do it, which are not part of the interface of its
# strategies. Its all-to-all sends blocks of one size; so sizes are told first,
# and the largest block of a step is that of all.
#
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

# How long a process waits for the others, which may be writing a checkpoint.
# One that died is noticed earlier, by its connection.
TIMEOUT_SECONDS = 600

_INT32 = (tf.uint32, tf.int32)


class Group:
    """The processes of a `MultiWorkerMirroredStrategy`.

    Attributes:
      size: How many they are.
      rank: The number of this one.
    """

    def __init__(self, strategy: Any):
        """Takes the strategy, outside of its replicas.

        Raises:
          NotImplementedError: If a process has several replicas.
        """
        self._launcher = tf_private.host_collectives_of(strategy)
        self.size = int(strategy.num_replicas_in_sync)
        if len(strategy.extended.worker_devices) != 1:
            raise NotImplementedError(
                'Argument `over_processes` must be "copied" where a process '
                "has several devices: the parts of a table belong to "
                'processes of one replica. Received: "divided" with the '
                f"devices {strategy.extended.worker_devices}."
            )
        # Not under a name of its own in the interface of strategies.
        self.rank = int(
            strategy.run(
                lambda: (
                    tf.distribute.get_replica_context().replica_id_in_sync_group
                )
            )
        )

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensors of all processes, one after the other.

        Args:
          tensor: Of one shape in all processes.
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
        """Sends each process its block, and returns what came from each.

        Args:
          blocks: By process, a vector of float32, int32 or uint32.
          sizes: `[size, size]` int64: of the block from each process to each,
            the same in all processes.

        Returns:
          By process, the block that it has sent here.
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


# Bytes that the first process collects in memory before it writes them to a
# file. The C library keeps much of it for the process: files of 128 MiB left it
# 300 MB larger after its first save.
PART_BYTES = 1 << 25
# Of a checkpoint: very large tables have larger files instead of more.
_MOST_PARTS = 256


class Gathered(Protocol):
    """A table whose rows all processes bring to the first one.

    Attributes:
      dtype: How rows are stored.
      shape: Rows and columns of all processes together.
    """

    dtype: tf.DType
    shape: tf.TensorShape

    def gather(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Yields the first row of each block, and its values."""
        ...

    def slice_spec(self, first: int, count: int) -> str:
        """Returns how a checkpoint calls `count` rows from `first` on."""
        ...


class _Noted(threading.local):
    """The tables that a save of this thread has met, and their keys."""

    tables: list[tuple[Gathered, str]] | None = None


_noted = _Noted()


def register_tables(table: Gathered, key: str) -> bool:
    """Lets a table be written after all else; false where nobody will.

    Args:
      table: It.
      key: The name of its tensor in the checkpoint.
    """
    if _noted.tables is None:
        return False
    _noted.tables.append((table, key))
    return True


def gathered(table: Gathered) -> tf.Tensor | None:
    """Returns all rows in the first process, and None in the others."""
    found = sorted(table.gather(), key=lambda one: one[0])
    return tf.concat([rows for _, rows in found], 0) if found else None


def save(
    original: Callable[..., Any],
    saver: Any,
    file_prefix: Any,
    checkpoint_number: Any = None,
    session: Any = None,
    options: Any = None,
) -> Any:
    """Saves as `original` does, and divided tables part by part."""
    if not tf.executing_eagerly() or not isinstance(
        file_prefix, (str, os.PathLike)
    ):
        return original(saver, file_prefix, checkpoint_number, session, options)
    target = os.fspath(file_prefix)
    if checkpoint_number:
        target = f"{target}-{int(checkpoint_number)}"
    parts = _Parts(f"{target}.being-written")
    _noted.tables = found = []
    try:
        try:
            parts.try_to(original, saver, parts.aside, None, session, options)
        finally:
            _noted.tables = None
        parts.expect(
            sum(
                table.dtype.size * table.shape.num_elements()
                for table, _ in found
            )
        )
        for table, key in found:
            parts.add(table, key)
        return parts.become(target)
    finally:
        parts.remove()


class _Parts:
    """Files that tables are written to, one after the other.

    After an error nothing more is written, but all rows are still brought here:
    the other processes would wait for this one.

    Attributes:
      aside: The beginning of their names, and the name of the first, which has
        all that is not divided.
    """

    def __init__(self, aside: str):
        """Takes the names; nothing is written."""
        self.aside = aside
        self._prefixes = [aside]
        self._error: Exception | None = None
        self._num_bytes = 0
        self._most_bytes = PART_BYTES
        self._slices: list[tuple[str, str, tf.Tensor]] = []
        # Name, slice and dtype of the tensors in each file after the first.
        self._written: list[list[tuple[str, str, tf.DType]]] = []

    def expect(self, num_bytes: int) -> None:
        """Sets the size of files by the bytes of all tables together."""
        self._most_bytes = max(PART_BYTES, num_bytes // _MOST_PARTS)

    def try_to(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function unless there was an error; notes its error."""
        if self._error is None:
            try:
                function(*arguments)
            except Exception as error:
                self._error = error

    def add(self, table: Gathered, key: str) -> None:
        """Writes a table; all processes call it."""
        if table.dtype not in tf_private.SLICEABLE_DTYPES:
            rows = gathered(table)
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

    def become(self, target: str) -> tf.Tensor:
        """Makes one checkpoint of all files; returns its name.

        Raises:
          Exception: An earlier write failed.
          OSError: The files cannot be renamed.
        """
        if self._slices:
            self._flush()
        if self._error is not None:
            raise self._error
        with tf.device("/cpu:0"):
            # TensorFlow itself writes and replaces a single file.
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
        """Removes what is left of the files."""
        for path in tf.io.gfile.glob(f"{self.aside}*"):
            tf.io.gfile.remove(path)

    def _merge(self, target: str) -> None:
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=self._prefixes,
            destination_prefix=target,
            delete_old_dirs=False,
        )

    def _join_last(self) -> None:
        """Replaces the last two files by one."""
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
            self.try_to(
                functools.partial(
                    tf.raw_ops.SaveV2,
                    prefix=self._prefixes[-1],
                    tensor_names=list(names),
                    shape_and_slices=list(specs),
                    tensors=list(values),
                )
            )


def _tensors_of(prefix: str) -> list[tuple[str, str, tf.DType]]:
    """Returns name, slice and dtype of all tensors of a checkpoint."""
    dtypes = tf.train.load_checkpoint(prefix).get_variable_to_dtype_map()
    return [(name, "", tf.as_dtype(dtypes[name])) for name in sorted(dtypes)]


# Values of a table that each process sends to the first one at a time: 1 MiB.
# Much larger blocks stay in the memory of the process after they are freed.
_CHUNK = 2**18


class DividedTable(tf_private.Trackable):
    """A table, or a slot variable of it, divided among processes.

    The first rows are in the first process, and so on: as many in each, but
    for one. A table with fewer rows than there are processes is in the first
    of them.

    Attributes:
      name: Of the table or slot variable.
      shape: Of the whole, `[num_rows, dim]`.
      dtype: How rows are stored.
      rows: Which rows this process has, a `range`.
      block: Their `tf.Variable`, `[len(rows), dim]`; where the process has
        none, one row that nobody asks for.
    """

    def __init__(
        self,
        name: str,
        block: Any,
        cut: partition.RowPartition,
        rank: int,
        gather: Callable[[Any], Iterator[tuple[int, tf.Tensor]]],
    ):
        """Takes the variable of this process.

        Args:
          name: Of the whole.
          block: What this process has of it.
          cut: Which rows the processes have.
          rank: The number of this process.
          gather: Does what the method of this name does, of this object.
        """
        self.name = name
        self.shape = tf.TensorShape([cut.num_rows, known_size(block, 1)])
        self.dtype = tf.as_dtype(block.dtype)
        self.cut = cut
        first, size = (
            (cut.offsets[rank], cut.sizes[rank])
            if rank < cut.num_shards
            else (cut.num_rows, 0)
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
        """Refuses, as every use of its value does.

        Raises:
          NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"Table {self.name!r} is divided among processes, and none has "
            "all of its rows. Save a checkpoint and restore it into a "
            'TPUEmbedding of one process, or with over_processes="copied", '
            "which exports too; `block` is what this process has."
        )

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        """Refuses; see `numpy`."""
        return self.numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses; see `numpy`."""
        return self.numpy()

    def gather(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Brings all rows to the first process, some of each shard at a time.

        All processes go through it to its end, at the same time.

        Yields:
          In the first process the first row of a block, and its values
          `[rows, dim]`; in others nothing.
        """
        return self._gather(self)

    def slice_spec(self, first: int, count: int) -> str:
        """Returns how a checkpoint calls `count` rows from `first` on."""
        shape = self.shape.as_list()
        return tf.Variable.SaveSliceInfo(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
            full_name=self.name,
            full_shape=shape,
            var_offset=[first, 0],
            var_shape=[count, shape[1]],
        ).spec

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # It is one tensor, and not that of its block.
        return {}

    def _gather_saveables_for_checkpoint(self):
        def saveable(name: str = self.name):
            self._restored_rows = _Rows(self, name)
            return self._restored_rows

        return {tf_private.VARIABLE_VALUE_KEY: saveable}

    def _checkpoint_adapter(self, path: str) -> None:
        # A restore asks between making the saveable and reading the file.
        rows, self._restored_rows = self._restored_rows, None
        if path is not None and rows is not None:
            rows.read_own()

    def _copy_trackable_to_cpu(self, object_map):
        raise NotImplementedError(
            "Tables that are divided among processes cannot be saved "
            "asynchronously: the processes meet in a save. Leave "
            "`experimental_enable_async_checkpoint` out (table "
            f"{self.name!r})."
        )


class _Rows(tf_private.SaveableObject):
    """Saves a whole table in the first process, and restores own rows."""

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
        self._refuse_saved_model()
        if register_tables(self._table, self._key):
            return None
        return gathered(self._table)

    def _refuse_saved_model(self):
        # One that is saved traces how its variables are saved and restored.
        if not tf.executing_eagerly():
            self._table.numpy()

    def read_own(self):
        """Lets the restore read the rows of this process only."""
        rows = self._table.rows
        self.specs = (
            [self._spec(self._table.slice_spec(rows.start, len(rows)))]
            if rows
            else []
        )

    def restore(self, restored_tensors, restored_shapes):
        del restored_shapes
        self._refuse_saved_model()
        if not self.specs:
            return None
        return self._table.block.assign(restored_tensors[0])


class DividedTables:
    """Creates the tables of an embedding, and brings them together."""

    def __init__(self, group: Group, strategy: Any):
        """Takes the processes."""
        self._group = group
        self._strategy = strategy
        engine.ensure("divided")

    def create(self, spec: config.EmbeddingSpec) -> dict[str, dict[str, Any]]:
        """Creates the variables of this process.

        First values are those of one process with as many shards: so two
        shards are not alike where processes have one seed.

        Returns:
          As `tables.create_tables`, with `DividedTable`s.
        """
        group = self._group
        found = embedding_tables.create_tables(
            spec, partition.FixedShardsPartitioner(group.size), only=group.rank
        )
        for table in spec.tables:
            cut = partition.RowPartition.div(
                table.num_rows, min(group.size, table.num_rows)
            )
            for name, variable in found[table.name].items():
                if name != embedding_tables.ROUNDING_STEPS:
                    found[table.name][name] = DividedTable(
                        table.name
                        if name == embedding_tables.PARAMETERS
                        else f"{table.name}/{name}",
                        variable,
                        cut,
                        group.rank,
                        self._gather,
                    )
        return found

    def _gather(self, table: DividedTable) -> Iterator[tuple[int, tf.Tensor]]:
        """Brings all rows to the first process; see `DividedTable.gather`."""
        sizes = table.cut.sizes
        rows_at_once = max(1, _CHUNK // known_size(table.block, 1))
        for first in range(0, max(sizes), rows_at_once):
            size = min(rows_at_once, max(sizes) - first)
            own = table.block[first : first + size]
            missing = size - int(own.shape[0])
            # float32 holds 16 bits as they are, and collectives take it.
            found = self._all_gather(
                tf.cast(tf.pad(own, [[0, missing], [0, 0]]), tf.float32)
            )
            if self._group.rank == 0:
                for shard, begin in enumerate(
                    range(0, len(sizes) * size, size)
                ):
                    count = min(size, max(0, sizes[shard] - first))
                    if count:
                        yield (
                            table.cut.offsets[shard] + first,
                            tf.cast(found[begin : begin + count], table.dtype),
                        )

    @tf.function(reduce_retracing=True)
    def _all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        return self._strategy.experimental_local_results(
            self._strategy.run(self._group.all_gather, (rows,))
        )[0]
