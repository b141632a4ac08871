"""Lookups and updates of Keras tables whose rows are sharded over a mesh.

DTensor gathers the full table for each lookup of rows. DTensor also gathers the
full table when an optimizer divides an update by a slot variable. The functions
of this module let each device look up and update only the rows that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, keras_private, tf_private
from tf_layoutmap.layout.keras3 import row_updates, sharded_rows
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh
from tf_layoutmap.layout.replication import traces

if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import DVariable

dtensor = tf.experimental.dtensor


def axis_of(variable: Any) -> str | None:
    """Returns the mesh axis that shards the rows of a table, or None.

    Also returns None for tables that the kernels do not support: ranks other
    than 2, dtypes other than float32, sharded columns, and devices other than
    CPUs. `sharded_rows` supports these dtypes, columns and devices.
    """
    if (
        not isinstance(variable, MeshVariable | dtensor.DVariable)
        or len(variable.shape) != 2
        or tf.as_dtype(variable.dtype) != tf.float32
    ):
        return None
    rows, columns = variable.layout.sharding_specs
    if (
        rows == dtensor.UNSHARDED
        or columns != dtensor.UNSHARDED
        or not has_kernels(variable.layout.mesh)
    ):
        return None
    return rows


def has_kernels(mesh: Mesh) -> bool:
    """Returns whether the kernels of this package run on the devices."""
    return mesh.device_type() == "CPU" and dtensor_ops.available()


def embedding_call(
    original: Callable[..., Any],
    layer: Any,
    inputs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a `keras.layers.Embedding` layer without gathering its table."""
    weight = vars(layer).get("_embeddings")
    if (
        not isinstance(weight, MeshVariable)
        or keras_private.is_abstract()
        or layer.quantization_mode is not None
        or not isinstance(inputs, tf.Tensor)
        or not _is_sharded(weight, layer.lora_enabled)
        # An exported function runs without a mesh.
        or tf_private.in_save_context()
        or inputs.shape.rank is None
        # The function gathers all weights, and reports that it does.
        or traces.is_fully_replicated()
    ):
        return original(layer, inputs, *args, **kwargs)
    tracing.require_mesh(weight.mesh, weight._mesh_context.layout_map.strict)
    ids = inputs
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int32)
    # In Keras, negative ids count from the end of the table.
    ids = tf.where(ids < 0, ids + tf.cast(weight.shape[0], ids.dtype), ids)
    if layer.lora_enabled:
        rows = _rows_with_lora(layer, weight, ids)
    else:
        rows = lookup(weight, ids)
    return keras.ops.cast(rows, layer.compute_dtype)


def _is_sharded(weight: MeshVariable, has_lora: bool) -> bool:
    """Returns whether DTensor or Keras would gather `weight` for a lookup.

    DTensor looks up rows of a table with sharded columns without gathering it.
    `MeshVariable.value` gathers a weight along the batch axis. If the layer has
    LoRA matrices, Keras computes all rows of their product for each lookup.
    """
    layout = weight.layout
    if (
        len(weight.shape) != 2
        or not tf.as_dtype(weight.dtype).is_floating
        or weight.pads_rows
    ):
        return False
    rows, columns = layout.sharding_specs
    return (
        rows != dtensor.UNSHARDED
        or (columns != dtensor.UNSHARDED and has_lora)
        or columns == weight._mesh_context.batch_dim
    )


def _rows(weight: MeshVariable, ids: tf.Tensor, *, is_sparse: bool) -> Any:
    return sharded_rows.trainable_lookup(
        transfer.read_divided(weight.divided_value),
        ids,
        weight.layout,
        is_sparse=is_sparse,
    )


def _rows_with_lora(layer: Any, weight: MeshVariable, ids: tf.Tensor) -> Any:
    """Returns rows of the table plus the product of the LoRA matrices.

    Keras computes the sum of the full matrices, and then looks up its rows. All
    gradients are therefore dense, as in Keras.
    """
    rows = _rows(weight, ids, is_sparse=False)
    rows_of_a = _rows(layer.lora_embeddings_a, ids, is_sparse=False)
    return keras.ops.add(
        rows,
        (layer.lora_alpha / layer.lora_rank)
        * keras.ops.matmul(rows_of_a, layer.lora_embeddings_b),
    )


def lookup(weight: MeshVariable, ids: tf.Tensor) -> tf.Tensor:
    """Returns the table rows at `ids`, as a replicated tensor.

    Args:
      weight: Sharded table. If its rows are padded, `axis_of` returns a mesh
        axis and the shape of `ids` is static.
      ids: int32 or int64 tensor of any shape, on the mesh.
    """
    if axis_of(weight) is None or not ids.shape.is_fully_defined():
        return _rows(weight, ids, is_sparse=True)
    if not weight.pads_rows:
        sharded_rows.record_lookup(tuple(weight.shape), weight.layout)
    # `ids` is replicated before the reshape, because DTensor cannot reshape
    # tensors of every layout.
    ids = dtensor.relayout(
        ids, dtensor.Layout.replicated(weight.mesh, ids.shape.rank)
    )
    rows = dtensor_ops.lookup_rows(
        weight.divided_value,
        tf.reshape(ids, [-1]),
        name=weight.path,
        num_rows=weight.shape[0],
    )
    return tf.reshape(rows, [*ids.shape, weight.shape[1]])


def unowned_id(weight: MeshVariable) -> int:
    """Returns an id that no device owns.

    Kernels read zeros for this id, and do not update any row, if their argument
    `num_rows` is larger than the id.
    """
    # The mesh pads the table by fewer rows than it has devices.
    return weight.shape[0] + weight.mesh.size


