"""Collectives between the processes that hold shards of tables.

`Group` exchanges tensors between the processes. `Group` uses TensorFlow's
collectives, which are not part of the public strategy API. The all-to-all
collective requires blocks of equal size. Therefore `Group` pads all blocks to
the size of the largest block, and its callers exchange the sizes first.

No collective has a timeout. For each collective with a timeout, TensorFlow
starts a thread that sleeps until the timeout, also if the collective has ended.

`RowTransfer` sends rows of sharded tables to the first process or to all
processes, outside of steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import tf_private
from tf_layoutmap.sharded.routing.checks import known_size

_INT32 = (tf.uint32, tf.int32)

# Keys of the groups of collectives that run in the background. The keys of
# strategies are small numbers.
_group_keys = itertools.count(1 << 24)


class Group:
    """The processes of a `MultiWorkerMirroredStrategy`.

    Attributes:
      size: Number of processes.
      rank: Index of this process.
    """

    def __init__(self, strategy: Any, *, in_background: bool = False):
        """Reads the processes of a strategy in cross-replica context.

        Args:
          strategy: The strategy.
          in_background: Whether the collectives of this object run in another
            thread than training steps. Such an object has separate keys of
            collectives, because the order of the collectives of two threads
            can differ between processes. All processes must create these
            objects in the same order.

        Raises:
          NotImplementedError: If a process has several replicas.
        """
        self._launcher = tf_private.host_collectives_of(strategy)
        if in_background:
            self._launcher = tf_private.separate_launcher(
                self._launcher, next(_group_keys)
            )
        self.size = int(strategy.num_replicas_in_sync)
        if len(strategy.extended.worker_devices) != 1:
            raise NotImplementedError(
                'Argument `over_processes` must be "replicated" if a process '
                "has several devices, because a process that owns a shard must "
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
                **tf_private.collective_arguments(launcher),
            )

    def broadcast(self, tensor: tf.Tensor, source: int) -> tf.Tensor:
        """Returns the tensor of one process.

        Args:
          tensor: Tensor of this process. All processes must pass tensors with
            the same static shape and dtype.
          source: Index of the process whose tensor is returned.
        """
        launcher = self._launcher
        arguments = tf_private.collective_arguments(launcher)
        # A broadcast has no ordering token. The callers run one collective at a
        # time.
        del arguments["ordering_token"]
        with tf.device(tf_private.device_of_collectives(launcher)):
            if self.rank == source:
                return tf_private.broadcast_send(tensor, **arguments)
            return tf_private.broadcast_recv(
                tensor.shape,
                tensor.dtype,
                **arguments,
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
                **tf_private.collective_arguments(launcher),
            )
        received = tf.ensure_shape(received, [self.size, None])
        return [
            tf.bitcast(received[other, : sizes[other, self.rank]], dtype)
            for other in range(self.size)
        ]

    def check_errors(
        self,
        is_bad: tf.Tensor,
        error: tf.Tensor,
        undo: Callable[[tf.Tensor], tf.Operation | None] | None = None,
    ) -> tf.Tensor:
        """Raises an error in all processes if one process has an error.

        Args:
          is_bad: `[size]` bool tensor: whether each process has an error.
          error: Error message of this process, or an empty string.
          undo: Function that each process calls with the error message before
            it raises the error, or None. The function returns its last
            operation in a graph, and None otherwise.

        Returns:
          A tensor that is computed after the check.
        """

        def raise_error():
            points = tf.strings.unicode_decode(error, "UTF-8")[:_MESSAGE_SIZE]
            points = self.all_gather(
                tf.pad(points, [[0, _MESSAGE_SIZE - tf.size(points)]])[
                    tf.newaxis
                ]
            )
            first = tf.argmax(is_bad)
            points = tf.gather(points, first)
            # Single quotes are removed, because the message of an assertion
            # would show a backslash before each single quote.
            message = tf.strings.regex_replace(
                tf.strings.unicode_encode(
                    tf.boolean_mask(points, points > 0), "UTF-8"
                ),
                "'",
                "",
            )
            undone = None if undo is None else undo(message)
            with tf.control_dependencies([] if undone is None else [undone]):
                check = tf.debugging.Assert(
                    False,
                    [
                        tf.strings.join(
                            [
                                "Process ",
                                tf.strings.as_string(first),
                                ": ",
                                message,
                            ]
                        )
                    ],
                )
            with tf.control_dependencies([] if check is None else [check]):
                return tf.constant(True)

        return tf.cond(
            tf.reduce_any(is_bad), raise_error, lambda: tf.constant(True)
        )


# Maximum number of code points in an error message that a process sends to the
# other processes.
_MESSAGE_SIZE = 400

# Number of float32 values (1 MiB) that each process sends to the first process
# at a time. The first process would not return the memory of much larger blocks
# to the system.
_CHUNK = 2**18


class TableShard(Protocol):
    """The rows of a sharded table in this process; see `DividedTable`.

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

    def __init__(self, group: Group, strategy: Any):
        """Stores the processes and their strategy."""
        self._group = group
        self._strategy = strategy
        self._background: RowTransfer | None = None
        self._read_functions: weakref.WeakKeyDictionary[TableShard, Any] = (
            weakref.WeakKeyDictionary()
        )

    def in_background(self) -> RowTransfer:
        """Returns an object for a thread that runs beside training steps."""
        if self._background is None:
            self._background = RowTransfer(
                Group(self._strategy, in_background=True), self._strategy
            )
        return self._background

    def gather(self, table: TableShard) -> Iterator[tuple[int, tf.Tensor]]:
        """Sends all rows to the first process; see `DividedTable.gather`."""
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
        """Yields all rows in order, in blocks; see `DividedTable.blocks`."""
        for owner, (size, _) in enumerate(
            zip(table.row_partition.sizes, table.row_partition.offsets)
        ):
            for first in range(0, size, rows_at_once):
                count = min(rows_at_once, size - first)
                rows = (
                    _sendable(table.block[first : first + count])
                    if owner == self._group.rank
                    else tf.zeros(
                        [count, *table.block.shape[1:]],
                        _dtype_of_messages(table.dtype),
                    )
                )
                yield tf.cast(self._broadcast(rows, owner), table.dtype)

    def sparse_read(self, table: TableShard, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows of a table; see `DividedTable.sparse_read`.

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
                return self._strategy.experimental_local_results(
                    self._strategy.run(
                        lambda: self._read_in_replica(shard, ids)
                    )
                )[0]

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
        # The number of ids by owner, the first invalid id of each process, and
        # whether a resize has removed the rows since the function was traced.
        heads = group.all_gather(
            tf.concat(
                [
                    tf.math.bincount(
                        owners,
                        minlength=group.size,
                        maxlength=group.size,
                        dtype=tf.int64,
                    ),
                    tf.stack(
                        [
                            tf.cast(tf.reduce_any(is_bad), tf.int64),
                            tf.concat([tf.boolean_mask(ids, is_bad), [0]], 0)[
                                0
                            ],
                            tf.cast(_is_empty(table.block), tf.int64),
                        ]
                    ),
                ],
                0,
            )[tf.newaxis]
        )
        heads = tf.ensure_shape(heads, [group.size, group.size + 3])
        with tf.control_dependencies(_check_heads(table, heads)):
            sizes = tf.identity(heads[:, : group.size])
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
                    tf.cast(table.block.sparse_read(one), tf.float32), [-1]
                )
                for one in requests
            ],
            tf.transpose(sizes) * dim,
        )
        found = tf.reshape(tf.concat(rows, 0), [-1, dim])
        return tf.cast(
            tf.gather(found, tf.argsort(order)),
            table.dtype,
        )

    def all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all processes, concatenated along axis 0.

        Args:
          rows: Rows of this process, float32, int32 or int64. All processes
            must pass tensors with the same shape.
        """
        return self._all_gather(rows)

    @tf.function(reduce_retracing=True)
    def _all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        return self._strategy.experimental_local_results(
            self._strategy.run(self._group.all_gather, (rows,))
        )[0]

    @tf.function
    def _broadcast(self, rows: tf.Tensor, source: int) -> tf.Tensor:
        return self._strategy.experimental_local_results(
            self._strategy.run(lambda: self._group.broadcast(rows, source))
        )[0]


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


def _check_heads(table: TableShard, heads: tf.Tensor) -> list[tf.Operation]:
    """Returns checks that the rows exist and that all ids are in range."""
    is_bad = heads[:, -3] > 0
    process = tf.argmax(is_bad)
    return [
        tf.debugging.Assert(
            tf.reduce_all(heads[:, -1] == 0), [replaced_message(table.name)]
        ),
        tf.debugging.Assert(
            ~tf.reduce_any(is_bad),
            [
                tf.strings.join(
                    [
                        "Process ",
                        tf.strings.as_string(process),
                        ": id ",
                        tf.strings.as_string(tf.gather(heads[:, -2], process)),
                        f" is outside table {table.name} with "
                        f"{table.row_partition.num_rows} rows",
                    ]
                )
            ],
        ),
    ]
