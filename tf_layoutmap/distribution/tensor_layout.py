"""`TensorLayout`, and `distribute_tensor`, which changes a tensor's layout."""

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
    """A mesh axis, or None for unsharded, for each dimension of a tensor.

    Equivalent to `tf.experimental.dtensor.Layout`, which `to_dtensor` returns.
    It is a subclass of `keras.distribution.TensorLayout`.

    ```python
    layout = tlm.distribution.TensorLayout((None, "model"), device_mesh)
    ```
    """

    def __init__(
        self, axes: Sequence[str | None], device_mesh: AnyMesh | None = None
    ):
        """Creates the layout.

        Args:
          axes: Name of a mesh axis, or None, for each dimension. Axes must not
            repeat.
          device_mesh: `tlm.distribution.DeviceMesh`,
            `keras.distribution.DeviceMesh` or `dtensor.Mesh`; None to set it
            later, once, with `layout.device_mesh = ...`.

        Raises:
          TypeError: An axis is neither a string nor None, or `device_mesh` is
            not a mesh.
          ValueError: An axis repeats in `axes`, or is not in the mesh.
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
            _check_axes_unique(self)
        else:
            self.device_mesh = device_mesh

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The mesh axis of each dimension."""
        return super().axes

    @property
    def device_mesh(self) -> AnyMesh | None:
        """The mesh, or None if it is not set yet."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, device_mesh: AnyMesh) -> None:
        if self._device_mesh is not None:
            raise ValueError(
                "Cannot override device mesh value: it can be set only once. "
                f"Existing value is {self._device_mesh}. Received: "
                f"{device_mesh!r}."
            )
        check_axes(self, device_mesh)
        self._device_mesh = device_mesh

    @property
    def backend_layout(self) -> Layout:
        """The `dtensor.Layout`, under the name that keras.distribution uses."""
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
    """Returns a TensorLayout of this package or Keras as a `dtensor.Layout`.

    Raises:
      ValueError: The layout has no mesh, or its axes do not fit the mesh.
    """
    if layout.device_mesh is None:
        raise ValueError(
            "Cannot create sharding when device mesh is not set for "
            f"TensorLayout {layout.axes}: conversion to dtensor.Layout "
            "requires a device mesh. Received: device_mesh=None."
        )
    check_axes(layout, layout.device_mesh)
    return dtensor.Layout(
        [dtensor.UNSHARDED if a is None else a for a in layout.axes],
        device_mesh_lib.to_dtensor_mesh(layout.device_mesh),
    )


def check_axes(
    layout: keras.distribution.TensorLayout, device_mesh: AnyMesh
) -> None:
    """Checks that a mesh has all axes of a layout.

    Raises:
      TypeError: `device_mesh` is not a mesh.
      ValueError: An axis is not in the mesh, or repeats in the layout. The
        message starts like the message of keras.distribution.
    """
    device_mesh_lib.check_mesh("device_mesh", device_mesh)
    _check_axes_unique(layout)
    sizes = device_mesh_lib.axis_sizes(device_mesh)
    unknown = [a for a in layout.axes if a is not None and a not in sizes]
    if unknown:
        problems = "; ".join(shard_shapes.axes_problems(unknown, sizes))
        raise ValueError(
            "Invalid axis names for Layout. Valid axis names: "
            f"{list(sizes)}, Got {unknown}: {problems}."
        )


def _check_axes_unique(layout: keras.distribution.TensorLayout) -> None:
    sizes = {a: 1 for a in layout.axes if a is not None}
    if problems := shard_shapes.axes_problems(layout.axes, sizes):
        raise ValueError(
            f"Layout {layout.axes} is not possible: {'; '.join(problems)}."
        )


def distribute_tensor(
    tensor: Any, layout: TensorLayout | Layout | keras.distribution.TensorLayout
) -> Any:
    """Returns `tensor` with the layout `layout`.

    ```python
    layout = tlm.distribution.TensorLayout((None, "model"), mesh)
    y = tlm.distribution.distribute_tensor(x, layout)
    ```

    Args:
      tensor: Tensor on the host or on the mesh of `layout`, array, or symbolic
        tensor inside `tf.function`.
      layout: `TensorLayout` of this package or Keras, or `dtensor.Layout`. It
        must have a mesh.

    Returns:
      A DTensor with the same value. Inside `tf.function`, the layout is pinned,
      and gradients flow through.

    Raises:
      TypeError: `layout` is not a layout.
      ValueError: The layout has no mesh, or does not fit the tensor's shape.
    """
    if isinstance(layout, keras.distribution.TensorLayout):
        layout = to_dtensor_layout(layout)
    checks.check_type(
        "layout", layout, dtensor.Layout, "a TensorLayout or a dtensor.Layout"
    )
    if isinstance(tensor, keras.KerasTensor):
        return tensor  # Symbolic tensor of a functional model, without values.
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
