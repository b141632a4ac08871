"""Functions that are computed whole: their variables are gathered when read."""

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
    """What one function reads of divided variables, gathered on every device.

    Attributes:
      bytes: Of each variable, whole, by the identity of the variable.
    """

    def __init__(self):
        self.bytes: dict[int, int] = {}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """While open, what this thread traces reads variables whole."""
        with _current.set_to(self), tracing.with_replicated_batches():
            yield

    def read(
        self, variable: Any, read: Callable[[], tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns the value of a DVariable, whole on every device.

        Args:
          variable: `dtensor.DVariable`.
          read: Reads it as it is; None for TensorFlow's conversion.
        """
        layout = variable.layout
        # With padding it is read whole anyway.
        axes = (
            set()
            if isinstance(variable, PaddedVariable)
            else ({*layout.sharding_specs} - {dtensor.UNSHARDED})
        )
        if axes:
            self.bytes[id(variable)] = (
                variable.dtype.size * variable.shape.num_elements()
            )
        # Outside of loops and branches: DTensor's compiler ends the process
        # at some relayouts inside of them.
        with tf_private.outermost_graph().as_default():
            value = tf.convert_to_tensor(variable) if read is None else read()
            return (
                value
                if not axes
                else gathered_along(axes, value, layout, shards_gradient=False)
            )


def gathering_layer_call() -> contextlib.AbstractContextManager[None]:
    """While open, a layer of tf_keras is called that needs weights whole.

    Weights of Keras 3 find out by themselves whose they are.
    """
    return _in_layer.set_to(True)


def in_gathering_layer() -> bool:
    """Whether this thread is inside of `gathering_layer_call`."""
    return _in_layer.get()


def current() -> GatheredReads | None:
    """Returns what the function reads by that this thread traces, or None."""
    return _current.get()


def gathered_along(
    axes: set[str],
    tensor: tf.Tensor,
    layout: Layout,
    shards_gradient: bool = True,
) -> tf.Tensor:
    """Returns a tensor of this layout, no longer divided by `axes`.

    Args:
      axes: Of the mesh.
      tensor: The value of a variable.
      layout: Of the variable.
      shards_gradient: Whether DTensor may compute the gradient in parts.

    The gradient of a lookup stays rows, as that of any table: the gradient of
    DTensor's relayout would add up equal rows, and Keras' optimizers square
    each of them on its own.
    """
    gathered = dtensor.Layout(
        [
            dtensor.UNSHARDED if one in axes else one
            for one in layout.sharding_specs
        ],
        layout.mesh,
    )

    @tf.custom_gradient
    def relayout(whole: tf.Tensor) -> Any:
        def gradient(dy: Any) -> Any:
            if isinstance(dy, tf.IndexedSlices):
                return dy
            if not shards_gradient:
                return dtensor.relayout(dtensor.relayout(dy, gathered), layout)
            # As DTensor has it.
            return dtensor.relayout_like(dy, whole)

        return dtensor.relayout(whole, gathered), gradient

    return relayout(tensor)
