"""`tape.gradient(y, sharded)`: one gradient in global rows."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.partition import RowPartition


class ShardedVariableGradient(_tf_private.CompositeTensorGradient):
    """Tells the tape to differentiate by the shards, and joins the results."""

    def get_gradient_components(self, value: Any) -> list[tf.Tensor]:
        # The handles, because that is what a read puts on the tape.
        return [variable.handle for variable in value.variables]

    def replace_gradient_components(
            self, value: Any, component_grads: Sequence
            ) -> tf.Tensor | tf.IndexedSlices | None:
        return join(value.partition, value.shape, component_grads)


def join(partition: RowPartition, shape: tf.TensorShape,
         gradients: Sequence) -> tf.Tensor | tf.IndexedSlices | None:
    """Returns the gradient of the whole table from those of its shards.

    Args:
      partition: The table's; one with a single shard for a single gradient.
      shape: Of the whole table.
      gradients: Per shard a tensor, an `tf.IndexedSlices` of local rows or
        None.

    Returns:
      A tensor when every shard was read whole, None when none was read, else
      one `tf.IndexedSlices` of global rows. Repeated rows are not summed, as
      for `tf.Variable`.
    """
    if all(gradient is None for gradient in gradients):
        return None
    offsets = partition.offsets if len(gradients) > 1 else (0,)
    if all(isinstance(gradient, tf.Tensor) for gradient in gradients):
        return (gradients[0] if len(gradients) == 1
                else tf.concat(gradients, axis=0))
    rows, values = [], []
    for gradient, offset in zip(gradients, offsets):
        if gradient is None:
            continue
        if isinstance(gradient, tf.Tensor):
            # Not zeros for the shards that were not read: they may be large.
            gradient = tf.IndexedSlices(
                gradient, tf.range(tf.shape(gradient)[0]))
        rows.append(tf.cast(gradient.indices, tf.int64) + offset)
        values.append(gradient.values)
    indices = tf.concat(rows, axis=0)
    return tf.IndexedSlices(tf.concat(values, axis=0), indices,
                            tf.constant(shape.as_list(), tf.int64))
