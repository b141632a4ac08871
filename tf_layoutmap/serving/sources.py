"""Reads the tables of a model or an embedding, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.deltas.weights import variable_of
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.embedding.table_variable import shards_of
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.sharded import ShardedVariable

dtensor = tf.experimental.dtensor

# Size of a block in bytes, and the maximum number of blocks of a table. The
# number is limited because each block becomes a file.
BLOCK_BYTES = 16 * 2**20
_MOST_BLOCKS = 256


def blocks_of(table: TableToExport) -> Iterator[np.ndarray[Any, Any]]:
    """Yields all rows of a table, in blocks `[rows of the block, dim]`.

    If the table is sharded over processes, all processes must iterate over the
    complete result together.
    """
    variable = variable_of(table.weight)
    shape = [table.num_rows, table.dim]
    row_bytes = table.dim * tf.as_dtype(table.dtype).size
    most = max(1, BLOCK_BYTES // row_bytes, -(-table.num_rows // _MOST_BLOCKS))
    for shard in _shards(variable, shape):
        size = shard.shape[0]
        for start in range(0, size, most):
            with tf.device("CPU:0"):
                yield shard[start : min(start + most, size)].numpy()


def handles_of(table: TableToExport) -> list[tf.Tensor]:
    """Returns the handles of all variables that hold rows of a table."""
    variable = variable_of(table.weight)
    handles = [shard.handle for shard in shards_of(variable)]
    if isinstance(variable, ShardedVariable):
        handles.append(variable.handle)
    return handles


def _shards(variable: Any, shape: list[int]) -> list[Any]:
    """Returns objects that can be sliced by rows.

    Each object contains consecutive complete rows of the table, and the objects
    are in the order of the rows.
    """
    if isinstance(variable, ShardedVariable):
        if variable.partition.is_contiguous:
            return list(variable.variables)
        return [_GatheredRows(variable)]
    if not isinstance(variable, dtensor.DVariable):
        return [variable]
    return _shards_on_mesh(variable, shape)


class _GatheredRows:
    """Reads slices of a table if consecutive rows are in different shards."""

    def __init__(self, table: ShardedVariable):
        self._table = table
        self.shape = table.shape

    def __getitem__(self, rows: slice) -> tf.Tensor:
        return self._table.sparse_read(
            tf.range(rows.start, rows.stop, dtype=tf.int64)
        )


def _shards_on_mesh(variable: Any, shape: list[int]) -> list[Any]:
    value = transfer.read_divided(variable)
    layout = dtensor.fetch_layout(value)
    shards = transfer.unique_shards(shape, layout)
    is_local = layout.mesh.num_local_devices() == layout.mesh.size
    if is_local and all(
        shard.slices[1] == slice(0, shape[1]) for shard in shards
    ):
        parts = dtensor.unpack(value)
        # The shards of the last devices may contain padding.
        return [
            _Part(parts[shard.devices[0]], shard.slices[0])
            for shard in sorted(shards, key=lambda shard: shard.slices[0].start)
        ]
    # If the columns are sharded, or if some devices belong to other processes,
    # the full table is read.
    full = tf.constant(transfer.to_host(variable))
    return [_Part(full, slice(0, shape[0]))]


class _Part:
    """A shard that is stored in the first rows of a tensor."""

    def __init__(self, tensor: tf.Tensor, rows: slice):
        self._tensor = tensor
        self.shape = (rows.stop - rows.start, *tensor.shape[1:])

    def __getitem__(self, rows: slice) -> tf.Tensor:
        return self._tensor[rows]
