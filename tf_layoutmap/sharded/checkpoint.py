"""Checkpoints of sharded tables.

In a checkpoint, a sharded table is one tensor that contains all rows in order.
The table is saved and restored in blocks, which are slices of the full table.
If the shards are contiguous, each block is one shard. Otherwise, each block has
the same number of rows as a shard, and its rows are consecutive.

The content of a checkpoint therefore depends neither on the number of shards
nor on the placement of rows. A table, a `tf.Variable` and TensorFlow's own
sharded variable can restore each other's checkpoints.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import slice_specs, tf_private
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.sharded import indexing
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.checks import Shards, known_sizes


@dataclasses.dataclass(frozen=True)
class Block:
    """A slice of the full table.

    Attributes:
      table: The table.
      offset: First element along `axis`.
      size: Number of elements along `axis`.
      axis: The axis that is sliced. Along the other axes, the block has the
        full size of the table.
      number: Index of the shard with the same rows as this block, or None if
        there is no such shard.
      is_full_table: Whether the block is the full table, saved without a slice.
    """

    table: Shards
    offset: int
    size: int
    axis: int
    number: int | None
    is_full_table: bool = False

    @property
    def device(self) -> str:
        return self.table.variables[self.number or 0].device

    def read(self) -> tf.Tensor:
        if self.number is not None:
            with tf.device(self.device):
                return self.table.variables[self.number].read_value()
        with tf.device("/cpu:0"):
            if self.is_full_table:
                return indexing.dense(self.table)
            return routing.gather_checked(self.table, self._rows())

    def write(self, value: tf.Tensor) -> None:
        """Assigns `value` to the block."""
        if self.is_full_table:
            for variable, part in zip(
                self.table.variables, self.table.split(value)
            ):
                variable.assign(part, read_value=False)
        elif self.number is not None:
            variable = self.table.variables[self.number]
            with tf.device(self.device):
                variable.assign(value, read_value=False)
        else:
            routing.scatter(self.table, "update", self._rows(), value)

    def spec(self) -> str:
        """Returns the slice spec of the block."""
        if self.is_full_table:
            return ""
        shape = known_sizes(self.table)
        shape[self.axis] = self.size
        return self._spec_of(shape, self.offset)

    def spec_of_element(self) -> str:
        """Returns the slice spec of the first element of the table."""
        return self._spec_of([1] * self.table.shape.rank, 0)

    def _spec_of(self, shape: list[int], start: int) -> str:
        offset = [0] * len(shape)
        offset[self.axis] = start
        return slice_specs.of_block(self.table.shape.as_list(), offset, shape)

    def _rows(self) -> tf.Tensor:
        return tf.range(self.offset, self.offset + self.size, dtype=tf.int64)


def blocks_of(shards: Shards) -> list[Block]:
    """Returns the blocks of a table, which together cover the table.

    If TensorFlow cannot read slices of the dtype, the full table is one block.
    An empty table is also one block, because a checkpoint cannot store an empty
    slice.
    """
    partition = shards.partition
    if (
        shards.dtype not in tf_private.SLICEABLE_DTYPES
        or not shards.shape.num_elements()
    ):
        return [
            Block(
                shards,
                0,
                partition.num_rows,
                shards.axis,
                None,
                is_full_table=True,
            )
        ]
    return [
        Block(
            shards,
            offset,
            size,
            shards.axis,
            number if partition.is_contiguous else None,
        )
        for number, (offset, size) in enumerate(
            zip(partition.offsets, partition.sizes)
        )
        if size > 0
    ]


class _BlockSaveable(tf_private.SaveableObject):
    """Saveable that saves and restores a block under a checkpoint key."""

    def __init__(self, block: Block, key: str):
        self._block = block
        self._key = key
        self._fetch: tuple[str, tuple[_BlockSaveable, ...]] | None = None
        self._is_checked = False
        self._watcher = None
        super().__init__(None, [self._save_spec(block.spec())], key)

    def watch(self, watcher: Any) -> None:
        """Sets an object that is notified when the block is read or written.

        Args:
          watcher: None, or an object with `before_save()`,
            `before_restore(saveable)` and `after_restore(saveable)`.
            `before_restore` is called by `announce`, and only if the file is
            known to contain the block.
        """
        self._watcher = watcher

    @property
    def can_fetch(self) -> bool:
        """Whether `fetch_from` can read the table in slices."""
        return not self._block.is_full_table and bool(
            self._block.table.shape.num_elements()
        )

    def announce(self) -> None:
        """Notifies the watcher that the file contains the block."""
        if self._watcher is not None:
            self._watcher.before_restore(self)

    def fetch_from(self, path: str, others: Sequence["_BlockSaveable"]) -> None:
        """Prepares `restore` to read this block and `others` from the file.

        By default, TensorFlow reads all tensors of a checkpoint before it
        restores the first tensor. A large table would then be in memory twice.
        This method therefore requests only one element of the table from
        TensorFlow, and `restore` reads one block at a time. The method does not
        request one element per block. TensorFlow reads all requested elements
        in parallel, and for each element it reads the complete stored slice.

        Args:
          path: The checkpoint's prefix.
          others: The other blocks of the table. TensorFlow itself does not
            restore these blocks, because no element of them is requested.
        """
        self.specs = [self._save_spec(self._block.spec_of_element())]
        for other in others:
            other.specs = []
        self._fetch = path, (self, *others)
        self._is_checked = False

    def check(self) -> None:
        """Reads all blocks of the table, and discards the values.

        A damaged file is therefore detected before the restore changes a
        variable. Each slice in a file has a checksum, and TensorFlow verifies
        the checksum when it reads the slice.

        Raises:
          tf.errors.DataLossError: If the file is damaged. Other errors of
            `tf.errors` are possible, for example if a data file is missing.
        """
        assert self._fetch is not None
        path, table = self._fetch
        for block in table:
            block._fetched(path)
        self._is_checked = True

    def restore(self, restored_tensors, restored_shapes):
        """Restores the block from tensors, or all blocks from the file."""
        del restored_shapes
        if not self.specs:
            return None  # The first saveable of the table restores all blocks.
        if tf.executing_eagerly():
            self._restore(restored_tensors)
            return None

        # In a graph, the caller runs the returned op. The complete restore must
        # therefore be a single op.
        @tf.function(autograph=False)
        def restored():
            self._restore(restored_tensors)
            return tf.constant(True)

        return restored().op

    def _restore(self, restored_tensors: Sequence[tf.Tensor]) -> None:
        if self._fetch is None:
            self._write(restored_tensors[0])
            return
        path, table = self._fetch
        checked = [] if self._is_checked else self._check_in_graph()
        with tf.control_dependencies(checked):
            for block in table:
                # No local variable holds the value, so its memory is released
                # before the next block is read.
                block._write(block._fetched(path))

    def _check_in_graph(self) -> list[tf.Operation]:
        """Adds ops for `check`.

        All ops that write must depend on the result.
        """
        assert self._fetch is not None
        path, table = self._fetch
        checked: list[tf.Operation] = []
        for block in table:
            with tf.control_dependencies(checked):  # Reads blocks in turn.
                checked = [block._fetched(path).op]
        return checked

    def _fetched(self, path: str) -> tf.Tensor:
        with tf.device("/cpu:0"):
            return tf.raw_ops.RestoreV2(
                prefix=path,
                tensor_names=[self._key],
                shape_and_slices=[self._block.spec()],
                dtypes=[self._block.table.dtype],
            )[0]

    def _write(self, value: tf.Tensor) -> None:
        self._block.write(value)
        if self._watcher is not None:
            self._watcher.after_restore(self)

    def _read(self) -> tf.Tensor:
        if self._watcher is not None:
            self._watcher.before_save()
        return self._block.read()

    def _save_spec(self, slice_spec: str):
        return tf_private.SaveSpec(
            self._read,
            slice_spec,
            self._key,
            self._block.table.dtype,
            self._block.device,
        )


def saveables(shards: Shards, key: str) -> Sequence[_BlockSaveable]:
    """Returns saveables for all blocks of a table under one checkpoint key.

    Args:
      shards: The table.
      key: Name of the tensor in the checkpoint.
    """
    return [_BlockSaveable(block, key) for block in blocks_of(shards)]


def fetch_in_turn(table: Sequence[_BlockSaveable], path: str) -> None:
    """Prepares saveables, so that a restore reads one block at a time.

    The restore reads the table twice. The first read only checks the file.

    Args:
      table: The saveables of a table that the file contains.
      path: The checkpoint's prefix.
    """
    first, *others = table
    if first.can_fetch:
        first.fetch_from(path, others)
        if tf.executing_eagerly():
            first.check()
    for block in table:
        block.announce()


def check_restorable(shards: Shards, path: str, key: str) -> bool:
    """Checks that a saved tensor has the shape and the dtype of the table.

    Args:
      shards: The table to restore.
      path: The checkpoint's prefix.
      key: Name of the tensor in the checkpoint.

    Returns:
      Whether the checkpoint contains the tensor.

    Raises:
      ValueError: If the tensor and the table have different shapes or dtypes.
    """
    reader = storage.open_checkpoint(path)
    if not reader.has_tensor(key):
        return False  # tf.train.Checkpoint reports missing tensors.
    found_shape = reader.get_variable_to_shape_map()[key]
    found_dtype = reader.get_variable_to_dtype_map()[key]
    full_shape = shards.shape.as_list()
    if found_shape != full_shape or found_dtype != shards.dtype:
        raise ValueError(
            f"Table {shards.name!r} must be restored from a tensor of shape "
            f"{full_shape} and dtype {shards.dtype.name}. Received: shape "
            f"{found_shape}, dtype {found_dtype.name} ({key!r} in checkpoint "
            f"{path!r})."
        )
    return True
