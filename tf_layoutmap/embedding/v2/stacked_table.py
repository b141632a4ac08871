"""`StackedTable`: one table in the stacked variable of SparseCores."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

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
