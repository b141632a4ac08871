"""A lookup in several shards with TensorFlow's own operations."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing import assertions
from tf_layoutmap.sharded.routing.shards import known_size


def gather(
    shards: Sequence[tf.Variable],
    ids: tf.Tensor,
    name: str,
    num_rows: int | None = None,
) -> tf.Tensor:
    """Returns the rows of `ids`, in their order.

    Args:
      shards: Contiguous blocks of rows, in order.
      ids: Any shape, int32 or int64: global rows.
      name: Whose rows, for the message about an id that is outside.
      num_rows: Rows of a single shard that ids may name; None for all.

    Returns:
      Shape `ids.shape + [dim]`.
    """
    sizes = [known_size(shard) for shard in shards]
    if num_rows is not None and len(shards) == 1:
        sizes = [num_rows]  # What is behind them is padding.
    partition = RowPartition.from_sizes(sizes)
    flat_ids = tf.cast(tf.reshape(ids, [-1]), tf.int64)
    inside = tf.reduce_all((flat_ids >= 0) & (flat_ids < partition.num_rows))
    checks = assertions.require(
        inside,
        f"Ids must be in [0, {partition.num_rows}) (layer {name!r}). "
        "Received: ",
        flat_ids,
    )
    with tf.control_dependencies(checks):
        flat_ids = tf.identity(flat_ids)
    # Searching the ends (not the starts) skips empty shards.
    owners = tf.searchsorted(
        tf.constant(partition.offsets[1:], tf.int64), flat_ids, side="right"
    )
    starts = tf.gather(tf.constant(partition.offsets[:-1], tf.int64), owners)
    num_shards = len(shards)
    local_rows = tf.dynamic_partition(flat_ids - starts, owners, num_shards)
    positions = tf.dynamic_partition(
        tf.range(tf.size(flat_ids)), owners, num_shards
    )
    rows = tf.dynamic_stitch(
        positions,
        [tf.gather(shard, local) for shard, local in zip(shards, local_rows)],
    )
    shape = tf.concat([tf.shape(ids), shards[0].shape[1:]], 0)  # pyright: ignore[reportArgumentType, reportCallIssue] The stub of tf.concat takes no shapes.
    rows = tf.reshape(rows, shape)
    rows.set_shape(ids.shape.concatenate(shards[0].shape[1:]))
    return rows


def gather_with_dense_gradient(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of `ids`; equal ids are summed in the gradient.

    Args:
      table: `[num_rows, dim]`, on a mesh.
      ids: Any shape, int32 or int64.

    Returns:
      Shape `ids.shape + [dim]`.
    """
    num_rows, dim = table.shape

    @tf.custom_gradient
    def gather(rows: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(
                tf.reshape(upstream, [-1, dim]), tf.reshape(ids, [-1]), num_rows
            )

        return tf.gather(rows, ids), gradient

    return gather(tf.convert_to_tensor(table))
