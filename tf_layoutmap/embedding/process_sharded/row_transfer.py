"""Transfer of rows of sharded tables between processes, outside of steps."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap.embedding.processes import Processes
from tf_layoutmap.sharded.routing.checks import known_size

# Number of float32 values (1 MiB) that each process sends to the first process
# at a time. The first process would not return the memory of much larger blocks
# to the system.
_CHUNK = 2**18


class TableShard(Protocol):
    """The rows of a sharded table in this process; see `ProcessShardedTable`.

    Attributes:
      name: Name of the table.
      dtype: Dtype of the stored rows.
      row_partition: Assignment of rows to processes.
      block: Variable with the rows of this process.
    """

    name: str
    dtype: tf.DType
    row_partition: partition.RowPartition
    block: Any


class RowTransfer:
    """Transfer of the rows of sharded tables between processes.

    All processes must call the same methods together.
    """

    def __init__(self, group: Processes):
        """Stores the processes."""
        self._group = group
        self._background: RowTransfer | None = None
        self._read_functions: weakref.WeakKeyDictionary[TableShard, Any] = (
            weakref.WeakKeyDictionary()
        )

    def in_background(self) -> RowTransfer:
        """Returns an object for a thread that runs beside training steps."""
        if self._background is None:
            self._background = RowTransfer(self._group.in_background())
        return self._background

    def gather(self, table: TableShard) -> Iterator[tuple[int, tf.Tensor]]:
        """Sends all rows to the first process, in blocks."""
        for block in self._interleaved_blocks(table):
            if self._group.rank == 0:
                yield block

    def gather_everywhere(
        self, table: TableShard
    ) -> Iterator[tuple[int, tf.Tensor]]:
        """Yields what `gather` yields, but in all processes."""
        return self._interleaved_blocks(table)

    def _interleaved_blocks(
        self, table: TableShard
    ) -> Iterator[tuple[int, tf.Tensor]]:
        """Yields a block of each shard, then the next block of each shard."""
        sizes = table.row_partition.sizes
        rows_at_once = max(1, _CHUNK // _values_per_row(table.block))
        for first in range(0, max(sizes), rows_at_once):
            size = min(rows_at_once, max(sizes) - first)
            gathered = self._all_gather(
                _padded(table.block[first : first + size], size)
            )
            for shard, begin in enumerate(range(0, len(sizes) * size, size)):
                count = min(size, max(0, sizes[shard] - first))
                if count:
                    yield (
                        table.row_partition.offsets[shard] + first,
                        tf.cast(gathered[begin : begin + count], table.dtype),
                    )

    def blocks(
        self, table: TableShard, rows_at_once: int
    ) -> Iterator[tf.Tensor]:
        """Yields all rows in order, in blocks, in all processes."""
        offsets = table.row_partition.offsets
        for begin, end in itertools.pairwise(offsets):
            for first in range(begin, end, rows_at_once):
                yield self.read(table, first, min(first + rows_at_once, end))

    def read(self, table: TableShard, first: int, stop: int) -> tf.Tensor:
        """Returns the rows `[first, stop)`, in all processes."""
        offsets = table.row_partition.offsets
        parts = []
        for owner, (begin, end) in enumerate(itertools.pairwise(offsets)):
            start, count = max(first, begin), min(stop, end) - max(first, begin)
            if count <= 0:
                continue
            rows = (
                _sendable(table.block[start - begin : start - begin + count])
                if owner == self._group.rank
                else tf.zeros(
                    [count, *table.block.shape[1:]],
                    _dtype_of_messages(table.dtype),
                )
            )
            parts.append(tf.cast(self._broadcast(rows, owner), table.dtype))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def sparse_read(self, table: TableShard, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows of a table; see `ProcessShardedTable.sparse_read`.

        Args:
          table: The table.
          ids: `[num_ids]` int64 row numbers, which can differ between
            processes.
        """
        if not tf.executing_eagerly():
            return self._read_in_replica(table, ids)
        if table not in self._read_functions:
            # A strong reference from the value to the key would keep the table
            # alive after a resize has replaced it.
            current = weakref.ref(table)

            def read(ids: tf.Tensor) -> tf.Tensor:
                shard = current()
                assert shard is not None
                return self._group.run(self._read_in_replica, shard, ids)

            self._read_functions[table] = tf.function(
                read, input_signature=[tf.TensorSpec([None], tf.int64)]
            )
        return self._read_functions[table](ids)

    def _read_in_replica(self, table: TableShard, ids: tf.Tensor) -> tf.Tensor:
        group, dim = self._group, known_size(table.block, 1)
        offsets = table.row_partition.offsets
        owners = tf.searchsorted(
            tf.constant(offsets[1:-1], tf.int64), ids, side="right"
        )
        order = tf.argsort(owners, stable=True)
        is_bad = (ids < 0) | (ids >= offsets[-1])
        head = _Head(
            has_invalid_id=tf.reduce_any(is_bad),
            invalid_id=tf.concat([tf.boolean_mask(ids, is_bad), [0]], 0)[0],
            is_replaced=_is_empty(table.block),
        )
        sizes = tf.math.bincount(
            owners,
            minlength=group.size,
            maxlength=group.size,
            dtype=tf.int64,
        )
        gathered = group.all_gather(
            tf.concat([head.as_vector(), sizes], 0)[tf.newaxis]
        )
        num_head = len(_Head._fields)
        gathered = tf.ensure_shape(
            gathered, [group.size, num_head + group.size]
        )
        heads = _Head(*tf.unstack(gathered[:, :num_head], axis=1))
        with tf.control_dependencies(_check_heads(table, heads)):
            sizes = tf.identity(gathered[:, num_head:])
        starts = tf.constant([*offsets[:-1]], tf.int64)
        local_rows = tf.gather(ids - tf.gather(starts, owners), order)
        requests = group.exchange(
            tf.split(
                tf.cast(local_rows, tf.int32),
                sizes[group.rank],
                num=group.size,
            ),
            sizes,
        )
        rows = group.exchange(
            [
                tf.reshape(
                    tf.cast(table.block.sparse_read(request), tf.float32), [-1]
                )
                for request in requests
            ],
            tf.transpose(sizes) * dim,
        )
        by_owner = tf.reshape(tf.concat(rows, 0), [-1, dim])
        return tf.cast(tf.gather(by_owner, tf.argsort(order)), table.dtype)

    def is_in_replica(self) -> bool:
        """Whether the caller is a replica, which can call collectives."""
        return self._group.is_in_replica()

    def of_processes(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the int64 scalar of each process, in a replica."""
        return self._group.all_gather(value[tf.newaxis])

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all processes, concatenated along axis 0.

        Args:
          rows: Rows of this process, float32, int32 or int64. All processes
            must pass tensors with the same shape.
        """
        return self._all_gather(rows)

    @tf.function(reduce_retracing=True)
    def _all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        return self._group.run(self._group.all_gather, rows)

    @tf.function
    def _broadcast(self, rows: tf.Tensor, source: int) -> tf.Tensor:
        return self._group.run(lambda: self._group.broadcast(rows, source))


def _values_per_row(block: Any) -> int:
    return max(1, int(block.shape[1:].num_elements()))


def _dtype_of_messages(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which processes send values of `dtype`.

    Collectives do not support all dtypes. All conversions are exact.
    """
    if dtype.is_floating:
        return tf.float32
    return tf.int64 if dtype == tf.int64 else tf.int32


def _sendable(rows: tf.Tensor) -> tf.Tensor:
    return tf.cast(rows, _dtype_of_messages(rows.dtype))


def _padded(rows: tf.Tensor, size: int) -> tf.Tensor:
    """Returns rows that can be sent, followed by zeros up to `size` rows."""
    padding = [[0, size - known_size(rows)]]
    padding += [[0, 0]] * (rows.shape.rank - 1)
    return _sendable(tf.pad(rows, padding))


def _is_empty(block: Any) -> tf.Tensor:
    """Returns whether a variable has no rows, whatever its static shape."""
    with tf.device(block.device):
        return tf.raw_ops.VariableShape(input=block.handle)[0] == 0


def replaced_message(name: str) -> str:
    """Returns the message for reads of a variable that a resize replaced."""
    return (
        f"A resize of a vocabulary has replaced table {name}. Read "
        "`embedding_tables` or `slot_variables` of the embedding again, and "
        "trace functions that read the table again."
    )


class _Head(NamedTuple):
    """What a process sends to all processes before it requests rows.

    Attributes:
      has_invalid_id: Whether an id of the process is out of range.
      invalid_id: The first of these ids, or 0.
      is_replaced: Whether a resize has removed the rows of the process since
        the function was traced.
    """

    has_invalid_id: tf.Tensor
    invalid_id: tf.Tensor
    is_replaced: tf.Tensor

    def as_vector(self) -> tf.Tensor:
        """Returns the values as an int64 vector."""
        return tf.stack([tf.cast(value, tf.int64) for value in self])


def _check_heads(table: TableShard, heads: _Head) -> list[tf.Operation]:
    """Returns checks that the rows exist and that all ids are in range.

    Args:
      table: The table.
      heads: Vectors with the values of all processes.
    """
    is_bad = heads.has_invalid_id > 0
    process = tf.argmax(is_bad)
    return [
        tf.debugging.Assert(
            tf.reduce_all(heads.is_replaced == 0),
            [replaced_message(table.name)],
        ),
        tf.debugging.Assert(
            ~tf.reduce_any(is_bad),
            [
                tf.strings.join(
                    [
                        "Process ",
                        tf.strings.as_string(process),
                        ": id ",
                        tf.strings.as_string(
                            tf.gather(heads.invalid_id, process)
                        ),
                        f" is outside table {table.name} with "
                        f"{table.row_partition.num_rows} rows",
                    ]
                )
            ],
        ),
    ]
