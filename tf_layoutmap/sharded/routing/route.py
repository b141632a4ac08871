"""Where the rows of some ids are: in which part, and which row there."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap.sharded.routing import parts
from tf_layoutmap.sharded.routing.shards import Shards


@dataclasses.dataclass(frozen=True)
class Route:
    """Where the rows of some ids live.

    Attributes:
      rows: One `[num_ids of the part]` tensor per part: rows of that part.
      positions: Alike, int32: which of the ids those are, ascending. None for
        all of them, when there is one part.
    """

    rows: Sequence[tf.Tensor]
    positions: Sequence[tf.Tensor | None]


def route(
    shards: Shards, found: Sequence[parts.Part], flat_ids: tf.Tensor
) -> Route:
    """Divides checked `[num_ids]` ids among parts, keeping their order."""
    rows, numbers = locate(shards, found, flat_ids)
    if len(found) == 1:
        return Route([rows], [None])
    positions = tf.range(tf.size(flat_ids))
    return Route(
        tf.dynamic_partition(rows, numbers, len(found)),
        tf.dynamic_partition(positions, numbers, len(found)),
    )


def locate(
    shards: Shards, found: Sequence[parts.Part], flat_ids: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the row of each id in its part, and the part's number."""
    owners, rows = parts.assign(shards.partition, flat_ids)
    part_of_shard = [0] * len(shards.variables)
    first_row_of_shard = [0] * len(shards.variables)
    for number, part in enumerate(found):
        # Inside a part, shards follow each other.
        first_row = 0
        for shard in part.numbers:
            part_of_shard[shard] = number
            first_row_of_shard[shard] = first_row
            first_row += shards.partition.sizes[shard]
    if any(first_row_of_shard):
        rows += tf.gather(tf.constant(first_row_of_shard, rows.dtype), owners)
    if len(found) == len(shards.variables):
        return rows, owners
    return rows, tf.gather(tf.constant(part_of_shard, tf.int32), owners)
