"""Open vocabularies whose keys are sharded over processes.

`create_variables` creates the variables of the segments of one process.
`DividedNumbers` holds the statistics of all processes. `DividedVocabulary` has
the methods of `Vocabulary`, which all processes must call together.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import checks, tf_private
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.divided import tables as divided_tables
from tf_layoutmap.embedding.divided.row_transfer import (
    RowTransfer,
    replaced_message,
)
from tf_layoutmap.embedding.processes import Processes
from tf_layoutmap.vocabulary import bucket_layout, key_rows, state
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.sharded_numbers import KIND, STEP

Array = np.ndarray[Any, Any]


def create_variables(
    vocabulary: OpenVocabulary,
    table: str,
    group: Processes,
    transfer: RowTransfer,
) -> dict[str, Any]:
    """Creates the variables of an empty vocabulary.

    Args:
      vocabulary: Settings of the vocabulary.
      table: Name of the table.
      group: The processes.
      transfer: Transfer of rows between the processes.

    Returns:
      The variables by name. `state.NUMBERS` is a `DividedNumbers`, and the
      other variables are `DividedTable` objects.
    """
    num_buckets = vocabulary.num_buckets
    buckets = bucket_layout.partition_over_processes(num_buckets, group.size)
    segments = partition.RowPartition.div(
        bucket_layout.num_segments(num_buckets), buckets.num_shards
    )

    def divided(
        name: str,
        rows: partition.RowPartition,
        row_shape: list[int],
        value: int,
        dtype: tf.DType,
    ) -> divided_tables.DividedTable:
        # A process without buckets has one row that is never read.
        size = rows.sizes[group.rank] if group.rank < rows.num_shards else 1
        return divided_tables.DividedTable(
            f"{table}/{name}",
            _variable(
                tf.fill([size, *row_shape], tf.constant(value, dtype)),
                f"{table}/{name}/part_{group.rank}",
            ),
            rows,
            group.rank,
            transfer,
        )

    lanes = [bucket_layout.KEYS_PER_BUCKET]
    variables: dict[str, Any] = {
        state.KEYS: divided(
            state.KEYS, buckets, lanes, bucket_layout.EMPTY_KEY, tf.int64
        ),
        state.LAST_STEPS: divided(
            state.LAST_STEPS, buckets, lanes, 0, tf.int32
        ),
        state.COUNTS: divided(state.COUNTS, buckets, lanes, 0, tf.int32),
    }
    if vocabulary.has_sketch:
        shape = bucket_layout.sketch_shape(num_buckets)
        variables[state.SKETCH] = divided(
            state.SKETCH, segments, list(shape[1:]), 0, tf.uint8
        )
        variables[state.SKETCH_SUMS] = divided(
            state.SKETCH_SUMS, segments, [], 0, tf.int64
        )
    variables[state.NUMBERS] = DividedNumbers(
        f"{table}/{state.NUMBERS}",
        _variable(
            tf.zeros([len(state.NUMBERS_HELD)], tf.int64),
            f"{table}/{state.NUMBERS}/part_{group.rank}",
        ),
        group.rank,
        transfer,
    )
    return variables


def _variable(value: tf.Tensor, name: str) -> tf.Variable:
    with tf.device(embedding_tables.HOST):
        return tf_private.ResourceVariable(value, trainable=False, name=name)


class DividedNumbers(tf_private.Trackable):
    """The statistics of a vocabulary whose keys are sharded over processes.

    Each process counts all steps. The other counts of a process include only
    its own keys. A checkpoint contains the total numbers as one variable, as
    for a vocabulary in one process.

    Attributes:
      name: Name of the variable.
      block: int64 variable `[num_numbers]` with the numbers of this process.
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
        found = self._transfer.all_gather(self.block[tf.newaxis]).numpy()
        values = found.sum(0)
        values[[STEP, KIND]] = found[:, [STEP, KIND]].max(0)
        return values

    def __getitem__(self, index: int) -> tf.Tensor:
        """Returns one number; see `numpy`."""
        return tf.constant(self.numpy()[index])

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
        """Sends the total numbers to the first process; see `DividedTable`."""
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
        # See `DividedTable`.
        if self not in object_map:
            with tf.init_scope():
                block = _variable(tf.zeros_like(self.block), self.name)
            object_map[self] = DividedNumbers(
                self.name, block, self._rank, self._transfer.in_background()
            )
        object_map[self].block.assign(self.block.read_value())


class _Numbers(tf_private.SaveableObject):
    """A saveable that saves the totals, and restores the numbers."""

    def __init__(self, numbers: DividedNumbers, key: str):
        self._numbers = numbers
        self._key = key
        spec = tf_private.SaveSpec(
            self._value, "", key, numbers.dtype, numbers.block.device
        )
        super().__init__(None, [spec], key)

    def _value(self) -> tf.Tensor | None:
        if divided_tables.register_table(self._numbers, self._key):
            return None
        return divided_tables.gather_rows(self._numbers)

    def restore(self, restored_tensors, restored_shapes):
        del restored_shapes
        return self._numbers.assign(restored_tensors[0])


