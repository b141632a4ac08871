"""Reads and updates rows of a table whose rows tf.dtensor has divided.

Stock DTensor gathers the whole table on each device to look up one row, and
its gradient is as large as the table. Here each device reads the rows that it
owns, the parts are summed over the mesh, and an update touches the rows that
were looked up and no others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tf_layoutmap import _ops, _tf_private
from tf_layoutmap.dtensor import policies


@functools.cache
def _register() -> None:
    policies.register_op("LayoutMap>LookupShard", "batch_parallel")
    policies.register_op("LayoutMap>UpdateShard", "local_update")


def row_axis(table: dtensor.DVariable) -> str:
    """The mesh dimension along which the rows of `table` are divided.

    Raises:
      ValueError: If its rows are not divided, or its columns are too.
    """
    specs = table.layout.sharding_specs
    if (
        table.shape.rank != 2
        or specs[0] == dtensor.UNSHARDED
        or specs[1] != dtensor.UNSHARDED
    ):
        raise ValueError(
            "Argument `table` must be [num_rows, dim] with the layout "
            f"(mesh dimension, {dtensor.UNSHARDED!r}). Received: shape "
            f"{table.shape}, layout {specs} ({table.name!r})."
        )
    return specs[0]


@functools.lru_cache(maxsize=64)
def _shard_index(mesh: dtensor.Mesh, axis: str) -> tf.Tensor:
    """`[num_shards, 1, 1]` int32: on each device, which shard it holds."""
    # Eagerly: a function that is being traced would own the tensor.
    with tf.init_scope():
        layout = dtensor.Layout(
            [axis, dtensor.UNSHARDED, dtensor.UNSHARDED], mesh
        )
        return dtensor.pack(
            [
                np.full([1, 1, 1], location[axis], np.int32)
                for location in mesh.local_device_locations()
            ],
            layout,
        )


def lookup(
    table: dtensor.DVariable,
    ids: tf.Tensor,
    *,
    name: str | None = None,
    num_rows: int | None = None,
) -> tf.Tensor:
    """The rows of `ids`; a tape gets one `tf.IndexedSlices` for the table.

    Args:
      table: `[num_rows, dim]` float32, its rows divided along one mesh
        dimension, its columns whole.
      ids: `[num_ids]` int32 or int64 DTensor of the table's mesh.
      name: Of the table, in errors; None for that of the variable.
      num_rows: Rows that ids may name; what is behind them is padding. None
        for all.

    Returns:
      `[num_ids, dim]`, replicated.

    Raises:
      ValueError: If the table has another layout.
      RuntimeError: If tf.dtensor cannot take our ops here.
      tf.errors.OpError: If an id is outside the table. DTensor reports it
        when the result is read, in the words of whichever device came first.
    """
    _register()
    axis, mesh = row_axis(table), table.layout.mesh
    # Layouts flow backwards from whoever uses the result: each is pinned, or
    # a consumer that divides the batch would make these ops impossible.
    ids = dtensor.relayout(ids, dtensor.Layout.replicated(mesh, 1))
    _tf_private.variable_accessed(table)
    partial = _ops.lookup_shard(
        shard_index=_shard_index(mesh, axis),
        shard=table.handle,
        ids=ids,
        dim=table.shape[1],
        num_rows=num_rows or table.shape[0],
        table=name or table.name,
    )
    partial = dtensor.relayout(
        partial,
        dtensor.Layout([axis, dtensor.UNSHARDED, dtensor.UNSHARDED], mesh),
    )
    return dtensor.relayout(
        tf.reduce_sum(partial, axis=0), dtensor.Layout.replicated(mesh, 2)
    )


def update(
    table: dtensor.DVariable,
    slots: Sequence[dtensor.DVariable],
    ids: tf.Tensor,
    gradients: tf.Tensor,
    *,
    optimizer: str,
    hyperparameters: tf.Tensor,
    name: str | None = None,
    num_rows: int | None = None,
) -> None:
    """One optimizer step on the rows of `ids`, those of equal ids summed.

    Args:
      table: As in `lookup`.
      slots: The optimizer's slot variables, with the table's layout.
      ids: `[num_ids]` int32 or int64 DTensor of the table's mesh.
      gradients: `[num_ids, dim]` float32, of the rows of `ids`.
      optimizer: `"sgd"`, `"adagrad"`, `"adam"`, ...; docs/ops.md has them.
      hyperparameters: `[k]` float32, replicated: the numbers of the rule.
      name: As in `lookup`.
      num_rows: As in `lookup`.

    Raises:
      ValueError: If a layout differs.
      RuntimeError: If tf.dtensor cannot take our ops here.
    """
    _register()
    axis, mesh = row_axis(table), table.layout.mesh
    for slot in slots:
        if slot.layout != table.layout:
            raise ValueError(
                "Argument `slots` must have the layout of the table, "
                f"{table.layout.sharding_specs}. Received: "
                f"{slot.layout.sharding_specs} ({slot.name!r})."
            )
    _ops.update_shard(
        shard=table.handle,
        slots=[slot.handle for slot in slots],
        shard_index=_shard_index(mesh, axis),
        ids=dtensor.relayout(ids, dtensor.Layout.replicated(mesh, 1)),
        gradients=dtensor.relayout(
            gradients, dtensor.Layout.replicated(mesh, 2)
        ),
        hyperparameters=hyperparameters,
        optimizer=optimizer,
        num_rows=num_rows or table.shape[0],
        table=name or table.name,
    )
