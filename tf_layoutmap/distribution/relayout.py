"""Changing the layout of a tensor."""

from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.distribution.tensor_layout import (
    TensorLayout,
    to_dtensor_layout,
)
from tf_layoutmap.layout.mesh import pinning, transfer
from tf_layoutmap.layout.mesh.layouts import Layout

dtensor = tf.experimental.dtensor


def distribute_tensor(
    tensor: Any, layout: TensorLayout | Layout | keras.distribution.TensorLayout
) -> Any:
    """Returns `tensor` with another layout.

    ```python
    layout = tlm.distribution.TensorLayout((None, "model"), mesh)
    y = tlm.distribution.distribute_tensor(x, layout)
    ```

    Args:
      tensor: A tensor on the host or on the mesh of `layout`, an array, or,
        inside `tf.function`, a symbolic tensor.
      layout: `TensorLayout` (Keras' own too) or `dtensor.Layout` wanted, with
        a mesh.

    Returns:
      A DTensor with the same value. In `tf.function`, where gradients flow
      through, the layout is pinned.

    Raises:
      TypeError: `layout` is no layout.
      ValueError: The layout has no mesh, or does not fit the tensor's shape.
    """
    if isinstance(layout, keras.distribution.TensorLayout):
        layout = to_dtensor_layout(layout)
    _checks.check_type(
        "layout", layout, dtensor.Layout, "a TensorLayout or a dtensor.Layout"
    )
    if isinstance(tensor, keras.KerasTensor):
        return tensor  # A model that is being put together: no values yet.
    if tf.is_symbolic_tensor(tensor):
        return dtensor.relayout(tensor, layout)
    if isinstance(tensor, tf.Variable):
        tensor = tensor.read_value()
    if not pinning.on_mesh(tensor) or (
        dtensor.fetch_layout(tensor).mesh != layout.mesh
    ):
        return transfer.to_mesh(tensor, layout)
    transfer.check_fits(layout, tensor.shape)
    return dtensor.relayout(tensor, layout)