class DividedVocabulary(state.Vocabulary):
    """The keys of one table whose rows are sharded over processes.

    All processes must call each method together, outside of `tf.function`.
    """

    def __init__(
        self,
        *arguments: Any,
        find_own: Callable[[Array], Array],
        find_group: Callable[[], Processes],
    ):
        """Creates the object; see `Vocabulary`.

        Args:
          *arguments: Arguments of `Vocabulary`.
          find_own: Function that returns the row of each key of this process,
            and -1 for all other keys.
          find_group: Function that returns the processes. All processes must
            call it together, outside of `tf.function`.
        """
        super().__init__(*arguments)
        self._find_own = find_own
        self._find_group = find_group

    @property
    def _group(self) -> Processes:
        return self._find_group()

    def keys(self) -> tf.Tensor:
        """Returns all keys that have a row, `[num_keys]` int64, sorted by row.

        If the ids are strings, the keys are hashes. The keys must fit into the
        memory of each process.
        """
        self._require_together("keys")
        stored = self.key_variable.block.numpy().ravel()
        own = stored[stored != bucket_layout.EMPTY_KEY]
        return tf.constant(
            np.concatenate(self._group.gather_int64(own)), tf.int64
        )

    def read_keys_by_row(self) -> Any:
        """Returns all values of `key_variable`, in all processes."""
        self._require_together("read_keys_by_row")
        return self.key_variable.numpy()

    def blocks(
        self, block_size: int = key_rows.BLOCK_SIZE
    ) -> Iterator[key_rows.KeyBlock]:
        """Returns an iterator over all keys, with their rows.

        All processes get all blocks, and must iterate over the complete result.

        Args:
          block_size: See `Vocabulary.blocks`.
        """
        self._require_together("blocks")
        checks.check_int(
            "block_size", block_size, lowest=bucket_layout.KEYS_PER_BUCKET
        )
        step, key_type = self._step(), self._key_type()
        own = key_rows.read_blocks(
            dataclasses.replace(self._rows, shards=self._own_shards),
            self.name,
            block_size,
            lambda: step,
            lambda: key_type,
        )
        return self._all_blocks(own, step, key_type)

    def _all_blocks(
        self, own: Iterator[key_rows.KeyBlock], step: int, key_type: str
    ) -> Iterator[key_rows.KeyBlock]:
        """Yields the blocks of the first process, then of the second, etc."""
        rank = 0
        while rank < self._group.size:
            block = next(own, None) if rank == self._group.rank else None
            message = self._group.gather_bytes(
                b"" if block is None else _encode(block)
            )[rank]
            if message:
                yield _decode(message, list(self._rows.slots), step, key_type)
            else:
                rank += 1

    def _own_shards(self) -> list[tuple[list[Any], list[Any]]]:
        """Returns the shard of this process; see `RowAccess.shards`."""
        return [
            ([one.block for one in lanes], [one.block for one in rows])
            for lanes, rows in self._rows.shards()
            if lanes[0].rows
        ]

    def _find(self, keys: tf.Tensor) -> tf.Tensor:
        self._require_together("lookup")
        asked = self._group.gather_int64(tf.reshape(keys, [-1]).numpy())
        found = np.max(
            self._group.gather_int64(self._find_own(np.concatenate(asked))),
            axis=0,
        )
        first = sum(len(one) for one in asked[: self._group.rank])
        own = found[first : first + len(asked[self._group.rank])]
        return tf.reshape(tf.constant(own, tf.int64), keys.shape)

    def _count_keys(self) -> int:
        own = self.key_variable
        num_own = (
            np.count_nonzero(own.block.numpy() != bucket_layout.EMPTY_KEY)
            if own.rows
            else 0
        )
        return self._group.sum(int(num_own))

    def _counted_shards(self) -> Any:
        raise NotImplementedError(
            "Sampling of keys is not supported with over_processes="
            f'"sharded". Received: table {self.name!r}.'
        )

    def _require_together(self, method: str) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"`{method}` of vocabulary {self.name!r} must be called "
                "outside of tf.function, by all processes together, because "
                "the vocabulary is sharded over processes."
            )
        self.key_variable.require_current()


def _encode(block: key_rows.KeyBlock) -> bytes:
    """Converts a block to bytes."""
    file = io.BytesIO()
    arrays = {
        "keys": block.keys,
        "rows": block.rows,
        "counts": block.counts,
        "last_steps": block.last_steps,
        **{f"slot/{name}": values for name, values in block.slots.items()},
    }
    np.savez(file, **arrays)
    return file.getvalue()


def _decode(
    message: bytes, slots: list[str], step: int, key_type: str
) -> key_rows.KeyBlock:
    """Converts the result of `_encode` to a block."""
    arrays = np.load(io.BytesIO(message))
    return key_rows.KeyBlock(
        arrays["keys"],
        arrays["rows"],
        {name: arrays[f"slot/{name}"] for name in slots},
        arrays["counts"],
        arrays["last_steps"],
        step,
        key_type,
    )
