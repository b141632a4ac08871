"""Pins tensors of a traced function, or eager tensors, to a layout.

DTensor propagates layouts backwards from the consumers of a result. Some ops
fail or return another shape if a sample is sharded, so the layout of their
inputs is fixed ("pinned") by a relayout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh.device_mesh import Mesh, is_registered

dtensor = tf.experimental.dtensor

# Part of the name of DTensor's device. `dtensor.device_name()` returns the
# full name, but creates the device if it does not exist.
DEVICE = "CUSTOM"

# Attributes that Keras sets on tensors: the mask, and the logits of a softmax
# or sigmoid, which losses use instead of the tensor.
_KERAS_ATTRIBUTES = ("_keras_mask", "_keras_logits")


def unsharded_samples(x: Any, mesh: Mesh | None) -> Any:
    """Returns `x` with all dimensions except the first one unsharded.

    The first dimension keeps its sharding.

    Args:
      x: A symbolic tensor of a function for `mesh`, or an eager tensor on a
        mesh. Other values are returned unchanged.
      mesh: `dtensor.Mesh` of a symbolic tensor. Ignored for eager tensors.
    """
    return _pinned(x, mesh, lambda _: dtensor.MATCH)


def replicated(x: Any, mesh: Mesh | None) -> Any:
    """Returns `x` replicated; see `unsharded_samples`."""
    return _pinned(x, mesh, lambda _: dtensor.UNSHARDED)


def sharded(x: Any, mesh: Mesh | None, axes: Sequence[str | None]) -> Any:
    """Returns `x` with the layout `axes`, and gives its gradient this layout.

    The first dimension is set, too. If it kept its sharding, the layout could
    contain the same axis twice, which ends the process. TensorFlow's gradient
    would have the previous layout of `x`, which DTensor does not always know.
    """
    if not _can_be_pinned(x):
        return x
    specs = [dtensor.UNSHARDED if axis is None else axis for axis in axes]

    @tf.custom_gradient
    def pinned(x: Any) -> Any:
        return _relayout(x, specs, mesh), (
            lambda dy: _relayout(dy, specs, mesh)
        )

    return pinned(x)


def keeping_rows(
    pin: Callable[[Any, Mesh | None], Any], x: Any, mesh: Mesh | None
) -> Any:
    """Returns `pin(x, mesh)`, whose gradient stays `tf.IndexedSlices`.

    DTensor's gradient of a relayout converts `tf.IndexedSlices` to a dense
    tensor, which sums repeated ids. Keras' optimizers on TensorFlow apply
    repeated ids one by one, so an optimizer that squares gradients would
    compute another update.

    Args:
      pin: `replicated` or `unsharded_samples`.
      x: A tensor of any rank.
      mesh: `dtensor.Mesh` of a symbolic tensor.
    """
    if not _can_be_pinned(x) or not x.shape.rank or not x.dtype.is_floating:
        return pin(x, mesh)

    @tf.custom_gradient
    def pinned(x: Any) -> Any:
        def gradient(dy: Any) -> Any:
            return (
                dy
                if isinstance(dy, tf.IndexedSlices)
                else (dtensor.relayout_like(dy, x))
            )

        return pin(x, mesh), gradient

    # A name scope keeps the op names in the surrounding scope unchanged.
    with tf.name_scope("layoutmap_keeping_rows"):
        return pinned(x)


def like_a_batch(x: Any, mesh: Mesh | None, batch_dim: str | None) -> Any:
    """Returns `x` sharded along `batch_dim`, like the batches of `fit`."""
    return _pinned(
        x,
        mesh,
        lambda size: (
            batch_dim
            if batch_dim is not None
            and size is not None
            and mesh is not None
            and size % mesh.dim_size(batch_dim) == 0
            else dtensor.UNSHARDED
        ),
    )


def on_mesh(value: Any) -> bool:
    """Returns whether `value` is an eager tensor on a mesh."""
    # The device name is checked first because this is fast, and every eager
    # slice calls this function.
    return (
        tf.is_tensor(value)
        and not tf.is_symbolic_tensor(value)
        and DEVICE in (getattr(value, "device", None) or "")
        and dtensor.is_dtensor(value)
    )


def on_registered_mesh(value: Any) -> bool:
    """Returns whether `value` is an eager tensor on a registered mesh."""
    return on_mesh(value) and is_registered(dtensor.fetch_layout(value).mesh)


def _can_be_pinned(x: Any) -> bool:
    # During tracing, a tensor that is not symbolic is a constant of the graph.
    # In `dtensor.call_with_layout` every eager result gets the same layout, so
    # a relayout to another one fails.
    return tf.is_symbolic_tensor(x) or (
        tf.executing_eagerly()
        and on_mesh(x)
        and not tf_private.has_output_layout()
    )


def _pinned(
    x: Any, mesh: Mesh | None, first: Callable[[int | None], str]
) -> Any:
    if not _can_be_pinned(x) or not x.shape.rank:
        return x
    pinned = _relayout(
        x, [first(x.shape[0]), *[dtensor.UNSHARDED] * (x.shape.rank - 1)], mesh
    )
    for name in _KERAS_ATTRIBUTES:
        attribute = getattr(x, name, None)
        if attribute is not None and pinned is not x:
            setattr(pinned, name, _pinned(attribute, mesh, first))
    return pinned


def _relayout(x: Any, axes: Sequence[str], mesh: Mesh | None) -> Any:
    if not tf.is_symbolic_tensor(x):
        current = dtensor.fetch_layout(x)
        mesh, axes = (
            current.mesh,
            [
                spec if axis == dtensor.MATCH else axis
                for spec, axis in zip(current.sharding_specs, axes)
            ],
        )
        if axes == current.sharding_specs:
            return x
    return dtensor.relayout(x, dtensor.Layout(axes, mesh))
