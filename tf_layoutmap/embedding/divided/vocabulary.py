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

from tf_layoutmap._core import checks
from tf_layoutmap.embedding.processes import Processes
from tf_layoutmap.vocabulary import bucket_layout, key_rows, state

Array = np.ndarray[Any, Any]


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
        return self._rows.shards() if self.key_variable.rows else []

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
