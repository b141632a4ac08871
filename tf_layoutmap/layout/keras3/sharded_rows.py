"""Lookups and sums of rows of sharded tables, with ops that DTensor shards.

A table is a matrix whose rows, columns, or both are sharded over mesh axes.
DTensor gathers such a table for a lookup of rows, and computes the dense form
of a sparse gradient in full on each device. In this module, each device reads
only its block of the table, and computes only its block of a sum. Ids and rows
are replicated, because they are activations.

The functions support every floating point dtype. For float32 tables with
unsharded columns, `_core/dtensor_ops.py` has faster kernels.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops import corrections
from tf_layoutmap.layout.replication import traces
from tf_layoutmap.sharded.routing.checks import known_sizes

dtensor = tf.experimental.dtensor
_UNSHARDED = dtensor.UNSHARDED

Layouts = Mapping[tuple[int, ...], Layout]

# The layouts of the tables that the running optimizer updates, by shape.
_updated: ThreadValue[Layouts | None] = ThreadValue(None)
# The layouts of the tables that each graph looks up, by shape.
_looked_up: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Layout]] = (
    weakref.WeakKeyDictionary()
)


def updating(layouts: Layouts | None) -> AbstractContextManager[None]:
    """Sets the tables, by shape, that an optimizer updates in the context.

    Args:
      layouts: Layout of each sharded table; None without a mesh.
    """
    return _updated.set_to(layouts)


def is_updating() -> bool:
    """Returns whether an optimizer is updating variables on a mesh."""
    return _updated.get() is not None


def layout_of_update(shape: tuple[int, ...]) -> Layout | None:
    """Returns the layout of an updated table of this shape, or None."""
    return (_updated.get() or {}).get(shape)


def record_lookup(shape: tuple[int, ...], layout: Layout) -> None:
    """Records that the current graph looks up rows of a table of this shape.

    If a gradient tape adds a sparse gradient of the table to a dense one, the
    sum is sharded like the table.
    """
    for graph in tf_private.graphs_around():
        _looked_up.setdefault(graph, {})[shape] = layout
        break


def trainable_lookup(
    table: tf.Tensor, ids: tf.Tensor, layout: Layout, *, is_sparse: bool
) -> tf.Tensor:
    """Returns the rows of `ids`, with a gradient.

    Args:
      table: As in `lookup`.
      ids: As in `lookup`, but of any shape.
      layout: As in `lookup`.
      is_sparse: Whether the gradient is `tf.IndexedSlices`. Otherwise the
        gradient is a dense tensor with the layout of the table.

    Returns:
      Tensor of shape `[*ids.shape, dim]`, replicated.
    """
    num_rows, dim = known_sizes(table)
    record_lookup((num_rows, dim), layout)
    # `ids` is replicated before the reshape, because DTensor cannot reshape
    # tensors of every layout.
    ids = replicated(ids, layout.mesh)
    flat = tf.reshape(ids, [-1])

    @tf.custom_gradient
    def rows_of(table: tf.Tensor) -> Any:
        def gradient(dy: Any) -> Any:
            dy = tf.reshape(replicated(dy, layout.mesh), [-1, dim])
            if flat.shape.is_fully_defined():
                dy.set_shape([flat.shape[0], dim])
            if is_sparse:
                shape = tf.constant([num_rows, dim], tf.int64)
                # A function for gradients must not return a tensor of the
                # forward pass itself.
                return tf.IndexedSlices(dy, tf.identity(flat), shape)
            return segment_sum(dy, flat, num_rows, layout)

        return _with_shape_of(ids, lookup(table, flat, layout), dim), gradient

    return rows_of(table)


def _with_shape_of(ids: tf.Tensor, rows: tf.Tensor, dim: int) -> tf.Tensor:
    if ids.shape.is_fully_defined():
        return tf.reshape(rows, [*ids.shape, dim])
    shape = tf.concat([tf.shape(ids), tf.constant([dim])], axis=0)
    return tf.reshape(rows, shape)


def lookup(table: tf.Tensor, ids: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Returns the rows of `ids`.

    Args:
      table: Tensor of shape `[num_rows, dim]`, on a mesh.
      ids: int32 or int64 tensor of shape `[num_ids]`, on the mesh of `table`.
        An id outside of `[0, num_rows)` raises an error on CPUs, and returns
        zeros on GPUs, as `tf.gather` does.
      layout: Layout of `table`. The size of a mesh axis that shards the rows
        divides `num_rows`.

    Returns:
      Tensor of shape `[num_ids, dim]`, replicated.
    """
    mesh = layout.mesh
    axis, columns = layout.sharding_specs
    ids = replicated(ids, mesh)
    if axis == _UNSHARDED:
        rows = gathered_rows(table, ids, axis=0)
        return replicated(laid_out(rows, mesh, _UNSHARDED, columns), mesh)
    num_rows, _ = known_sizes(table)
    num_shards = mesh.dim_size(axis)
    size = num_rows // num_shards
    # Every device gathers from its own block of rows. An invalid id is not
    # changed, so that it is also outside of the block and raises an error.
    is_valid = (ids >= 0) & (ids < num_rows)
    positions = tf.where(is_valid, tf.math.floormod(ids, size), ids)
    rows = rows_of_shards(table, positions, layout)
    is_owner = owners(ids, size, num_shards, axis=0)[:, :, tf.newaxis]
    rows = laid_out(
        tf.where(is_owner, rows, tf.zeros([], rows.dtype)),
        mesh,
        axis,
        _UNSHARDED,
        columns,
    )
    # One term of each sum is a row, and all other terms are zeros, so the sum
    # is exact.
    return replicated(tf.reduce_sum(rows, axis=0), mesh)


