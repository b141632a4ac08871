"""A table in shards is one tensor in a checkpoint, rows in their order.

It is written and read in blocks: boxes of the whole table. So a checkpoint does
not know how many shards there were, nor how rows were placed: it restores into
any other table, into one `tf.Variable` and into TensorFlow's own sharded
variable, and from all of those.
"""

# DOC-MERGE: Boxes that a table in shards is read and written in, one at a time.
#
# Where shards are boxes of the table themselves, a block is a shard; else it is
# as many neighbouring rows as a shard has.
#
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.sharded import indexing
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.checks import Shards, known_sizes


@dataclasses.dataclass(frozen=True)
class Block:
    """A box of the whole table.

    Attributes:
      table: The table.
      offset: First element along `axis`.
      size: Elements along `axis`.
      axis: What it is a part of; along the other axes it is whole.
      number: The shard that it is; None if it is none.
      is_whole: Whether it is the whole table, which then is not sliced.
    """

    table: Shards
    offset: int
    size: int
    axis: int
    number: int | None
    is_whole: bool = False

    @property
    def device(self) -> str:
        return self.table.variables[self.number or 0].device

    def read(self) -> tf.Tensor:
        if self.number is not None:
            with tf.device(self.device):
                return self.table.variables[self.number].read_value()
        with tf.device("/cpu:0"):
            if self.is_whole:
                return indexing.dense(self.table)
            return routing.gather_checked(self.table, self._rows())

    def write(self, value: tf.Tensor) -> None:
        """Sets the block."""
        if self.is_whole:
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
        if self.is_whole:
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
        return tf.Variable.SaveSliceInfo(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
            full_name=self.table.name,
            full_shape=self.table.shape.as_list(),
            var_offset=offset,
            var_shape=shape,
        ).spec

    def _rows(self) -> tf.Tensor:
        return tf.range(self.offset, self.offset + self.size, dtype=tf.int64)


def blocks_of(shards: Shards) -> list[Block]:
    """Returns the blocks of a table, which together are the table.

    It is one block where files of TensorFlow cannot be read in parts, and
    where there is nothing to divide: no file holds a slice of nothing.
    """
    partition = shards.partition
    if (
        shards.dtype not in tf_private.SLICEABLE_DTYPES
        or not shards.shape.num_elements()
    ):
        return [
            Block(
                shards, 0, partition.num_rows, shards.axis, None, is_whole=True
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
    """Reads and restores a block under a key of a checkpoint."""

    def __init__(self, block: Block, key: str):
        self._block = block
        self._key = key
        self._fetch: tuple[str, tuple[_BlockSaveable, ...]] | None = None
        self._is_checked = False
        self._watcher = None
        super().__init__(None, [self._save_spec(block.spec())], key)

    def watch(self, watcher: Any) -> None:
        """Calls `watcher` at each read and write of the block.

        Args:
          watcher: None, or has `before_save()`, and `before_restore(saveable)`
            and `after_restore(saveable)`, of which the first is left out when
            nothing tells that the file has the block.
        """
        self._watcher = watcher

    @property
    def can_fetch(self) -> bool:
        """Whether `fetch_from` has a part of the table to name."""
        return not self._block.is_whole and bool(
            self._block.table.shape.num_elements()
        )

    def announce(self) -> None:
        """Tells the watcher that the file has the block."""
        if self._watcher is not None:
            self._watcher.before_restore(self)

    def fetch_from(self, path: str, others: Sequence["_BlockSaveable"]) -> None:
        """Lets `restore` read the file itself, for `others` as well.

        TensorFlow reads all tensors of a checkpoint before it restores the
        first. A large table would then be in memory twice; so it is told to
        read one element, and each block is read when it is needed. Not one
        of each block: TensorFlow reads in parallel, and for an element all
        that was stored in one piece with it.

        Args:
          path: The checkpoint's prefix.
          others: The other blocks of the table. TensorFlow restores nothing
            of which it has read nothing.
        """
        self.specs = [self._save_spec(self._block.spec_of_element())]
        for other in others:
            other.specs = []
        self._fetch = path, (self, *others)
        self._is_checked = False

    def check(self) -> None:
        """Reads all blocks of the table and keeps none.

        A file that is damaged is found while there still are only old rows,
        here and in all else that is restored with them. Each piece of a file
        has a checksum, which TensorFlow compares as it reads the piece.

        Raises:
          tf.errors.DataLossError: If the file is damaged; or another of
            `tf.errors`, as of a part that is missing.
        """
        assert self._fetch is not None
        path, table = self._fetch
        for one in table:
            one._fetched(path)
        self._is_checked = True

    def restore(self, restored_tensors, restored_shapes):
        """Sets the block from what was read, or blocks from the file."""
        del restored_shapes
        if not self.specs:
            return None  # Another one does it.
        if tf.executing_eagerly():
            self._restore(restored_tensors)
            return None

        # In a graph the caller runs what this returns, so it is one operation.
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
            for one in table:
                # No variable here holds what was read while the next is.
                one._write(one._fetched(path))

    def _check_in_graph(self) -> list[tf.Operation]:
        """Adds what `check` does; every write must come after its result."""
        assert self._fetch is not None
        path, table = self._fetch
        checked: list[tf.Operation] = []
        for one in table:
            with tf.control_dependencies(checked):  # One block at a time.
                checked = [one._fetched(path).op]
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
    """Returns what reads and restores a table under one checkpoint key.

    Args:
      shards: The table.
      key: The checkpoint's name of the tensor.
    """
    return [_BlockSaveable(block, key) for block in blocks_of(shards)]


def fetch_in_turn(table: Sequence[_BlockSaveable], path: str) -> None:
    """Has a restore read a table block after block, twice: first to check.

    Args:
      table: What `saveables` returned for a table that the file has.
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
    """Refuses a checkpoint whose tensor is not this table's.

    Args:
      shards: The table about to be restored.
      path: The checkpoint's prefix.
      key: Its name of the tensor.

    Returns:
      Whether the tensor is there at all.

    Raises:
      ValueError: The tensor there has another shape or dtype.
    """
    reader = tf.train.load_checkpoint(path)
    if not reader.has_tensor(key):
        return False  # Incomplete checkpoints are Checkpoint's own affair.
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
