"""Reads of sharded variables that gather the value on every device.

Used in functions that are fully replicated, and in layers that need unsharded
weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Layout
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.mesh.variable import PaddedVariable

dtensor = tf.experimental.dtensor

_current: ThreadValue[GatheredReads | None] = ThreadValue(None)
_in_layer = ThreadValue(False)


class GatheredReads:
    """The sharded variables that one replicated function reads.

    Attributes:
      bytes: Unsharded size of each variable in bytes, by `id`.
    """

    def __init__(self):
        self.bytes: dict[int, int] = {}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Gathers variables in functions that are traced in the context."""
        with _current.set_to(self), tracing.with_replicated_batches():
            yield

    def read(
        self, variable: Any, read: Callable[[], tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns the value of a DVariable, replicated on every device.

        Args:
          variable: `dtensor.DVariable`.
          read: Function that reads the sharded value; None uses
            `tf.convert_to_tensor`.
        """
        layout = variable.layout
        # A read of a padded variable already returns a replicated tensor.
        axes = (
            set()
            if isinstance(variable, PaddedVariable)
            else ({*layout.sharding_specs} - {dtensor.UNSHARDED})
        )
        if axes:
            self.bytes[id(variable)] = (
                variable.dtype.size * variable.shape.num_elements()
            )
        # The relayout is outside of loops and branches, because some relayouts
        # inside them end the process in DTensor's compiler.
        with tf_private.outermost_graph().as_default():
            value = tf.convert_to_tensor(variable) if read is None else read()
            return (
                value
                if not axes
                else gathered_along(axes, value, layout, shards_gradient=False)
            )


def gathering_layer_call() -> contextlib.AbstractContextManager[None]:
    """Gathers the weights of a tf_keras layer that is called in the context.

    In Keras 3 this is not needed, because weights record their layer.
    """
    return _in_layer.set_to(True)


def in_gathering_layer() -> bool:
    """Returns whether this thread is inside `gathering_layer_call`."""
    return _in_layer.get()


def current() -> GatheredReads | None:
    """Returns the reads of the replicated function being traced, or None."""
    return _current.get()


def gathered_along(
    axes: set[str],
    tensor: tf.Tensor,
    layout: Layout,
    shards_gradient: bool = True,
) -> tf.Tensor:
    """Returns `tensor` gathered along some mesh axes.

    The gradient of a lookup stays `tf.IndexedSlices`. The gradient of DTensor's
    relayout would sum repeated ids, but Keras' optimizers square the gradient
    of each repeated id separately.

    Args:
      axes: Mesh axes along which to gather.
      tensor: Value of a variable.
      layout: Layout of the variable.
      shards_gradient: Whether DTensor may shard the computation of the
        gradient.
    """
    gathered = dtensor.Layout(
        [
            dtensor.UNSHARDED if one in axes else one
            for one in layout.sharding_specs
        ],
        layout.mesh,
    )

    @tf.custom_gradient
    def relayout(value: tf.Tensor) -> Any:
        def gradient(dy: Any) -> Any:
            if isinstance(dy, tf.IndexedSlices):
                return dy
            if not shards_gradient:
                return dtensor.relayout(dtensor.relayout(dy, gathered), layout)
            # This is DTensor's gradient of a relayout.
            return dtensor.relayout_like(dy, value)

        return dtensor.relayout(value, gathered), gradient

    return relayout(tensor)
