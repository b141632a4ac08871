"""Tables that are sharded over processes.

In each process, `ProcessShardedTable` holds the rows of one shard.
`ProcessStore` creates these objects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import patches, slice_specs, tf_private
from tf_layoutmap.embedding import table_store, tables
from tf_layoutmap.embedding.process_sharded import saving
from tf_layoutmap.embedding.process_sharded.numbers import ProcessShardedNumbers
from tf_layoutmap.embedding.process_sharded.row_transfer import (
    RowTransfer,
    replaced_message,
)
from tf_layoutmap.embedding.processes import Processes
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary.parts import NAMES, NUMBERS, Part

Array = np.ndarray[Any, Any]


class ProcessShardedTable(tf_private.Trackable):
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
      variables: List that contains `block`.
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
        self.variables = [block]
        self.replaced = False
        self._rank = rank
        self._transfer = transfer
        self._restored_rows: _Rows | None = None

    def __repr__(self) -> str:
        return (
            f"<ProcessShardedTable {self.name!r} shape={tuple(self.shape)} "
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
        values = self.empty_array()
        self.copy_to(values)
        return values

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

    def __getitem__(self, rows: slice) -> tf.Tensor:
        """Returns consecutive rows, in all processes; see `blocks`."""
        self._require_eager("__getitem__")
        first, stop, step = rows.indices(known_size(self))
        if step != 1 or stop <= first:
            raise ValueError(
                f"Table {self.name!r}, which is sharded over processes, must "
                "be indexed with a slice of consecutive rows. Received: "
                f"{rows}."
            )
        return self._transfer.read(self, first, stop)

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
            with tf.init_scope(), tf.device(tables.HOST):
                block = tf_private.ResourceVariable(
                    tf.zeros_like(self.block), trainable=False, name=self.name
                )
            object_map[self] = ProcessShardedTable(
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

    def __init__(self, table: ProcessShardedTable, key: str):
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
        if saving.register_table(self._table, self._key):
            return None
        return saving.gather_rows(self._table)

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


class ProcessStore(table_store.TableStore):
    """The store of tables that are sharded over processes.

    Each process has one part of a table. If a table has fewer parts than there
    are processes, only the first processes have a part.

    Attributes:
      group: The processes.
    """

    is_sharded = True
    values_per_read = 1 << 18
    _has_segments = True
    group: Processes

    def __init__(self, group: Processes):
        """Stores the processes, and patches TensorFlow's saver."""
        super().__init__(partition.FixedShardsPartitioner(group.size), group)
        self._only = group.rank
        self._transfer = RowTransfer(group)
        patches.ensure("sharded_tables")

    def _places(self, rows: Any) -> list[tuple[range, str, int]]:
        cut = rows.row_partition
        return [
            (range(first, first + size), rows.block.device, rank)
            for rank, (first, size) in enumerate(zip(cut.offsets, cut.sizes))
        ]

    def _shards_of_part(self, variable: Any, index: int) -> list[Any]:
        del index
        return tables.shards_of(variable)

    def _is_here(self, rank: int) -> bool:
        return rank == self.group.rank

    def local_parts(self, table: int) -> list[Part]:
        """Returns the part of this process; see `TableStore`."""
        parts = self.parts(table)
        if self.group.rank < len(parts):
            return [parts[self.group.rank]]
        by_name = self.variables[self.spec.tables[table].name]
        return [
            Part(
                table,
                self.group.rank,
                self.local_rows(table),
                by_name[tables.PARAMETERS].block.device,
                self.group.rank,
                {
                    name: tables.shards_of(variable)
                    for name, variable in by_name.items()
                    if name not in NAMES
                },
                {},
            )
        ]

    def collect(self, results: Sequence[Any]) -> list[Any]:
        """Sends the result of each part to all processes; see `TableStore`."""
        rank = self.group.rank
        result = results[rank] if rank < len(results) else None
        messages = self.group.gather_bytes(
            b"" if result is None else _encode(result)
        )
        return [_decode(message) for message in messages[: len(results)]]

    def send(self, part: Part, result: Any) -> Any:
        """Sends the result of a part to all processes; see `TableStore`."""
        message = b"" if result is None else _encode(result)
        return _decode(self.group.gather_bytes(message)[part.owner])

    def check_can_read(self, call: str) -> None:
        """Raises a RuntimeError inside a `tf.function`; see `TableStore`."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{call} must be called outside of tf.function, by all "
                "processes together, because the vocabulary is sharded over "
                "processes."
            )

    def ask(
        self,
        table: int,
        arguments: tf.Tensor,
        function: Callable[[Part, tf.Tensor], list[tf.Tensor]],
        num_results: int,
    ) -> list[list[tf.Tensor]]:
        """Calls a function in the owner of each part; see `TableStore`."""
        group = self.group
        parts = self.parts(table)
        if not tf.executing_eagerly():
            self._check_in_replica(table)
            gathered = group.gather_vectors(arguments)
            by_process = [[tf.zeros([0], tf.int64)] * num_results] * group.size
            if group.rank < len(parts):
                with tf.device(parts[group.rank].device):
                    by_process = [
                        function(parts[group.rank], vector)
                        for vector in gathered
                    ]
            by_result = [
                group.exchange_vectors(
                    [results[place] for results in by_process]
                )
                for place in range(num_results)
            ]
            return [
                [by_part[part.owner] for by_part in by_result] for part in parts
            ]
        asked = group.gather_int64(arguments.numpy())
        by_part = self.each(
            table,
            lambda part: [
                result
                for vector in asked
                for result in function(part, tf.constant(vector, tf.int64))
            ],
        )
        first = num_results * group.rank
        return [
            [
                tf.constant(result, tf.int64)
                for result in results[first : first + num_results]
            ]
            for results in by_part
        ]

    def _check_in_replica(self, table: int) -> None:
        if not self.group.is_in_replica():
            self.check_can_read(
                f"Reading the vocabulary of table "
                f"{self.spec.tables[table].name!r} outside of a replica"
            )

    def rows_by_process(self, table: int) -> list[range]:
        """Returns the rows that each process holds; see `TableStore`."""
        rows = self.variables[self.spec.tables[table].name][tables.PARAMETERS]
        ranges = [part for part, _, _ in self._places(rows)]
        end = rows.row_partition.num_rows
        return ranges + [range(end, end)] * (self.group.size - len(ranges))

    @property
    def _rank(self) -> int:
        return self.group.rank

    def read_together(
        self, variables: Mapping[str, Any], call: str
    ) -> dict[str, Array]:
        """Returns the full values of variables; see `TableStore`.

        If the memory of one process is too small, all processes raise an error.
        """
        values: dict[str, Array] = {}
        with self.group.failing_together(call):
            values = {
                name: variable.empty_array()
                for name, variable in variables.items()
            }
        for name, variable in variables.items():
            variable.copy_to(values[name])
        return values

    def assign_local(self, variable: Any, values: Array) -> None:
        """Assigns the rows of this process."""
        if variable.rows:
            variable.block.assign(values)

    def discard(self, variables: Mapping[str, Any]) -> None:
        """Frees the memory of a replaced table; see `TableStore`."""
        for name, variable in variables.items():
            # Each process has a copy of the counter, which is a variable.
            if name != tables.ROUNDING_STEPS:
                variable.replaced = True
        # Steps that were traced before the resize read the statistics before
        # the engine raises the error that says what to do.
        super().discard(
            {
                name: variable
                for name, variable in variables.items()
                if name != NUMBERS
            }
        )

    def _joined(
        self, name: str, variable: Any, cut: partition.RowPartition
    ) -> ProcessShardedTable:
        return ProcessShardedTable(
            name, variable, cut, self.group.rank, self._transfer
        )

    def _joined_numbers(
        self, name: str, copies: list[Any]
    ) -> ProcessShardedNumbers:
        (block,) = copies
        return ProcessShardedNumbers(
            name, block, self.group.rank, self._transfer
        )


def _encode(arrays: Sequence[Any]) -> bytes:
    """Converts arrays or tensors to bytes."""
    values = [np.asarray(array) for array in arrays]
    head = json.dumps(
        [(tf.as_dtype(value.dtype).name, value.shape) for value in values]
    ).encode()
    return b"".join(
        [
            len(head).to_bytes(8, "little"),
            head,
            *(value.tobytes() for value in values),
        ]
    )


def _decode(message: bytes) -> list[Array]:
    """Converts the result of `_encode` to arrays."""
    first = 8 + int.from_bytes(message[:8], "little")
    arrays = []
    for name, shape in json.loads(message[8:first]):
        dtype = np.dtype(tf.as_dtype(name).as_numpy_dtype)
        size = math.prod(shape)
        arrays.append(np.frombuffer(message, dtype, size, first).reshape(shape))
        first += size * dtype.itemsize
    return arrays
