"""`tape.gradient(y, sharded)`: one gradient in global rows."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.sharded.routing.checks import Shards


class ShardedVariableGradient(tf_private.CompositeTensorGradient):
    """Tells the tape to differentiate by the shards, and joins the results."""

    def get_gradient_components(self, value: Any) -> list[tf.Tensor]:
        # The handles, because that is what a read puts on the tape.
        return [variable.handle for variable in value.variables]

    def replace_gradient_components(
        self, value: Any, component_grads: Sequence
    ) -> tf.Tensor | tf.IndexedSlices | None:
        return join(value._shards(), component_grads)


def join(
    shards: Shards, gradients: Sequence
) -> tf.Tensor | tf.IndexedSlices | None:
    """Returns the gradient of the whole table from those of its shards.

    Args:
      shards: The table.
      gradients: Per shard a tensor, an `tf.IndexedSlices` of local rows or
        None.

    Returns:
      A tensor when every shard was read whole, None when none was read, else
      one `tf.IndexedSlices` of global rows. Repeated rows are not summed, as
      for `tf.Variable`.
    """
    if all(gradient is None for gradient in gradients):
        return None
    if (
        all(isinstance(gradient, tf.Tensor) for gradient in gradients)
        and shards.partition.is_contiguous
    ):
        return (
            gradients[0]
            if len(gradients) == 1
            else tf.concat(gradients, axis=shards.axis)
        )
    rows, values = [], []
    for number, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if isinstance(gradient, tf.Tensor):
            # Not zeros for the shards that were not read: they may be large.
            gradient = tf.IndexedSlices(
                gradient, tf.range(tf.shape(gradient)[0])
            )
        rows.append(
            _global_rows(shards, number, tf.cast(gradient.indices, tf.int64))
        )
        values.append(_whole_rows(shards, number, gradient.values))
    indices = tf.concat(rows, axis=0)
    # int32, as TensorFlow has it, for all sizes that it holds: the branches of
    # tf.cond must agree when gradients are taken inside of them.
    shape = shards.sizes
    return tf.IndexedSlices(
        tf.concat(values, axis=0),
        indices,
        tf.constant(
            shape, tf.int32 if max(shape) <= tf.int32.max else tf.int64
        ),
    )


def _global_rows(
    shards: Shards, number: int, local_rows: tf.Tensor
) -> tf.Tensor:
    partition = shards.partition
    if shards.axis == 1:
        return local_rows
    if partition.placement == "mod":
        return local_rows * partition.num_shards + number
    if partition.placement == "callable":
        return tf.gather(tf.constant(partition.global_rows(number)), local_rows)
    return local_rows + partition.offsets[number]


def _whole_rows(shards: Shards, number: int, values: tf.Tensor) -> tf.Tensor:
    """Returns rows of a shard as rows of the table, 0 in other columns."""
    if shards.axis == 0:
        return values
    offset, end = shards.partition.offsets[number:][:2]
    paddings = [[0, 0]] * shards.shape.rank
    paddings[1] = [offset, shards.partition.num_rows - end]
    return tf.pad(values, paddings)
