"""Updates of rows of sharded tables with stock ops of TensorFlow.

The kernel `UpdateShard` runs on CPUs. On a mesh of GPUs or TPUs, the functions
of this module update rows. Each device reads, computes and writes only rows of
its own shard, so an update needs no communication. Its time depends on the
number of ids, not on the number of rows in the table, except for rules that
update all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, tf_private
from tf_layoutmap.layout.keras3 import sharded_rows
from tf_layoutmap.layout.keras3.row_rules import RowRule
from tf_layoutmap.layout.keras3.sharded_rows import laid_out, replicated
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.shard_map import SCOPE
from tf_layoutmap.sharded.routing.checks import known_size

if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import DVariable

dtensor = tf.experimental.dtensor
_UNSHARDED = dtensor.UNSHARDED


def update_rows(
    table: DVariable,
    slots: Sequence[DVariable],
    ids: tf.Tensor,
    gradients: tf.Tensor,
    *,
    optimizer: str,
    hyperparameters: tf.Tensor,
    num_rows: int,
) -> None:
    """Runs one optimizer step on the rows of `ids`.

    Gradients of equal ids are summed. Ids outside of the table are ignored.

    Args:
      table: float32 variable of shape `[num_padded_rows, dim]`, with sharded
        rows and unsharded columns.
      slots: Slot variables of the optimizer, with the layout of `table`.
      ids: int32 or int64 DTensor of shape `[num_ids]`.
      gradients: float32 gradients of the rows of `ids`, `[num_ids, dim]`.
      optimizer: Name of the rule; see docs/ops.md.
      hyperparameters: Hyperparameters of the rule; float32, `[k]`. The values
        after the learning rate are known during tracing.
      num_rows: Number of valid rows; the rows after them are padding.

    Raises:
      NotImplementedError: If the rule applies the gradients of equal ids one
        after the other.
    """
    layout = table.layout
    mesh = layout.mesh
    values = tf.get_static_value(hyperparameters, partial=True)
    assert values is not None  # A stack or a constant.
    rule = RowRule(optimizer, [float(value) for value in values[1:]])
    lr = replicated(hyperparameters[0], mesh)
    ids = replicated(ids, mesh)
    variables = [table, *slots]
    if rule.updates_all_rows:
        rows, *slot_rows = map(transfer.read_divided, variables)
        is_valid = (ids >= 0) & (ids < num_rows)
        sums = sharded_rows.segment_sum(
            tf.where(is_valid[:, tf.newaxis], replicated(gradients, mesh), 0.0),
            tf.where(is_valid, ids, tf.zeros_like(ids)),
            rows.shape[0],
            layout,
        )
        updated = rule.apply(rows, slot_rows, sums, lr)
        for variable, value in zip(variables, updated):
            variable.assign(dtensor.relayout(value, layout))
        return
    ids, sums = sum_equal_ids(ids, gradients, mesh)

    def step(rows: Sequence[tf.Tensor]) -> list[Any]:
        return rule.apply(rows[0], rows[1:], sums[tf.newaxis], lr)

    _replace_rows(variables, ids, num_rows, step)


def replace_rows(
    table: DVariable, ids: tf.Tensor, rows: tf.Tensor, num_rows: int
) -> None:
    """Assigns `rows` to the rows of `ids`.

    Args:
      table: As in `update_rows`.
      ids: As in `update_rows`. Each valid id occurs once.
      rows: float32 tensor of shape `[num_ids, dim]`.
      num_rows: As in `update_rows`.
    """
    mesh = table.layout.mesh
    rows = replicated(rows, mesh)

    def step(old: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.broadcast_to(rows[tf.newaxis], old[0].shape)]

    _replace_rows([table], replicated(ids, mesh), num_rows, step)


def _replace_rows(
    variables: Sequence[DVariable],
    ids: tf.Tensor,
    num_rows: int,
    step: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
) -> None:
    """Replaces the rows of `ids` in each variable by the results of `step`.

    Args:
      variables: Variables of one layout.
      ids: `[num_ids]`, replicated. Each valid id occurs once.
      num_rows: Number of valid rows.
      step: Function from the rows of all variables to the new rows. The shape
        of the rows is `[num_shards, num_ids, dim]`, and each shard computes
        all rows. Only the rows of the owner of an id are used.
    """
    _register()
    layout = variables[0].layout
    mesh, axis = layout.mesh, layout.sharding_specs[0]
    num_shards = mesh.dim_size(axis)
    tables = [transfer.read_divided(variable) for variable in variables]
    size = tables[0].shape[0] // num_shards
    positions = tf.math.floormod(ids, size)

    def sharded(x: tf.Tensor) -> tf.Tensor:
        return laid_out(x, mesh, axis, _UNSHARDED, _UNSHARDED)

    is_owned = (
        (ids >= 0)
        & (ids < num_rows)
        & sharded_rows.owners(ids, size, num_shards, axis=0)
    )
    # The position after the last row of a shard is ignored.
    indices = sharded(
        tf.where(is_owned, positions, tf.fill([], tf.cast(size, ids.dtype)))[
            :, :, tf.newaxis
        ]
    )
    new_rows = step(
        [
            sharded(sharded_rows.rows_of_shards(table, positions, layout))
            for table in tables
        ]
    )
    for variable, rows in zip(variables, new_rows):
        # Each device runs this op on its shards, as in `shard_map`.
        with tf.name_scope(SCOPE):
            tf_private.gen_state_ops.resource_scatter_nd_update(
                variable.handle,
                indices,
                sharded(rows),
                bad_indices_policy="IGNORE",
            )


@functools.cache
def _register() -> None:
    dtensor_ops.register_op("ResourceScatterNdUpdate", "local_update")


def sum_equal_ids(
    ids: tf.Tensor, gradients: tf.Tensor, mesh: Mesh
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each distinct id once, and the sums of its gradients.

    The number of distinct ids is known only at run time, and DTensor requires
    static sizes. Therefore, the results have the size of `ids`. Unused places
    have the id -1.

    Args:
      ids: As in `update_rows`.
      gradients: As in `update_rows`.
      mesh: Mesh of `ids` and `gradients`.
    """
    ids, gradients = replicated(ids, mesh), replicated(gradients, mesh)
    num_ids = known_size(ids)
    # Each segment contains the places of one id, in ascending order.
    order = replicated(tf.argsort(ids, stable=True), mesh)
    ids = replicated(tf.gather(ids, order), mesh)
    gradients = replicated(tf.gather(gradients, order), mesh)
    is_first = tf.concat(
        [tf.ones_like(ids[:1], tf.bool), ids[1:] != ids[:-1]], axis=0
    )
    segments = replicated(tf.cumsum(tf.cast(is_first, tf.int32)) - 1, mesh)
    sums = tf.math.unsorted_segment_sum(gradients, segments, num_ids)
    # GPUs have no kernel for sums of int64, so the places of ids are summed.
    places = tf.range(num_ids)
    firsts = tf.math.unsorted_segment_sum(
        tf.where(is_first, places, tf.zeros_like(places)), segments, num_ids
    )
    distinct = tf.gather(ids, replicated(firsts, mesh))
    is_used = places <= segments[-1]
    return (
        replicated(tf.where(is_used, distinct, -tf.ones_like(ids)), mesh),
        replicated(sums, mesh),
    )
