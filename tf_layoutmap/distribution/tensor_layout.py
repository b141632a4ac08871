"""The layout of a tensor on a mesh, as a `keras.distribution.TensorLayout`."""

# DOC-MERGE: Changing the layout of a tensor.
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.layout.mesh import device_mesh as device_mesh_lib
from tf_layoutmap.layout.mesh import pinning, shard_shapes, transfer
from tf_layoutmap.layout.mesh.device_mesh import AnyMesh, Layout

dtensor = tf.experimental.dtensor


class TensorLayout(keras.distribution.TensorLayout):
    """A mesh axis for each dimension of a tensor, None where it is whole.

    Aligned with `tf.experimental.dtensor.Layout`, which `to_dtensor` returns.
    It is a `keras.distribution.TensorLayout`, for whoever asks for one.

    ```python
    layout = tlm.distribution.TensorLayout((None, "model"), device_mesh)
    ```
    """

    def __init__(
        self, axes: Sequence[str | None], device_mesh: AnyMesh | None = None
    ):
        """Makes the layout.

        Args:
          axes: Per dimension the name of a mesh axis or None, no axis twice.
          device_mesh: `DeviceMesh`, ours or Keras' (or `dtensor.Mesh`); None
            to set it later, once, as `layout.device_mesh = ...`.

        Raises:
          TypeError: An axis is neither a string nor None, or `device_mesh` is
            no mesh.
          ValueError: An axis is twice in `axes`, or is not in the mesh.
        """
        if isinstance(axes, str):
            raise TypeError(
                checks.message(
                    "axes",
                    "a tuple with an axis name or None for each dimension",
                    axes,
                )
            )
        for axis in axes:
            checks.check_type(
                "axes", axis, (str, type(None)), "axis names or None"
            )
        super().__init__(axes)
        if device_mesh is None:
            _refuse_twice(self)
        else:
            self.device_mesh = device_mesh

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The mesh axis of each dimension."""
        return super().axes

    @property
    def device_mesh(self) -> AnyMesh | None:
        """The mesh, or None while it is not set."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, device_mesh: AnyMesh) -> None:
        if self._device_mesh is not None:
            raise ValueError(
                "Cannot override device mesh value: it is set once. Existing "
                f"value is {self._device_mesh}. Received: {device_mesh!r}."
            )
        check_axes(self, device_mesh)
        self._device_mesh = device_mesh

    @property
    def backend_layout(self) -> Layout:
        """The `dtensor.Layout`, by keras.distribution's name."""
        return self.to_dtensor()

    def to_dtensor(self) -> Layout:
        """Returns the `tf.experimental.dtensor.Layout`.

        Raises:
          ValueError: The mesh is not set.
        """
        return to_dtensor_layout(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorLayout):
            return NotImplemented
        return (
            self.axes == other.axes and self._device_mesh is other._device_mesh
        )

    def __hash__(self) -> int:
        return hash(self.axes)


def to_dtensor_layout(layout: keras.distribution.TensorLayout) -> Layout:
    """Returns a TensorLayout, ours or Keras', as a `dtensor.Layout`.

    Raises:
      ValueError: It has no mesh, or does not fit that.
    """
    if layout.device_mesh is None:
        raise ValueError(
            "Cannot create sharding when device mesh is not set for "
            f"TensorLayout {layout.axes}: it needs a device mesh before it "
            "can become a dtensor.Layout. Received: device_mesh=None."
        )
    check_axes(layout, layout.device_mesh)
    return dtensor.Layout(
        [dtensor.UNSHARDED if a is None else a for a in layout.axes],
        device_mesh_lib.to_dtensor_mesh(layout.device_mesh),
    )


def check_axes(
    layout: keras.distribution.TensorLayout, device_mesh: AnyMesh
) -> None:
    """Refuses axes that a mesh lacks, in the words of keras.distribution.

    Raises:
      TypeError: `device_mesh` is no mesh.
      ValueError: An axis is not in it, or twice in the layout.
    """
    device_mesh_lib.check_mesh("device_mesh", device_mesh)
    _refuse_twice(layout)
    sizes = device_mesh_lib.axis_sizes(device_mesh)
    unknown = [a for a in layout.axes if a is not None and a not in sizes]
    if unknown:
        problems = "; ".join(shard_shapes.axes_problems(unknown, sizes))
        raise ValueError(
            "Invalid axis names for Layout. Valid axis names: "
            f"{list(sizes)}, Got {unknown}: {problems}."
        )


def _refuse_twice(layout: keras.distribution.TensorLayout) -> None:
    sizes = {a: 1 for a in layout.axes if a is not None}
    if problems := shard_shapes.axes_problems(layout.axes, sizes):
        raise ValueError(
            f"Layout {layout.axes} is not possible: {'; '.join(problems)}."
        )


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
    checks.check_type(
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
