"""`ShardedNumbers`, the statistics of a vocabulary on several servers."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private

Array = np.ndarray[Any, Any]

# Indices of the step number and of the kind of keys. All other elements of the
# numbers are counts.
STEP, KIND = 0, 1


class SavedAsOne(tf_private.Trackable):
    """int64 variables of several shards that a checkpoint contains as one.

    Attributes:
      variables: One variable per shard, all of the same shape.
      shape: Shape of each variable.
      dtype: int64.
    """

    dtype = tf.int64

    def __init__(self, variables: list[Any]):
        """Stores the variables, at least one."""
        self.variables = variables
        self.shape = variables[0].shape

    def numpy(self) -> Any:
        """Returns the value that a checkpoint contains."""
        raise NotImplementedError

    def assign(self, value: Any) -> None:
        """Assigns the value of a checkpoint to the variables."""
        raise NotImplementedError

    def _copy_trackable_to_cpu(
        self, object_map: MutableMapping[Any, Any]
    ) -> None:
        # An asynchronous save writes the copies of the variables.
        for variable in self.variables:
            variable._copy_trackable_to_cpu(object_map)
        if self not in object_map:
            object_map[self] = type(self)(
                [object_map[variable] for variable in self.variables]
            )

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {
            tf_private.VARIABLE_VALUE_KEY: tf.constant(self.numpy(), tf.int64)
        }

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored[tf_private.VARIABLE_VALUE_KEY])


class ShardedNumbers(SavedAsOne):
    """Counters of several shards, with the interface of one int64 vector.

    Each shard counts all steps. The other counts of a shard include only the
    keys of the shard. A checkpoint contains the total numbers as one variable,
    as for a vocabulary with one shard.

    Attributes:
      variables: One variable `[num_numbers]` int64 per shard.
      shape: `[num_numbers]`.
      dtype: int64.
    """

    def __getitem__(self, index: int) -> tf.Tensor:
        """Returns one number as a tensor."""
        values = tf.stack([variable[index] for variable in self.variables])
        reduce = tf.reduce_max if index in (STEP, KIND) else tf.reduce_sum
        return reduce(values, axis=0)

    def numpy(self) -> Array:
        """Returns all numbers."""
        by_shard = np.stack([variable.numpy() for variable in self.variables])
        values = by_shard.sum(0)
        # The maximum is used, because a step that failed on one server is
        # already counted on the other servers.
        values[[STEP, KIND]] = by_shard[:, [STEP, KIND]].max(0)
        return values

    def assign(self, values: Any) -> None:
        """Assigns the total numbers of a vocabulary.

        The step and the kind are assigned to all shards. The counts are
        assigned to the first shard, and the counts of the other shards are set
        to 0.
        """
        values = tf.cast(values, tf.int64)
        is_count = tf.range(tf.size(values)) > KIND
        uncounted = tf.where(is_count, tf.zeros_like(values), values)
        for shard, variable in enumerate(self.variables):
            variable.assign(uncounted if shard else values)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the variables of all shards for an exported graph.

        For a checkpoint, the result is empty, because a checkpoint contains the
        numbers as one variable.
        """
        del kwargs
        return (
            {}
            if save_type == "checkpoint"
            else {
                str(shard): variable
                for shard, variable in enumerate(self.variables)
            }
        )
