"""Gradients with respect to a sharded table.

`tape.gradient(y, sharded)` returns one gradient for the full table. If the
gradient is a `tf.IndexedSlices`, its indices are global rows.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import strategies, tf_private
from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.sharded.routing import checks, parts
from tf_layoutmap.sharded.routing.checks import Shards


class FullTableSlices(tf.IndexedSlices):
    """The gradient of a table whose indices are global rows.

    A gradient function returns it for the handle of the first shard. If the
    tape adds other gradients to it, the result is a `tf.IndexedSlices`. In a
    contiguous table, the global rows are then also valid as rows of the first
    shard.
    """


class ShardedVariableGradient(tf_private.CompositeTensorGradient):
    """Implements TensorFlow's gradient protocol for a sharded table.

    The tape computes the gradients of the shards, and this class joins them.
    """

    def get_gradient_components(self, value: Any) -> list[tf.Tensor]:
        # The tape records the handle of a shard when the shard is read.
        return [strategies.handle_of(variable) for variable in value.variables]

    def replace_gradient_components(
        self, value: Any, component_grads: Sequence
    ) -> tf.Tensor | tf.IndexedSlices | None:
        return join(value._shards(), component_grads)


def with_source_of_each_shard(
    original: Callable[..., Any],
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    sources_raw: Any = None,
    **options: Any,
) -> Any:
    """Computes gradients; the zeros of an unread shard have its shape.

    TensorFlow creates the zeros for `unconnected_gradients` in the shape of the
    element of `sources_raw` at the same position as the handle in `sources`.
    `sources` has one handle for each shard.
    """
    return original(
        tape,
        target,
        sources,
        output_gradients,
        sources_raw
        and [source for raw in sources_raw for source in _sources(raw)],
        **options,
    )


def _sources(source: Any) -> list[Any]:
    """Returns the variables of a table or of a Keras weight of a table."""
    if not _is_table(source):
        source_of_weight = getattr(source, "handle", None)
        if not _is_table(source_of_weight):
            return [source]
        source = source_of_weight
    return list(source.variables)


def _is_table(value: Any) -> bool:
    return isinstance(
        getattr(value, "__composite_gradient__", None), ShardedVariableGradient
    )


def join(
    shards: Shards, gradients: Sequence
) -> tf.Tensor | tf.IndexedSlices | None:
    """Joins the gradients of shards to the gradient of the full table.

    Args:
      shards: The table.
      gradients: For each shard a tensor, a `tf.IndexedSlices` of local rows or
        None.

    Returns:
      A tensor if every shard was read in full; None if no shard was read;
      otherwise one `tf.IndexedSlices` of global rows. As for `tf.Variable`,
      repeated rows are not summed.
    """
    if all(gradient is None for gradient in gradients):
        return None
    if (
        all(isinstance(gradient, tf.Tensor) for gradient in gradients)
        and shards.partition.is_contiguous
    ):
        return (
            gradients[0]
            if len(gradients) == 1
            else tf.concat(gradients, axis=shards.axis)
        )
    first, *others = gradients
    if isinstance(first, FullTableSlices) and all(
        gradient is None for gradient in others
    ):
        return _slices_of(shards, first.values, first.indices)
    # On a GPU, the ids would be copied to the GPU and back.
    with tf.device(HOST) if _is_on_host(shards) else contextlib.nullcontext():
        return _join_slices(shards, gradients)


def _is_on_host(shards: Shards) -> bool:
    """Returns whether all shards are on a CPU of this process."""
    return not checks.in_xla() and all(
        "CPU" in device and parts.is_local_cpu(device)
        for device in shards.devices
    )


def _join_slices(shards: Shards, gradients: Sequence) -> tf.IndexedSlices:
    rows, values = [], []
    for number, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if isinstance(gradient, tf.Tensor):
            # The result is a tf.IndexedSlices, because a dense result would
            # contain zeros for all rows of the shards that were not read.
            gradient = tf.IndexedSlices(
                gradient, tf.range(tf.shape(gradient)[0])
            )
        rows.append(
            _global_rows(shards, number, tf.cast(gradient.indices, tf.int64))
        )
        values.append(_padded_rows(shards, number, gradient.values))
    return _slices_of(
        shards, tf.concat(values, axis=0), tf.concat(rows, axis=0)
    )


def _slices_of(
    shards: Shards, values: tf.Tensor, indices: tf.Tensor
) -> tf.IndexedSlices:
    # The dtype is int32 if possible, as in TensorFlow. When gradients are
    # computed in the branches of a tf.cond, all branches must return the same
    # dtype.
    shape = shards.sizes
    return tf.IndexedSlices(
        values,
        indices,
        tf.constant(
            shape, tf.int32 if max(shape) <= tf.int32.max else tf.int64
        ),
    )


def _global_rows(
    shards: Shards, number: int, local_rows: tf.Tensor
) -> tf.Tensor:
    partition = shards.partition
    if shards.axis == 1:
        return local_rows
    if partition.placement == "mod":
        return local_rows * partition.num_shards + number
    if partition.placement == "callable":
        return tf.gather(tf.constant(partition.global_rows(number)), local_rows)
    return local_rows + partition.offsets[number]


def _padded_rows(shards: Shards, number: int, values: tf.Tensor) -> tf.Tensor:
    """Pads rows of a shard with zeros to the width of the full table."""
    if shards.axis == 0:
        return values
    offset, end = shards.partition.offsets[number:][:2]
    paddings = [[0, 0]] * shards.shape.rank
    paddings[1] = [offset, shards.partition.num_rows - end]
    return tf.pad(values, paddings)
