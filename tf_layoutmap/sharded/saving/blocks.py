"""Boxes that a table in shards is read and written in, one at a time.

Where shards are boxes of the table themselves, a block is a shard; else it is
as many neighbouring rows as a shard has.
"""

import dataclasses

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.sharded.access import indexing
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.shards import Shards, known_sizes


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
        shards.dtype not in _tf_private.SLICEABLE_DTYPES
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
