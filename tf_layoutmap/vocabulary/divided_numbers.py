"""The numbers of a vocabulary whose shards each count for themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _tf_private

Array = np.ndarray[Any, Any]

# Of the numbers: the steps and the kind of keys. All others are counts.
_STEP, _KIND = 0, 1


class DividedNumbers(_tf_private.Trackable):
    """int64 numbers of each shard, which are one vector to everybody else.

    A step counts in all shards, a key in its own. A checkpoint has them as the
    one variable that they are on a host.

    Attributes:
      copies: By shard, each `[num_numbers]` int64.
      shape: `[num_numbers]`.
      dtype: int64.
    """

    dtype = tf.int64

    def __init__(self, copies: list[Any]):
        """Takes the variables, one or more."""
        self.copies = copies
        self.shape = copies[0].shape

    def __getitem__(self, index: int) -> tf.Tensor:
        """Returns a number, in graphs, too."""
        found = tf.stack([one[index] for one in self.copies])
        return (tf.reduce_max if index in (_STEP, _KIND) else tf.reduce_sum)(
            found
        )

    def numpy(self) -> Array:
        """Returns all numbers."""
        found = np.stack([one.numpy() for one in self.copies])
        values = found.sum(0)
        # A step that one server has refused is counted by the others.
        values[[_STEP, _KIND]] = found[:, [_STEP, _KIND]].max(0)
        return values

    def assign(self, values: Any) -> None:
        """Takes the numbers of a whole vocabulary; counts go to one shard."""
        values = tf.cast(values, tf.int64)
        is_count = tf.range(tf.size(values)) > _KIND
        uncounted = tf.where(is_count, tf.zeros_like(values), values)
        for shard, one in enumerate(self.copies):
            one.assign(uncounted if shard else values)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        """The copies in an exported graph, which reads them; else none."""
        del kwargs
        return (
            {}
            if save_type == "checkpoint"
            else {str(shard): one for shard, one in enumerate(self.copies)}
        )

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {
            _tf_private.VARIABLE_VALUE_KEY: tf.constant(self.numpy(), tf.int64)
        }

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored[_tf_private.VARIABLE_VALUE_KEY])
