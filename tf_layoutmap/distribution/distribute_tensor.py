"""Changing how a tensor lies on its mesh."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.layout import fit_checks, host_values
from tf_layoutmap.layout.layout_map import axes_of_layout, mesh_sizes
from tf_layoutmap.layout.tensor_layout import TensorLayout

dtensor = tf.experimental.dtensor


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Returns `tensor` with another layout.

    ```python
    layout = tlm.distribution.TensorLayout((None, "model"), mesh)
    y = tlm.distribution.distribute_tensor(x, layout)
    ```

    Args:
      tensor: A tensor on the host or on the mesh of `layout`, an array, or,
        inside `tf.function`, a symbolic tensor.
      layout: `TensorLayout` or `dtensor.Layout` wanted, with a mesh.

    Returns:
      A DTensor with the same value. In `tf.function`, where gradients flow
      through, the layout is pinned.

    Raises:
      TypeError: `layout` is no layout.
      ValueError: The layout has no mesh, or does not fit the tensor's shape.
    """
    if isinstance(layout, TensorLayout):
        layout = layout.to_dtensor()
    _checks.check_type("layout", layout, dtensor.Layout,
                       "a TensorLayout or a dtensor.Layout")
    if not tf.is_tensor(tensor) and not isinstance(tensor, tf.Variable):
        tensor = np.asarray(tensor)
    shape = tuple(tensor.shape)
    if None not in shape:
        axes = axes_of_layout(layout)
        problems = fit_checks.fit_problems(
            axes, shape, mesh_sizes(layout.mesh))
        if problems:
            raise ValueError(
                f"Layout {axes} does not fit a tensor of shape {shape}: "
                f"{'; '.join(problems)}.")
    if tf.is_symbolic_tensor(tensor) or host_values.on_mesh(tensor):
        return dtensor.relayout(tensor, layout)
    return host_values.to_mesh(tensor, layout)