def segment_sum(
    rows: tf.Tensor, ids: tf.Tensor, num_rows: int, layout: Layout
) -> tf.Tensor:
    """Computes `tf.math.unsorted_segment_sum` with a sharded result.

    Args:
      rows: Tensor of shape `[num_ids, dim]`, on a mesh.
      ids: int32 or int64 tensor of shape `[num_ids]`, in `[0, num_rows)`.
      num_rows: Number of rows of the result.
      layout: Layout of the result. The size of a mesh axis that shards the rows
        divides `num_rows`.

    Returns:
      Tensor of shape `[num_rows, dim]` with layout `layout`.
    """
    mesh = layout.mesh
    axis, columns = layout.sharding_specs
    ids = replicated(ids, mesh)
    rows = laid_out(rows, mesh, _UNSHARDED, columns)
    if axis == _UNSHARDED:
        sums = tf.math.unsorted_segment_sum(rows, ids, num_rows)
        return dtensor.relayout(sums, layout)
    num_shards = mesh.dim_size(axis)
    size = num_rows // num_shards
    # The sums have the shape [size, num_shards, dim]. DTensor supports sharded
    # sums only if their first dimension is unsharded.
    is_owner = owners(ids, size, num_shards, axis=1)[:, :, tf.newaxis]
    parts = laid_out(
        tf.where(is_owner, rows[:, tf.newaxis, :], tf.zeros([], rows.dtype)),
        mesh,
        _UNSHARDED,
        axis,
        columns,
    )
    sums = laid_out(
        tf.math.unsorted_segment_sum(parts, tf.math.floormod(ids, size), size),
        mesh,
        _UNSHARDED,
        axis,
        columns,
    )
    sums = laid_out(
        tf.transpose(sums, [1, 0, 2]), mesh, axis, _UNSHARDED, columns
    )
    return dtensor.relayout(tf.reshape(sums, [num_rows, rows.shape[1]]), layout)


def segment_sum_of_table(
    original: Callable[..., Any],
    mesh: Mesh | None,
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    name: str | None = None,
) -> Any:
    """Computes `tf.math.unsorted_segment_sum`; shards gradients of tables.

    TensorFlow converts a sparse gradient to a dense tensor with this op, in
    optimizers and in gradient tapes. If the result has the shape of a sharded
    table of this step, the result is sharded like the table. The values do not
    depend on the layout.
    """
    shape = tuple(getattr(data, "shape", ()))[1:]
    num_rows = corrections.static_value(num_segments)
    if (
        len(shape) == 1
        and num_rows is not None
        and len(getattr(segment_ids, "shape", ())) == 1
        and not traces.is_fully_replicated()
    ):
        layout = _layout_of_table((int(num_rows), shape[0]))
        if layout is not None and (mesh is None or mesh == layout.mesh):
            return segment_sum(data, segment_ids, int(num_rows), layout)
    return original(data, segment_ids, num_segments, name=name)


def _layout_of_table(shape: tuple[int, ...]) -> Layout | None:
    layout = layout_of_update(shape)
    if layout is not None:
        return layout
    for graph in tf_private.graphs_around():
        layout = _looked_up.get(graph, {}).get(shape)
        if layout is not None:
            return layout
    return None


def rows_of_shards(
    table: tf.Tensor, positions: tf.Tensor, layout: Layout
) -> tf.Tensor:
    """Returns the rows that each shard has at the same positions.

    Args:
      table: As in `lookup`.
      positions: Row numbers in a shard, `[num_ids]`, replicated.
      layout: Layout of `table`, whose rows are sharded.

    Returns:
      Tensor of shape `[num_shards, num_ids, dim]`, sharded like the table.
    """
    axis, columns = layout.sharding_specs
    num_shards = layout.mesh.dim_size(axis)
    num_rows, dim = known_sizes(table)
    shards = laid_out(
        tf.reshape(table, [num_shards, num_rows // num_shards, dim]),
        layout.mesh,
        axis,
        _UNSHARDED,
        columns,
    )
    return gathered_rows(shards, positions, axis=1)


def gathered_rows(table: tf.Tensor, ids: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the rows of `ids` of each shard, with the sharding of `table`."""
    # The table must not be replicated if the number of ids is unknown.
    with tf.name_scope(corrections.SAME_SHARDING):
        return tf.gather(table, ids, axis=axis)


def owners(ids: tf.Tensor, size: int, num_shards: int, axis: int) -> tf.Tensor:
    """Returns which shard owns each id: booleans, shards along `axis`."""
    shards = tf.range(num_shards, dtype=ids.dtype)
    return tf.expand_dims(ids // size, axis) == tf.expand_dims(shards, 1 - axis)


def laid_out(x: tf.Tensor, mesh: Mesh, *specs: str) -> tf.Tensor:
    """Returns `x` with the sharding `specs` of its dimensions."""
    return dtensor.relayout(x, dtensor.Layout([*specs], mesh))


def replicated(x: tf.Tensor, mesh: Mesh) -> tf.Tensor:
    """Returns `x` with a copy on each device."""
    return dtensor.relayout(x, dtensor.Layout.replicated(mesh, x.shape.rank))
