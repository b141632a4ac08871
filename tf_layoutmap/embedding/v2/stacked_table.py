"""The stacked variables of SparseCores, and the tables in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.embedding.checkpoints import layouts


class StackedTable:
    """The rows of a table, or one of its slot variables, without stacking.

    Attributes:
      name: Name of the table or the slot variable.
      shape: Shape of the table, `[num_rows, dim]`.
      dtype: Float32.
    """

    dtype = tf.float32

    def __init__(self, stack: Any, layout: layouts.TableLayout, variable: str):
        """Stores the variable of the stack, which is not read.

        Args:
          stack: The `TPUEmbeddingShardedVariable` of the stack.
          layout: Layout of the table.
          variable: Name of the variable, `"parameters"` for the rows.
        """
        self._stack = stack
        self._layout = layout
        self.name = layout.table_name
        if variable != "parameters":
            self.name += f"/{variable}"
        self.shape = tf.TensorShape(list(layout.unsharded_shape))

    def numpy(self) -> layouts.Array:
        """Returns a copy of all rows."""
        return layouts.unstacked(self._read(), self._layout)

    def copy(self) -> tf.Variable:
        """Returns a variable on the host with a copy of all rows."""
        with tf.device(HOST):
            variable = tf_private.UninitializedVariable(
                shape=self.shape, dtype=self.dtype, name=self.name
            )
            variable.assign(self.numpy())
        return variable

    def __array__(
        self, dtype: Any = None, copy: bool | None = None
    ) -> layouts.Array:
        del copy
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        """Replaces all rows of the table. Other tables do not change.

        Args:
          value: Float32 `[num_rows, dim]`.

        Raises:
          ValueError: If the shape of `value` differs from the table.
        """
        value = np.asarray(value, np.float32)
        if value.shape != tuple(self.shape):
            raise ValueError(
                "Argument `value` must have the shape of the table, "
                f"{tuple(self.shape)}. Received: {value.shape} (table "
                f"{self.name!r})."
            )
        stack = self._read()
        layouts.replace(stack, value, self._layout)
        shards = self._stack.values
        for shard, rows in zip(shards, np.split(stack, len(shards))):
            with tf.device(shard.device):
                shard.assign(rows)

    def _read(self) -> layouts.Array:
        """Returns a copy of all rows of the stack."""
        return np.concatenate([shard.numpy() for shard in self._stack.values])


def copy_in_async_checkpoints(stack: Any) -> None:
    """Lets asynchronous checkpoints copy a variable of SparseCores.

    TensorFlow copies a variable by a read of its first replica. The class of
    these variables does not support such a read, and TensorFlow then omits the
    variable from the checkpoint with a warning.

    Args:
      stack: The `TPUEmbeddingShardedVariable`.
    """

    def copy_to_host(object_map: Any) -> None:
        with tf.device(HOST):
            if stack not in object_map:
                object_map[stack] = tf_private.UninitializedVariable(
                    shape=stack.shape, dtype=stack.dtype, name=stack.name
                )
            object_map[stack].assign(
                tf.concat([shard.read_value() for shard in stack.values], 0)
            )

    stack._copy_trackable_to_cpu = copy_to_host
