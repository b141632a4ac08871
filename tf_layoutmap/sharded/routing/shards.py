"""What reads and writes need to know of a table."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap.partition import RowPartition


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a table and the rule that divides it.

    Attributes:
      variables: One per shard, equal dtype; equal shape but for `axis`.
      partition: The rule that divides `axis` among them.
      name: The table's name, for messages.
      axis: 0: each shard holds whole rows. 1: each holds some columns of all
        rows.
      is_exported: Whether a SavedModel is traced, which may hold TensorFlow's
        own operations only.
      argument_devices: Where the variables are, when the table is an argument
        of a `tf.function`, in which variables do not know it.
    """

    variables: Sequence[tf.Variable]
    partition: RowPartition
    name: str
    axis: int = 0
    is_exported: bool = False
    argument_devices: Sequence[str] | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each shard."""
        return tuple(
            self.argument_devices
            or (variable.device for variable in self.variables)
        )

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the whole table."""
        sizes = self.variables[0].shape.as_list()
        sizes[self.axis] = self.partition.num_rows
        return tf.TensorShape(sizes)

    @property
    def sizes(self) -> list[int]:
        """`shape` as a list."""
        return known_sizes(self)

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return cast("int", self.shape[0])

    @property
    def row_shape(self) -> Any:
        """`tf.TensorShape` of one row of the whole table."""
        # Any, for type checkers: their tf.concat takes no shapes.
        return self.shape[1:]

    @property
    def dtype(self) -> tf.DType:
        """Dtype of the rows."""
        return self.variables[0].dtype

    def alone(self, number: int) -> "Shards":
        """Returns one shard as a table of its own."""
        variable, devices = self.variables[number], self.argument_devices
        return Shards(
            [variable],
            RowPartition.div(known_size(variable), 1),
            self.name,
            is_exported=self.is_exported,
            argument_devices=devices and [devices[number]],
        )

    def each_alone(self) -> list["Shards"]:
        """Returns every shard as a table of its own."""
        return [self.alone(number) for number in range(len(self.variables))]

    def split(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Divides a value of the whole table among its shards."""
        partition = self.partition
        if partition.is_contiguous:
            return tf.split(value, partition.sizes, axis=self.axis)
        if partition.placement == "mod":
            return [
                value[shard :: partition.num_shards]
                for shard in range(partition.num_shards)
            ]
        return [
            tf.gather(value, partition.global_rows(shard))
            for shard in range(partition.num_shards)
        ]


def known_size(variable: Any, axis: int = 0) -> int:
    """Returns a size of a variable or tensor of known shape."""
    return int(variable.shape[axis])


def known_sizes(variable: Any) -> list[int]:
    """Returns the shape of a variable or tensor, which is known, as a list."""
    return variable.shape.as_list()