def sorted_ids(ids: tf.Tensor, mesh: Mesh) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the ids in descending order, and which of them are distinct.

    The number of distinct ids is known only at run time, and DTensor requires
    static sizes. Therefore, the results have the size of `ids`.

    Args:
      ids: Ids on `mesh`, with a static shape.
      mesh: The mesh.

    Returns:
      `[num_ids]` int64, and a bool for each id, which is true for the first of
      several equal ids.
    """
    ids = dtensor.relayout(ids, Layout.replicated(mesh, ids.shape.rank))
    ids = tf.cast(tf.reshape(ids, [-1]), tf.int64)
    ids = dtensor.relayout(
        tf.math.top_k(ids, ids.shape[0]).values, Layout.replicated(mesh, 1)
    )
    is_first = tf.concat(
        [tf.ones_like(ids[:1], tf.bool), ids[1:] != ids[:-1]], axis=0
    )
    return ids, is_first


def distinct_rows(weight: MeshVariable, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of `ids`; each row occurs once, and the rest are zeros.

    Args:
      weight: As in `lookup`.
      ids: As in `lookup`, with a static shape.

    Returns:
      `[num_ids, dim]`. A row of zeros replaces each repetition of a row.
    """
    ids, is_first = sorted_ids(ids, weight.mesh)
    rows = lookup(weight, ids)
    return tf.where(is_first[:, tf.newaxis], rows, tf.zeros_like(rows))


def apply_by_row(
    weight: MeshVariable,
    ids: tf.Tensor,
    function: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    """Replaces the rows of `ids` by `function(rows)`.

    Args:
      weight: float32 table with sharded rows and unsharded columns.
      ids: `[num_ids]` on the mesh. Ids that no device owns are ignored.
      function: Function that processes each row independently.
    """
    ids, is_first = sorted_ids(ids, weight.mesh)
    unowned = unowned_id(weight)
    table, num_ids = weight.divided_value, unowned + 1
    ids = tf.where(
        is_first, ids, tf.fill(ids.shape, tf.cast(unowned, ids.dtype))
    )
    if not has_kernels(weight.mesh):
        is_owned = ids < weight.shape[0]
        rows = sharded_rows.lookup(
            transfer.read_divided(table),
            tf.where(is_owned, ids, tf.zeros_like(ids)),
            weight.layout,
        )
        row_updates.replace_rows(
            table, ids, tf.cast(function(rows), rows.dtype), weight.shape[0]
        )
        return
    rows = dtensor_ops.lookup_rows(
        table, ids, name=weight.path, num_rows=num_ids
    )
    new_rows = tf.cast(function(rows), rows.dtype)
    # The kernels can only add to rows. The second addition corrects the
    # rounding error of the first one, so that the result is exact.
    difference = new_rows - rows
    correction = new_rows - (rows + difference)
    for value in (difference, correction):
        _subtract(table, ids, -value, name=weight.path, num_rows=num_ids)


def update(
    weight: MeshVariable,
    slots: Sequence[DVariable],
    ids: tf.Tensor,
    gradients: tf.Tensor,
    *,
    optimizer: str,
    hyperparameters: tf.Tensor,
    skips_unowned_ids: bool,
) -> None:
    """Runs one optimizer step on the rows of `ids`.

    Args:
      weight: As in `apply_by_row`.
      slots: Slot variables of the optimizer, with the layout of `weight`.
      ids: int32 or int64 tensor of shape `[num_ids]` on the mesh.
      gradients: float32 gradients of the rows of `ids`, `[num_ids, dim]`.
      optimizer: Name of the optimizer; see docs/ops.md.
      hyperparameters: Hyperparameters of the optimizer; float32, `[k]`.
      skips_unowned_ids: Whether `unowned_id` is a valid id. On devices without
        kernels, all ids outside of the table are ignored.
    """
    if not has_kernels(weight.mesh):
        row_updates.update_rows(
            weight.divided_value,
            slots,
            ids,
            gradients,
            optimizer=optimizer,
            hyperparameters=hyperparameters,
            num_rows=weight.shape[0],
        )
        return
    dtensor_ops.update_rows(
        weight.divided_value,
        slots,
        ids,
        gradients,
        optimizer=optimizer,
        name=weight.path,
        num_rows=(
            unowned_id(weight) + 1 if skips_unowned_ids else weight.shape[0]
        ),
        hyperparameters=dtensor.relayout(
            hyperparameters, Layout.replicated(weight.mesh, 1)
        ),
    )


def add(variable: Any, slices: tf.IndexedSlices, sign: int) -> None:
    """Adds rows to a table, or subtracts them if `sign` is -1.

    Args:
      variable: Table for which `axis_of` returns a mesh axis.
      slices: Rows to add. Values of repeated indices are summed.
      sign: 1 or -1.
    """
    table = (
        variable.divided_value
        if isinstance(variable, MeshVariable)
        else variable
    )
    _subtract(table, slices.indices, tf.cast(slices.values, tf.float32) * -sign)


def _subtract(
    table: Any, ids: tf.Tensor, values: tf.Tensor, **options: Any
) -> None:
    """Subtracts rows by a step of gradient descent with learning rate 1."""
    dtensor_ops.update_rows(
        table,
        [],
        ids,
        values,
        optimizer="sgd",
        hyperparameters=dtensor.relayout(
            tf.ones([1]), Layout.replicated(table.layout.mesh, 1)
        ),
        **options,
    )
