"""Reads and writes the rows of keys.

`KeyBlock` holds keys with their rows, and `read_blocks` reads the keys of a
table block by block. `check_rows` converts the arguments of `Vocabulary.write`
to `RowsToWrite`, which `embedding/key_editor.py` writes.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, ops
from tf_layoutmap.vocabulary import bucket_layout, key_tensors
from tf_layoutmap.vocabulary.parts import Part, Parts

if TYPE_CHECKING:
    from tf_layoutmap.vocabulary.kept_strings import KeptStrings

Array = np.ndarray[Any, Any]

# Default number of keys in a block. With 16 floats per row, a block takes 16
# MiB, and the time of a call is small compared to the time of copying.
BLOCK_SIZE = 2**18
_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class KeyBlock:
    """Keys of one table, with their rows.

    `Vocabulary.blocks` returns objects of this class, and
    `tlm.vocabulary.import_rows` accepts them.

    Attributes:
      keys: `[num_keys]` int64, without duplicates. If the ids are strings, the
        keys are hashes, or the strings themselves.
      rows: Rows of the keys, `[num_keys, dim]` float32. Rows of 16-bit tables
        are converted to float32, which is exact.
      slots: Maps the name of each slot variable to its values for the keys,
        `[num_keys, dim]` or `[num_keys, 1]` float32.
      counts: Count of each key, `[num_keys]` int32. None: not known.
      last_steps: Step of the last use of each key, `[num_keys]` int32. None:
        not known.
      step: Number of training steps of the vocabulary when the block was read.
      key_type: `"integers"`, or `"strings"` if the keys are hashes of strings.
      strings: The bytes of each key's string, `[num_keys]` of dtype object, if
        `keys` are hashes of strings. An element is None if the string is not
        known. None: no string is known.
    """

    keys: Array
    rows: Array
    slots: dict[str, Array] = dataclasses.field(default_factory=dict)
    counts: Array | None = None
    last_steps: Array | None = None
    step: int = 0
    key_type: str = key_tensors.KINDS[key_tensors.INTEGERS]
    strings: Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenKeys:
    """The result of writing rows by key.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> words = tlm.layers.ShardedEmbedding(
    ...     tlm.vocabulary.OpenVocabulary(100), 8,
    ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
    >>> _ = words(np.array([[0]]))
    >>> words.vocabulary.write([5, 7]).num_new
    2
    >>> written = words.vocabulary.write([7, 9])
    >>> written.num_written, written.num_new, written.without_row.tolist()
    (2, 1, [])

    Attributes:
      num_written: Number of keys whose rows were written.
      num_new: Number of written keys that had no row before.
      without_row: Keys that got no row, because all of their places were
        occupied, `[num_keys]`.
    """

    num_written: int
    num_new: int
    without_row: Array


@dataclasses.dataclass(frozen=True, eq=False)
class RowsToWrite:
    """Checked arguments of a write.

    Attributes:
      keys: `[num_keys]` int64, without duplicates.
      kind: Kind of the keys, one of `key_tensors.KINDS`.
      rows: `[num_keys, dim]` in the dtype of the table, or `[0, dim]`.
      slots: For each slot variable, `[num_keys, slot_dim]` float32, or
        `[0, slot_dim]`.
      last_steps: `[num_keys]` int32, or `[0]`.
      counts: `[num_keys]` int32, or `[0]`.
      step: Minimum step of the vocabulary after the write.
      strings: The strings of the keys, `[num_keys]`, where unknown strings are
        None; or None if no string is known.
    """

    keys: Array
    kind: int
    rows: Array
    slots: list[Array]
    last_steps: Array
    counts: Array
    step: int
    strings: Array | None = None

    def checksum(self, first: int = 0) -> int:
        """Returns a checksum of the keys and rows.

        Args:
          first: Checksum of preceding values.
        """
        checksum = zlib.crc32(repr((self.kind, self.step)).encode(), first)
        for values in (
            self.keys,
            self.rows,
            *self.slots,
            self.last_steps,
            self.counts,
        ):
            checksum = zlib.crc32(repr(values.shape).encode(), checksum)
            checksum = zlib.crc32(values.tobytes(), checksum)
        return checksum

    def part(self, where: Any) -> RowsToWrite:
        """Returns the keys that a slice or a mask selects."""

        def select(values: Array) -> Array:
            return values[where] if len(values) else values

        return dataclasses.replace(
            self,
            keys=select(self.keys),
            rows=select(self.rows),
            slots=[select(slot) for slot in self.slots],
            last_steps=select(self.last_steps),
            counts=select(self.counts),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class RowAccess:
    """Access to the rows of one table of an embedding.

    Attributes:
      dim: Number of columns of the table.
      dtype: Dtype of the stored rows.
      slots: Number of columns of each slot variable, by name.
      table: Index of the table in its store.
      store: Function that returns the current store of the tables.
      before_read: Function that applies a pending update. It must be called
        before rows are read.
      write: Function that writes rows, and returns the row of each key, or -1,
        and the number of keys that had no row before.
      strings: The strings of the table's keys, or None.
      report_evicted: Function that calls `on_evict` with keys that were not
        reported yet, and returns their number.
    """

    dim: int
    dtype: tf.DType
    slots: dict[str, int]
    table: int
    store: Callable[[], Parts]
    before_read: Callable[[], None]
    write: Callable[[RowsToWrite], tuple[Array, int]]
    strings: KeptStrings | None
    report_evicted: Callable[[], int]

    @property
    def is_writer(self) -> bool:
        """Whether this process writes exported files."""
        group = self.store().group
        return group is None or group.is_first

    def of_first_process(self, value: int) -> int:
        """Returns the number that the first process passes.

        All processes must call the method together.
        """
        group = self.store().group
        if group is None:
            return value
        return int(group.gather_int64(np.array([value]))[0][0])


def check_rows(
    access: RowAccess,
    table: str,
    keys: Any,
    rows: Any,
    slots: Mapping[str, Any] | None,
    counts: Any,
    last_steps: Any,
    *,
    highest_step: int,
) -> RowsToWrite:
    """Checks and converts the arguments of `Vocabulary.write`.

    Args:
      access: Access to the table.
      table: Name of the table, for messages.
      keys: See `Vocabulary.write`, as the following arguments.
      rows: Rows, or None.
      slots: Values of slot variables by name, or None.
      counts: Counts, or None.
      last_steps: Last steps, or None.
      highest_step: Maximum of `last_steps`.

    Raises:
      TypeError: If `keys` are neither integers nor strings.
      ValueError: If an argument has the wrong shape, a key occurs twice, a slot
        variable does not exist, or a value is out of range.
    """
    where = f"table {table!r}"
    tensor, kind = key_tensors.read_keys(keys, where)
    key_array: Array = tensor.numpy()
    if key_array.ndim != 1:
        raise ValueError(
            checks.message(
                "keys", "of shape [num_keys]", key_array.shape, where
            )
        )
    _check_unique(key_array, where)
    check_slots(access, slots or {}, where)
    num_keys = len(key_array)
    return RowsToWrite(
        key_array,
        kind,
        _to_dtype(
            "rows",
            _matrix("rows", rows, num_keys, access.dim, where),
            access.dtype,
            where,
        ),
        [
            _matrix(
                f"slots[{name!r}]",
                (slots or {}).get(name),
                num_keys,
                dim,
                where,
            )
            for name, dim in access.slots.items()
        ],
        _int32("last_steps", last_steps, num_keys, highest_step, where),
        _int32("counts", counts, num_keys, _INT32_MAX, where),
        0,
        key_tensors.names_of(keys, key_array),
    )


def check_block(
    access: RowAccess,
    table: str,
    block: KeyBlock,
    step: int,
    *,
    takes_step: bool,
) -> RowsToWrite:
    """Checks and converts a block of another table; see `check_rows`.

    Args:
      access: Access to the table.
      table: Name of the table, for messages.
      block: The block. Its slot variables must exist in this table.
      step: Step of the table's vocabulary.
      takes_step: Whether the vocabulary has no keys, so that it gets the step
        of the block.
    """
    if takes_step:
        step = max(step, block.step)
    last_steps = block.last_steps
    if last_steps is not None:
        # The number of steps since the last use does not change.
        last_steps = np.maximum(
            np.asarray(last_steps, np.int64) + (step - block.step), 0
        )
    checked = check_rows(
        access,
        table,
        block.keys,
        block.rows,
        block.slots,
        block.counts,
        last_steps,
        highest_step=step,
    )
    if block.key_type == key_tensors.KINDS[key_tensors.STRINGS]:
        checked = dataclasses.replace(
            checked,
            kind=key_tensors.STRINGS,
            strings=(
                checked.strings
                if block.strings is None or access.strings is None
                else _check_strings(block.strings, checked.keys, table)
            ),
        )
    if takes_step:
        checked = dataclasses.replace(checked, step=step)
    return checked


def _check_strings(strings: Any, keys: Array, table: str) -> Array:
    """Checks the strings of a block.

    Raises:
      ValueError: If the strings have the wrong shape, or the keys are not the
        hashes of the strings.
    """
    where = f"table {table!r}"
    objects = np.asarray(strings, object)
    if objects.shape != keys.shape:
        raise ValueError(
            checks.message(
                "strings", f"of shape {keys.shape}", objects.shape, where
            )
        )
    is_known = np.array([string is not None for string in objects], bool)
    hashes = key_tensors.hash_strings(
        tf.constant(list(objects[is_known]), tf.string)
    ).numpy()
    differs = np.flatnonzero(hashes != keys[is_known])
    if len(differs):
        raise ValueError(
            checks.message(
                "strings",
                "the strings whose hashes are `keys`",
                f"{objects[is_known][differs[0]]!r} for the key "
                f"{int(keys[is_known][differs[0]])}",
                where,
            )
        )
    return objects


def check_slots(
    access: RowAccess, slots: Mapping[str, Any], where: str
) -> None:
    """Raises a ValueError if a slot variable does not exist."""
    unknown = [name for name in slots if name not in access.slots]
    if unknown:
        raise ValueError(
            checks.message(
                "slots",
                f"a dict with names from {list(access.slots)}",
                unknown,
                where,
            )
        )


def _check_unique(keys: Array, where: str) -> None:
    ordered = np.sort(keys)
    if len(keys) and ordered[0] == bucket_layout.EMPTY_KEY:
        raise ValueError(
            checks.message(
                "keys",
                "different from -2^63, which marks rows without a key",
                int(ordered[0]),
                where,
            )
        )
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise ValueError(
            checks.message(
                "keys",
                "without duplicates",
                f"{int(ordered[twice[0]])} at the indices "
                f"{np.flatnonzero(keys == ordered[twice[0]]).tolist()}",
                where,
            )
        )


def _matrix(
    name: str, value: Any, num_keys: int, dim: int, where: str
) -> Array:
    """Converts rows to float32 `[num_keys, dim]`; None becomes `[0, dim]`."""
    if value is None:
        return np.zeros([0, dim], np.float32)
    matrix = np.asarray(value)
    if matrix.shape != (num_keys, dim):
        raise ValueError(
            checks.message(
                name, f"of shape {(num_keys, dim)}", matrix.shape, where
            )
        )
    is_number = matrix.dtype.kind in "fiu" or matrix.dtype == tf.bfloat16
    if not is_number:
        raise ValueError(
            checks.message(name, "of real numbers", matrix.dtype, where)
        )
    return _to_dtype(name, np.ascontiguousarray(matrix), tf.float32, where)


def _to_dtype(name: str, values: Array, dtype: tf.DType, where: str) -> Array:
    """Converts values to a dtype.

    Raises:
      ValueError: If a value is outside of the range of the dtype.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        converted = values.astype(dtype.as_numpy_dtype)
    is_lost = ~np.isfinite(converted) & np.isfinite(values)
    if is_lost.any():
        raise ValueError(
            checks.message(
                name,
                f"in the range of {dtype.name}",
                float(values[is_lost][0]),
                where,
            )
        )
    return converted


def _int32(
    name: str, value: Any, num_keys: int, highest: int, where: str
) -> Array:
    if value is None:
        return np.zeros([0], np.int32)
    numbers = np.asarray(value)
    if numbers.shape != (num_keys,) or numbers.dtype.kind not in "iu":
        raise ValueError(
            checks.message(
                name,
                f"integers of shape {(num_keys,)}",
                f"{numbers.dtype} of shape {numbers.shape}",
                where,
            )
        )
    is_outside = (numbers < 0) | (numbers > highest)
    if is_outside.any():
        raise ValueError(
            checks.message(
                name,
                f"in [0, {highest}]",
                int(numbers[is_outside][0]),
                where,
            )
        )
    return numbers.astype(np.int32)


def write_rows(
    access: RowAccess, checked: RowsToWrite, names: Array
) -> WrittenKeys:
    """Writes rows block by block.

    Args:
      access: Access to the table.
      checked: The rows to write.
      names: The keys as the caller passed them, for the result.

    Raises:
      ValueError: If the table keeps strings, and the keys are integers.
    """
    if access.strings is not None:
        access.strings.check_kind(checked.kind)
    rows: list[Array] = []
    num_new = 0
    for first in range(0, len(checked.keys), BLOCK_SIZE):
        block_rows, new = access.write(
            checked.part(slice(first, first + BLOCK_SIZE))
        )
        rows.append(block_rows)
        num_new += new
    if access.strings is not None and checked.strings is not None:
        access.strings.keep_array(checked.keys, checked.strings)
    is_missing = np.concatenate([np.zeros([0], np.int64), *rows]) < 0
    return WrittenKeys(
        len(names) - int(is_missing.sum()), num_new, names[is_missing]
    )


def read_blocks(
    access: RowAccess,
    table: str,
    block_size: int,
    step: Callable[[], int],
    key_type: Callable[[], str],
) -> Iterator[KeyBlock]:
    """Yields all keys of a table, with their rows.

    Args:
      access: Access to the table.
      table: Name of the table, for messages.
      block_size: Number of places in a block, at least 8.
      step: Function that returns the step of the vocabulary.
      key_type: Function that returns the kind of the keys.
    """
    access.before_read()
    store = access.store()
    per_block = max(1, block_size // bucket_layout.KEYS_PER_BUCKET)
    for part in store.parts(access.table):
        for shard, num_buckets in enumerate(part.buckets_of_shards()):
            for begin in range(0, num_buckets, per_block):
                end = min(begin + per_block, num_buckets)
                block = store.send(
                    part,
                    store.run(
                        part,
                        lambda part, shard=shard, begin=begin, end=end: _read(
                            access, table, part, shard, begin, end
                        ),
                    ),
                )
                keys, counts, last_steps, rows, *slots = map(np.asarray, block)
                if len(keys):
                    yield KeyBlock(
                        keys,
                        rows.astype(np.float32, copy=False),
                        dict(zip(access.slots, slots)),
                        counts,
                        last_steps,
                        step(),
                        key_type(),
                        access.strings and access.strings.names(keys),
                    )


def _read(
    access: RowAccess, table: str, part: Part, shard: int, begin: int, end: int
) -> list[tf.Tensor]:
    """Returns keys, counts, last steps, rows and slots of some buckets."""
    block = ops.read_keys(
        lanes=[variables[shard].handle for variables in part.key_variables()],
        shards=[
            variables[shard].handle
            for variables in part.row_variables(access.slots)
        ],
        begin=tf.constant(begin, tf.int64),
        end=tf.constant(end, tf.int64),
        Tvalues=[access.dtype, *(tf.float32 for _ in access.slots)],
        dims=[access.dim, *access.slots.values()],
        table=table,
    )
    return [block.keys, block.counts, block.last_steps, *block.values]
