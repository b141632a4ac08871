"""The layout of a tensor on a mesh, in the terms of keras.distribution."""

from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.layout.mesh import device_mesh as device_mesh_lib
from tf_layoutmap.layout.mesh import shard_shapes
from tf_layoutmap.layout.mesh.device_mesh import AnyMesh
from tf_layoutmap.layout.mesh.layouts import Layout, mesh_sizes

dtensor = tf.experimental.dtensor


class TensorLayout:
    """A mesh axis for each dimension of a tensor, None where it is whole.

    Aligned with `tf.experimental.dtensor.Layout`, which `to_dtensor` returns.

    ```python
    layout = tlm.distribution.TensorLayout((None, "model"), device_mesh)
    ```
    """

    def __init__(self, axes: Sequence[str | None],
                 device_mesh: AnyMesh | None = None):
        """Makes the layout.

        Args:
          axes: Per dimension the name of a mesh axis or None, no axis twice.
          device_mesh: `DeviceMesh` (or `dtensor.Mesh`); None to set it
            later, once, as `layout.device_mesh = ...`.

        Raises:
          TypeError: An axis is neither a string nor None.
          ValueError: An axis is twice in `axes`, or is not in the mesh.
        """
        if isinstance(axes, str):
            raise TypeError(_checks.message(
                "axes", "a tuple with an axis name or None for each "
                "dimension", axes))
        self._axes = tuple(_checks.check_type(
            "axes", axis, (str, type(None)), "axis names or None")
            for axis in axes)
        twice = {a: 1 for a in self._axes if a is not None}
        self._refuse(shard_shapes.axes_problems(self._axes, twice))
        self._device_mesh: AnyMesh | None = None
        if device_mesh is not None:
            self.device_mesh = device_mesh

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            raise ValueError(
                f"Layout {self._axes} is not possible: "
                f"{'; '.join(problems)}.")

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The mesh axis of each dimension."""
        return self._axes

    @property
    def device_mesh(self) -> AnyMesh | None:
        """The mesh, or None while it is not set."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, device_mesh: AnyMesh) -> None:
        if self._device_mesh is not None:
            raise ValueError(
                "The mesh of a TensorLayout is set once. Received: "
                f"{device_mesh!r}; it is {self._device_mesh!r}.")
        mesh = device_mesh_lib.to_dtensor_mesh(device_mesh)
        self._refuse(shard_shapes.axes_problems(self._axes, mesh_sizes(mesh)))
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
        if self._device_mesh is None:
            raise ValueError(
                f"TensorLayout {self._axes} needs a device mesh before it "
                "can become a dtensor.Layout. Received: device_mesh=None.")
        return dtensor.Layout(
            [dtensor.UNSHARDED if a is None else a for a in self._axes],
            device_mesh_lib.to_dtensor_mesh(self._device_mesh))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorLayout):
            return NotImplemented
        return (self._axes == other._axes and
                self._device_mesh is other._device_mesh)

    def __hash__(self) -> int:
        return hash(self._axes)

    def __repr__(self) -> str:
        return f"TensorLayout({self._axes}, {self._device_mesh!r})"
