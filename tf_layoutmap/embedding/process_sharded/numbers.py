"""Statistics of vocabularies whose keys are sharded over processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.process_sharded import saving
from tf_layoutmap.embedding.process_sharded.row_transfer import (
    RowTransfer,
    replaced_message,
)
from tf_layoutmap.vocabulary.sharded_numbers import KIND, STEP

Array = np.ndarray[Any, Any]


class ProcessShardedNumbers(tf_private.Trackable):
    """The statistics of a vocabulary whose keys are sharded over processes.

    Each process counts all steps. The other counts of a process include only
    its own keys. A checkpoint contains the total numbers as one variable, as
    for a vocabulary in one process.

    Attributes:
      name: Name of the variable.
      block: int64 variable `[num_numbers]` with the numbers of this process.
      variables: List that contains `block`.
      shape: `[num_numbers]`.
      dtype: int64.
      replaced: Whether a resize has replaced the variable. Reads then raise an
        error.
    """

    dtype = tf.int64

    def __init__(self, name: str, block: Any, rank: int, transfer: RowTransfer):
        """Stores the variable of this process.

        Args:
          name: Name of the variable.
          block: Numbers of this process.
          rank: Index of this process.
          transfer: Transfer of rows between the processes.
        """
        self.name = name
        self.block = block
        self.variables = [block]
        self.shape = block.shape
        self.replaced = False
        self._rank = rank
        self._transfer = transfer

    def local(self, index: int) -> tf.Tensor:
        """Returns a number of this process."""
        return self.block[index]

    def numpy(self) -> Array:
        """Returns all numbers, in all processes.

        All processes must call this method together, outside of `tf.function`.

        Raises:
          RuntimeError: If the method is called inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"The numbers of {self.name!r} must be read outside of "
                "tf.function, by all processes together, because the "
                "vocabulary is sharded over processes."
            )
        if self.replaced:
            raise RuntimeError(replaced_message(self.name))
        numbers = self._transfer.all_gather(self.block[tf.newaxis]).numpy()
        values = numbers.sum(0)
        values[[STEP, KIND]] = numbers[:, [STEP, KIND]].max(0)
        return values

    def empty_array(self) -> Array:
        """Returns an uninitialized array for all numbers."""
        return np.empty(self.shape.as_list(), np.int64)

    def copy_to(self, values: Array) -> None:
        """Copies all numbers to an array, in all processes; see `numpy`."""
        values[:] = self.numpy()

    def __getitem__(self, index: int) -> tf.Tensor:
        """Returns one number; see `numpy`. Replicas can call the method."""
        if tf.executing_eagerly() or not self._transfer.is_in_replica():
            return tf.constant(self.numpy()[index])
        values = self._transfer.of_processes(self.block[index])
        reduce = tf.reduce_max if index in (STEP, KIND) else tf.reduce_sum
        return reduce(values)

    def assign(self, values: Any) -> tf.Operation:
        """Assigns the total numbers, in all processes.

        The step and the kind are assigned in all processes. The counts are
        assigned in the first process, and are 0 in the other processes.
        """
        values = tf.cast(values, tf.int64)
        is_count = tf.range(tf.size(values)) > KIND
        return self.block.assign(
            tf.where(is_count, tf.zeros_like(values), values)
            if self._rank
            else values
        )

    def gather(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Sends the total numbers to the first process, as a table."""
        totals = self.numpy()
        if self._rank == 0:
            yield 0, tf.constant(totals)

    def slice_spec(self, first: int, count: int) -> str:
        """Returns the slice spec of all numbers."""
        del first, count
        return ""

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        del save_type, kwargs
        return {}

    def _gather_saveables_for_checkpoint(self):
        return {
            tf_private.VARIABLE_VALUE_KEY: lambda name=self.name: _Numbers(
                self, name
            )
        }

    def _copy_trackable_to_cpu(self, object_map):
        # See `ProcessShardedTable`.
        if self not in object_map:
            with tf.init_scope(), tf.device(tables.HOST):
                block = tf_private.ResourceVariable(
                    tf.zeros_like(self.block), trainable=False, name=self.name
                )
            object_map[self] = ProcessShardedNumbers(
                self.name, block, self._rank, self._transfer.in_background()
            )
        object_map[self].block.assign(self.block.read_value())


class _Numbers(tf_private.SaveableObject):
    """A saveable that saves the totals, and restores the numbers."""

    def __init__(self, numbers: ProcessShardedNumbers, key: str):
        self._numbers = numbers
        self._key = key
        spec = tf_private.SaveSpec(
            self._value, "", key, numbers.dtype, numbers.block.device
        )
        super().__init__(None, [spec], key)

    def _value(self) -> tf.Tensor | None:
        if saving.register_table(self._numbers, self._key):
            return None
        return saving.gather_rows(self._numbers)

    def restore(self, restored_tensors, restored_shapes):
        del restored_shapes
        return self._numbers.assign(restored_tensors[0])
