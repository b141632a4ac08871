"""Cuts a table in place into other shards."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.checks import Shards


def reshard(
    shards: Shards,
    partition: RowPartition,
    devices: Sequence[str] | None = None,
) -> list[tf.Variable]:
    """Moves all rows into new variables and empties the old ones.

    Old shards are taken apart one after the other, into what each new shard
    gets of them; then the new shards are put together one after the other. So
    no more than one shard, old or new, is there twice.

    Args:
      shards: The table. Its variables cannot be read any more afterwards: a
        function that still uses them fails, and does not read old numbers.
      partition: The new rule, of the same rows.
      devices: Where each new shard goes; None for where the first one was.

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
        return tf.concat(pieces, axis=1)  # Columns are always contiguous.
    return tf.dynamic_stitch(
        [tf.constant(part, tf.int32) for part in positions], pieces
    )


def _piece(shards: Shards, number: int, mine: np.ndarray) -> tf.Tensor:
    if shards.axis == 1:
        return tf.gather(shards.variables[number], mine, axis=1)
    # Reads these rows only; a read of the whole may be a copy of it.
    return routing.gather_checked(shards.alone(number), tf.constant(mine))


def _empty(variable: tf.Variable) -> None:
    """Frees the value, and leaves one that no function can take for it."""
    tf.raw_ops.AssignVariableOp(
        resource=variable.handle,
        value=tf.zeros([], variable.dtype),
        validate_shape=False,
    )
