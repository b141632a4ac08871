"""In-place resharding of a table."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import strategies
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.checks import Shards


def reshard(
    shards: Shards,
    partition: RowPartition,
    devices: Sequence[str] | None = None,
) -> list[tf.Variable]:
    """Moves all rows into new variables, and empties the old variables.

    The function first splits the old shards, one at a time, into pieces for the
    new shards. Then the function assembles the new shards, one at a time. At
    most one shard, old or new, is in memory twice.

    Args:
      shards: The table. The old variables cannot be read afterwards. If a
        function still uses them, the function fails and does not read old
        values.
      partition: The new partition of the rows.
      devices: Device of each new shard. None: the device of the first old
        shard.

    Returns:
      The new variables.
    """
    pieces: list[list[Any]] = [[] for _ in range(partition.num_shards)]
    positions: list[list[Any]] = [[] for _ in range(partition.num_shards)]
    trainable = shards.variables[0].trainable
    device = shards.variables[0].device
    names = [
        f"{shards.name}/part_{shard}" for shard in range(partition.num_shards)
    ]
    for number, variable in enumerate(shards.variables):
        rows = shards.partition.global_rows(number)
        owners, new_rows = partition.locate(rows)
        for shard in range(partition.num_shards):
            mine = (owners == shard).nonzero()[0]
            if mine.size:
                pieces[shard].append(_piece(shards, number, mine))
                positions[shard].append(new_rows[mine])
        _empty(variable)
    variables = []
    for shard, size in enumerate(partition.sizes):
        with tf.device(devices[shard] if devices else device):
            variables.append(
                tf.Variable(
                    _assemble(shards, pieces[shard], positions[shard], size),
                    trainable=trainable,
                    name=names[shard],
                )
            )
        pieces[shard], positions[shard] = [], []
    return variables


def _assemble(
    shards: Shards, pieces: list[tf.Tensor], positions: list, size: int
) -> tf.Tensor:
    shape = shards.variables[0].shape.as_list()
    shape[shards.axis] = size
    if not pieces:
        return tf.zeros(shape, shards.dtype)
    if shards.axis == 1:
        return tf.concat(pieces, axis=1)  # Columns are in order.
    return tf.dynamic_stitch(
        [tf.constant(part, tf.int32) for part in positions], pieces
    )


def _piece(shards: Shards, number: int, mine: np.ndarray) -> tf.Tensor:
    if shards.axis == 1:
        return tf.gather(shards.variables[number], mine, axis=1)
    # Only these rows are read, because a read of the complete variable may copy
    # the variable.
    return routing.gather_checked(
        shards.single_shard(number), tf.constant(mine)
    )


def _empty(variable: tf.Variable) -> None:
    """Replaces a variable's value by a scalar to release its memory."""
    tf.raw_ops.AssignVariableOp(
        resource=strategies.handle_of(variable),
        value=tf.zeros([], variable.dtype),
        validate_shape=False,
    )
