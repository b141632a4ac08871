"""A count that each shard of a table has, on its own server."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private


class CopiedCount(_tf_private.Trackable):
    """int64 scalars that are one value whenever no step is under way.

    A checkpoint has it as the one variable that it is on a host.

    Attributes:
      copies: By shard.
      shape: `[]`.
      dtype: int64.
    """

    shape = tf.TensorShape([])
    dtype = tf.int64

    def __init__(self, copies: list[Any]):
        """Takes the variables, one or more."""
        self.copies = copies

    def numpy(self) -> Any:
        """Returns the value.

        Raises:
          RuntimeError: If the copies differ: a step is under way.
        """
        values = {int(one.numpy()) for one in self.copies}
        if len(values) > 1:
            raise RuntimeError(
                "Tables on servers can be saved and compared while no step "
                "is under way: call `join` of the coordinator first. Received: "
                f"shards of one table after {sorted(values)} updates."
            )
        return tf.constant(values.pop(), tf.int64).numpy()

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {
            _tf_private.VARIABLE_VALUE_KEY: tf.constant(self.numpy(), tf.int64)
        }

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        value = restored[_tf_private.VARIABLE_VALUE_KEY]
        for one in self.copies:
            one.assign(tf.cast(value, tf.int64))
