"""Lookups and updates of Keras tables whose rows are sharded over a mesh.

DTensor gathers the full table for each lookup of rows. DTensor also gathers the
full table when an optimizer divides an update by a slot variable. The functions
of this module let each device look up and update only the rows that it owns.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, keras_private, tf_private
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.replication import captured_tensors
from tf_layoutmap.sharded.routing.checks import known_sizes

dtensor = tf.experimental.dtensor


def axis_of(variable: Any) -> str | None:
    """Returns the mesh axis that shards the rows of a table, or None.

    Also returns None for tables that the kernels do not support: ranks other
    than 2, dtypes other than float32, and sharded columns.
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
        or (not dtensor_ops.available())
    ):
        return None
    return rows


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
        or layer.lora_enabled
        or layer.quantization_mode is not None
        or not isinstance(inputs, tf.Tensor)
        or axis_of(weight) is None
        # DTensor requires static sizes, and an exported function has no static
        # batch size.
        or tf_private.in_save_context()
        or not inputs.shape.is_fully_defined()
        or captured_tensors.current() is not None
    ):
        return original(layer, inputs, *args, **kwargs)
    ids = inputs
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int32)
    # In Keras, negative ids count from the end of the table.
    ids = tf.where(ids < 0, ids + tf.cast(weight.shape[0], ids.dtype), ids)
    return keras.ops.cast(lookup(weight, ids), layer.compute_dtype)


def lookup(weight: MeshVariable, ids: tf.Tensor) -> tf.Tensor:
    """Returns the table rows at `ids`, as a replicated tensor.

    Args:
      weight: Table for which `axis_of` returns a mesh axis.
      ids: int32 or int64 tensor of any shape, on the mesh.
    """
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
    # The rows are added by a step of gradient descent with learning rate 1.
    dtensor_ops.update_rows(
        table,
        [],
        slices.indices,
        tf.cast(slices.values, tf.float32) * -sign,
        optimizer="sgd",
        hyperparameters=dtensor.relayout(
            tf.ones([1]), dtensor.Layout.replicated(table.layout.mesh, 1)
        ),
    )


def gather(
    table: tf.Tensor, ids: tf.Tensor, mesh: Mesh, axis: str
) -> tf.Tensor:
    """Returns rows of a tensor that is sharded by rows.

    Args:
      table: Tensor of shape `[num_rows, dim]`, on `mesh`.
      ids: Integer tensor of shape `[num_ids]`, in `[0, num_rows)`, on `mesh`.
      mesh: Mesh of `table` and `ids`.
      axis: Mesh axis that shards the rows. Its size divides `num_rows`.

    Returns:
      Tensor of shape `[num_ids, dim]`, replicated.
    """
    num_shards = mesh.dim_size(axis)
    num_rows, dim = known_sizes(table)
    size = num_rows // num_shards
    by_shard = dtensor.Layout(
        [axis, dtensor.UNSHARDED, dtensor.UNSHARDED], mesh
    )
    shards = dtensor.relayout(
        tf.reshape(table, [num_shards, size, dim]), by_shard
    )
    ids = dtensor.relayout(ids, dtensor.Layout.replicated(mesh, 1))
    starts = tf.range(num_shards, dtype=ids.dtype) * size
    local = ids[tf.newaxis, :] - starts[:, tf.newaxis]
    is_owner = (local >= 0) & (local < size)
    rows = tf.gather(
        shards, tf.clip_by_value(local, 0, size - 1), axis=1, batch_dims=1
    )
    rows = dtensor.relayout(
        tf.where(is_owner[:, :, tf.newaxis], rows, tf.zeros_like(rows)),
        by_shard,
    )
    return dtensor.relayout(
        tf.reduce_sum(rows, axis=0), dtensor.Layout.replicated(mesh, 2)
    )
