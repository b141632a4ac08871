"""Reads tables from the base checkpoint and its deltas.

`find_prefix` finds an embedding in the checkpoint. `read_variable` returns the
value of a variable after all deltas. `differing_rows` compares this value with
the current variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import slice_specs, tf_private
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.deltas.served.chain import Delta
from tf_layoutmap.embedding.changes import LANES, WHOLE
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import checkpoint_files, parts

Array = np.ndarray[Any, Any]
ATTRIBUTE = "_variables"
ROWS = "rows"
# Number of cells per block of the sketch. The sketch counts the lookups of keys
# that have no row. A step changes few cells of the sketch, so deltas contain
# only the changed blocks.
SKETCH_CELLS = 16
SKETCH_ROWS = "vocabulary_sketch_rows"


def open_checkpoint(base: str) -> Any:
    """Returns a reader of a checkpoint.

    Raises:
      ValueError: If there is no checkpoint with the prefix `base`.
    """
    try:
        return storage.open_checkpoint(base)
    except (tf.errors.OpError, ValueError) as error:
        raise ValueError(
            "Argument `base` must be the prefix of a checkpoint of "
            f"TensorFlow. Received: base={base!r} ({error})."
        ) from None


def find_prefix(base: str, embedding: Any, root: Any = None) -> str:
    """Returns the prefix of an embedding's tensors in a checkpoint.

    Args:
      base: Prefix of the checkpoint.
      embedding: The `tlm.TPUEmbedding`.
      root: The object that was saved as the checkpoint. If None, the tables are
        identified only by their names and shapes.

    Raises:
      ValueError: If the checkpoint does not contain the tables of `embedding`.
        The function also raises this error if several embeddings in the
        checkpoint match and `root` is None.
    """
    variables: Mapping[str, Mapping[str, Any]] = embedding._variables
    shapes = open_checkpoint(base).get_variable_to_shape_map()
    wanted = {
        checkpoint_files.key_of(ATTRIBUTE, table, name): list(variable.shape)
        for table, by_name in variables.items()
        for name, variable in by_name.items()
    }
    first = next(iter(wanted))
    prefixes = [
        key.removesuffix(first)
        for key in shapes
        if key.endswith(first) and key.removesuffix(first)[-1:] in ("", "/")
    ]
    fitting = [
        prefix
        for prefix in prefixes
        if all(
            shapes.get(prefix + key) == shape for key, shape in wanted.items()
        )
    ]
    below = (
        fitting
        if root is None
        else [
            prefix
            for prefix in fitting
            if _object_at(root, prefix) is embedding
        ]
    )
    if len(below) == 1:
        return below[0]
    problem = (
        "occur several times; pass the object that was saved as argument `root`"
        if below
        else "do not belong to `root`"
        if fitting
        else "have other variables or shapes"
        if prefixes
        else "do not occur"
    )
    raise ValueError(
        "Argument `base` must be a checkpoint that holds the embedding once. "
        f"Received: base={base!r}, where tables {sorted(variables)} "
        f"{problem}."
    )


def _object_at(root: Any, prefix: str) -> Any:
    """Returns the object at `prefix` in a checkpoint of `root`, or None."""
    node = root
    for name in prefix.removesuffix("/").split("/") if prefix else ():
        # Reverts TensorFlow's escaping of attribute names.
        local_name = re.sub(
            r"\.[.S]", lambda match: "." if match[0] == ".." else "/", name
        )
        node = tf.train.TrackableView(node).children(node).get(local_name)
        if node is None:
            return None
    return node


def read_variable(
    base: Any,
    key: str,
    deltas: Sequence[Delta],
    table: str,
    name: str,
) -> Array:
    """Returns the value of a variable after all deltas are applied.

    Args:
      base: Reader of the base, from `open_checkpoint`.
      key: Key of the variable's tensor in the base.
      deltas: The deltas, in the order in which they were written.
      table: Name of the variable's table in the deltas.
      name: Name of the variable.

    Raises:
      ValueError: If the variable cannot be read.
    """
    value = np.array(read_tensor(base, key))
    for delta in deltas:
        value = _apply_delta(
            value, storage.open_checkpoint(delta.tensors), table, name
        )
    return value


class StoredRows:
    """The rows of a variable in the base and the deltas.

    `read` returns a block of rows. TensorFlow completely reads each slice in a
    checkpoint that overlaps with the block, so many small blocks are slow.
    """

    def __init__(
        self,
        prefix: str,
        key: str,
        deltas: Sequence[Delta],
        names: tuple[str, str],
        variable: Any,
    ):
        """Reads the numbers of the changed rows.

        Args:
          prefix: Prefix of the base.
          key: Key of the variable's tensor in the base.
          deltas: The deltas, in the order in which they were written.
          names: Names of the table and of the variable in the deltas.
          variable: The variable, for its shape and dtype.
        """
        self._prefix, self._key = prefix, key
        self._shape = [int(size) for size in variable.shape]
        self._dtype = tf.as_dtype(variable.dtype)
        table, name = names
        # In a variable of a vocabulary, each row of the table is an element.
        self._lanes = self._shape[1] if name in LANES else 0
        self._deltas = []
        for delta in deltas:
            reader = storage.open_checkpoint(delta.tensors)
            rows = reader.get_tensor(f"{table}/{ROWS}")
            shape = reader.get_variable_to_shape_map()[f"{table}/{name}"]
            self._deltas.append((delta.tensors, f"{table}/{name}", rows, shape))

    def read(self, first: int, stop: int) -> Array:
        """Returns the rows `[first, stop)` after all deltas are applied.

        Raises:
          ValueError: If a file is truncated or modified.
        """
        value = self._read_slice(
            self._prefix, self._key, self._shape, first, stop
        )
        lanes = self._lanes or 1
        for prefix, key, rows, shape in self._deltas:
            begin, end = np.searchsorted(rows, [first * lanes, stop * lanes])
            if begin == end:
                continue
            changed = self._read_slice(prefix, key, shape, begin, end)
            at = rows[begin:end] - first * lanes
            if self._lanes:
                value.reshape(-1)[at] = changed
            else:
                value[at] = changed
        return value

    def _read_slice(
        self,
        prefix: str,
        key: str,
        shape: Sequence[int],
        first: int,
        stop: int,
    ) -> Array:
        source = "the base" if prefix == self._prefix else "a delta"
        if self._dtype not in tf_private.SLICEABLE_DTYPES:
            reader = open_checkpoint(prefix)
            return np.array(read_tensor(reader, key, source)[first:stop])
        spec = slice_specs.of_rows(shape, first, stop - first)
        return _restore_slice(prefix, key, spec, self._dtype, source)


def _restore_slice(
    prefix: str, key: str, spec: str, dtype: tf.DType, source: str
) -> Array:
    """Reads a slice of a tensor in a checkpoint.

    Args:
      prefix: Prefix of the checkpoint.
      key: Key of the tensor.
      spec: Slice spec of TensorFlow's checkpoints.
      dtype: Dtype of the tensor.
      source: Name of the checkpoint in error messages.

    Raises:
      ValueError: If the file is truncated or modified.
    """
    try:
        with tf.device("CPU:0"):
            (value,) = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=[key],
                shape_and_slices=[spec],
                dtypes=[dtype],
            )
    except tf.errors.OpError as error:
        raise ValueError(
            f"Reading tensor {key!r} from {source} failed; the file was "
            f"truncated or modified: {error}."
        ) from None
    return np.array(value.numpy())


# Size of the blocks that are compared.
_BLOCK_BYTES = 64 << 20


def differing_rows(
    stored: Array,
    shards: Sequence[Any],
    first: int = 0,
    block_bytes: int = _BLOCK_BYTES,
) -> Array:
    """Returns the int64 indices of all rows that are not bitwise equal.

    The memory must hold the stored rows, and a block of the current rows.

    Args:
      stored: Rows in the base and the deltas. Rows of a variable of a
        vocabulary are its buckets, `[num_buckets, lanes]`.
      shards: Variables with the current rows.
      first: Index of the first row in the unsharded variable.
      block_bytes: Maximum size of a block. A block has at least one row.
    """
    rows, start = [np.zeros([0], np.int64)], 0
    for shard in shards:
        num_rows, width = (known_size(shard, axis) for axis in (0, 1))
        row_bytes = width * tf.as_dtype(shard.dtype).size
        step = max(block_bytes // row_bytes, 1)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            with tf.device(shard.device):
                current = tf.gather(shard, tf.range(begin, end)).numpy()
            differing = _differing(stored[start + begin : start + end], current)
            is_lane = current.dtype in (np.int64, np.int32)
            rows.append(
                differing + (first + start + begin) * (width if is_lane else 1)
            )
        start += num_rows
    return np.concatenate(rows)


def read_tensor(reader: Any, key: str, source: str = "the base") -> Any:
    """Returns a tensor of a checkpoint.

    Args:
      reader: Reader of the checkpoint, from `open_checkpoint`.
      key: Key of the tensor.
      source: Name of the checkpoint in error messages.

    Raises:
      ValueError: If the file is truncated or modified.
    """
    try:
        return reader.get_tensor(key)
    except (tf.errors.OpError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"Reading tensor {key!r} from {source} failed; the file was "
            f"truncated or modified: {error}."
        ) from None


def _apply_delta(value: Array, delta: Any, table: str, name: str) -> Array:
    """Applies one delta to the value of a variable, and returns the result."""
    changed = delta.get_tensor(f"{table}/{name}")
    if name in LANES:
        rows = delta.get_tensor(f"{table}/{ROWS}")
        # The last row, which all unknown keys share, has no entry in `value`.
        is_lane = rows < value.size
        value.reshape(-1)[rows[is_lane]] = changed[is_lane]
    elif name == parts.SKETCH:
        value.reshape(-1, SKETCH_CELLS)[
            delta.get_tensor(f"{table}/{SKETCH_ROWS}")
        ] = changed
    elif value.ndim == 2:
        value[delta.get_tensor(f"{table}/{ROWS}")] = changed
    else:
        value = np.array(changed)
    return value


def has_rows(name: str) -> bool:
    """Whether a variable has a value for each row of its table."""
    return name not in WHOLE


def _differing(stored: Array, current: Array) -> Array:
    """Returns the indices of the rows of two arrays that are not equal."""
    different = _bits(current) != _bits(stored)
    # In a variable of a vocabulary, each element (lane of a bucket) represents
    # a row of the table.
    is_lane = current.dtype in (np.int64, np.int32)
    return np.flatnonzero(different.ravel() if is_lane else different.any(1))


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def changed_cells(before: Array, after: Array) -> dict[str, Array]:
    """Returns the changed blocks of the sketch, and their indices."""
    before, after = (
        cells.reshape(-1, SKETCH_CELLS) for cells in (before, after)
    )
    rows = np.flatnonzero((before != after).any(1))
    return {parts.SKETCH: after[rows], SKETCH_ROWS: rows}
