"""Splits of tensors along a sharded dimension.

DTensor cannot split a tensor along a sharded dimension. The functions of this
module gather this dimension, and keep the sharding of other dimensions if it is
known (see `known_layouts.UnshardedDim`).
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.known_layouts import UnshardedDim
from tf_layoutmap.layout.mesh.shard_map import SCOPE
from tf_layoutmap.layout.ops.corrections import STACK, is_shape

# Name scope of splits that do not change layouts, because the dimension is
# already unsharded.
UNSHARDED = "layoutmap_unsharded"


def split(
    original: Callable[..., Any],
    mesh: Mesh | None,
    axis: Any,
    value: Any,
    num_split: int,
    name: str | None = None,
) -> Any:
    """Computes `tf.split` into equal parts; see `_split`."""
    return _split(
        lambda x: original(axis, x, num_split, name=name), mesh, value, axis
    )


def split_v(
    original: Callable[..., Any],
    mesh: Mesh | None,
    value: Any,
    size_splits: Any,
    axis: Any,
    num_split: int,
    name: str | None = None,
) -> Any:
    """Computes `tf.split` into parts of given sizes; see `_split`."""
    return _split(
        lambda x: original(x, size_splits, axis, num_split, name=name),
        mesh,
        value,
        axis,
    )


def _split(
    original: Callable[[Any], Any], mesh: Mesh | None, value: Any, axis: Any
) -> Any:
    """Splits a tensor along an unsharded dimension.

    DTensor cannot split a sharded dimension. The dimension is gathered; all
    other dimensions keep their sharding. The results are pinned, too, because
    DTensor propagates layouts backwards from their consumers.
    """
    x, dim = tf.convert_to_tensor(value), tf.get_static_value(axis)
    if not _is_split_by_dtensor(x):
        return original(x)
    if x.shape.rank is None or dim is None:
        parts = original(tracing.pin_replicated(x, mesh))
        return [tracing.pin_replicated(part, mesh) for part in parts]

    @tf.custom_gradient
    def split_parts(x: Any) -> Any:
        layout = UnshardedDim(x, mesh, int(dim))

        def gradient(*dys: Any) -> Any:
            with tf.name_scope(STACK):
                dx = tf.concat([layout.pin(dy) for dy in dys], int(dim))
            return layout.pin(dx)

        results = original(layout.pin(x))
        return [layout.pin(part) for part in results], gradient

    return split_parts(x)


def unpack(
    original: Callable[..., Any],
    mesh: Mesh | None,
    value: Any,
    num: int,
    axis: int = 0,
    name: str | None = None,
) -> Any:
    """Computes `tf.unstack`; no consumer changes the layout of the results.

    DTensor requires that no consumer of the results shards them, and its
    gradient keeps only the sharding of the first dimension. If the sharding of
    the tensor can be kept, the tensor is therefore split; see `_split`.
    Otherwise the results have the layouts in which DTensor computes them.
    """
    x = tf.convert_to_tensor(value)
    if not num or not tf.is_symbolic_tensor(x) or not _is_split_by_dtensor(x):
        return original(x, num, axis=axis, name=name)
    if UnshardedDim.keeps_sharding(x, axis):
        parts = tf.split(x, num, axis, name=name)
        return [tf.squeeze(part, [axis]) for part in parts]
    parts = original(
        tracing.with_layout_of_producer(x), num, axis=axis, name=name
    )
    return [tracing.with_layout_of_producer(part) for part in parts]


def _is_split_by_dtensor(x: Any) -> bool:
    """Returns whether DTensor chooses the layouts of a tensor that is split."""
    scope = tf.get_current_name_scope()
    return (
        tracing.can_be_pinned(x)
        and not (tf.is_symbolic_tensor(x) and is_shape(x))
        and SCOPE not in scope
        and UNSHARDED not in scope
    )
