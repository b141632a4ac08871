"""Keeping samples whole where DTensor would divide them.

DTensor propagates layouts backwards from the users of a result, and some
operations fail, or give another shape, on a sample that is divided. So the
layout of their inputs is pinned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh.device_mesh import Mesh, is_registered

dtensor = tf.experimental.dtensor

# Part of the name of DTensor's device. `dtensor.device_name()` returns all of
# it, but makes that device where there is none.
DEVICE = "CUSTOM"

# Attributes that Keras sets on tensors: their mask, and the logits that they
# are a softmax or sigmoid of, which losses prefer.
_NOTES = ("_keras_mask", "_keras_logits")


def unsharded_samples(x: Any, mesh: Mesh | None) -> Any:
    """Returns `x` with its first dimension as it is, the others whole.

    Args:
      x: A symbolic tensor of a function for `mesh`, or an eager tensor on a
        mesh; all else stays.
      mesh: `dtensor.Mesh`, of symbolic tensors.
    """
    return _pinned(x, mesh, lambda _: dtensor.MATCH)


def replicated(x: Any, mesh: Mesh | None) -> Any:
    """Returns `x` replicated; see `unsharded_samples`."""
    return _pinned(x, mesh, lambda _: dtensor.UNSHARDED)


def sharded(x: Any, mesh: Mesh | None, axes: Sequence[str | None]) -> Any:
    """Returns `x` divided by `axes`, and divides its gradient so.

    All of them, the first too: were that to stay as it is, the same axis might
    divide it, and a layout with an axis twice ends the process. TensorFlow's
    gradient would be divided as `x` was, which DTensor does not always know.
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

    DTensor's gradient of a relayout converts rows to a dense tensor, in which
    repeated ids are summed. Keras' optimizers on TensorFlow treat repeated ids
    one by one, so an optimizer that squares gradients would compute another
    update.

    Args:
      pin: `replicated` or `unsharded_samples`.
      x: A tensor of any rank.
      mesh: `dtensor.Mesh`, of symbolic tensors.
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

    # Names in the surrounding scope stay the same as without this.
    with tf.name_scope("layoutmap_keeping_rows"):
        return pinned(x)


def like_a_batch(x: Any, mesh: Mesh | None, batch_dim: str | None) -> Any:
    """Returns `x` cut along `batch_dim`, as `fit` cuts what it feeds."""
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
    """Whether `value` is an eager tensor on a mesh."""
    # The name first, which is fast: every eager slice is asked this.
    return (
        tf.is_tensor(value)
        and not tf.is_symbolic_tensor(value)
        and DEVICE in (getattr(value, "device", None) or "")
        and dtensor.is_dtensor(value)
    )


def on_registered_mesh(value: Any) -> bool:
    """Whether `value` is an eager tensor on a mesh of this package."""
    return on_mesh(value) and is_registered(dtensor.fetch_layout(value).mesh)


def _can_be_pinned(x: Any) -> bool:
    # While tracing, a tensor that is not symbolic is a constant of the graph.
    # In `dtensor.call_with_layout` every eager result gets the same layout: a
    # relayout to another one fails.
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
    for name in _NOTES:
        note = getattr(x, name, None)
        if note is not None and pinned is not x:
            setattr(pinned, name, _pinned(note, mesh, first))
    return pinned


def _relayout(x: Any, axes: Sequence[str], mesh: Mesh | None) -> Any:
    if not tf.is_symbolic_tensor(x):
        now = dtensor.fetch_layout(x)
        mesh, axes = (
            now.mesh,
            [
                was if axis == dtensor.MATCH else axis
                for was, axis in zip(now.sharding_specs, axes)
            ],
        )
        if axes == now.sharding_specs:
            return x
    return dtensor.relayout(x, dtensor.Layout(axes, mesh))
