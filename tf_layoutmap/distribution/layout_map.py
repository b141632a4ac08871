"""`DeviceMesh`, `TensorLayout` and `LayoutMap` as in `keras.distribution`.

`DeviceMesh` is a grid of devices with named axes. `TensorLayout` describes how
a tensor is sharded on this grid. `distribute_tensor` changes the layout of a
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, keras_private
from tf_layoutmap.layout import layout_map, layout_table
from tf_layoutmap.layout.mesh import device_mesh as device_mesh_lib
from tf_layoutmap.layout.mesh import shard_shapes, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import (
    AnyMesh,
    Layout,
    Mesh,
    to_dtensor_mesh,
)
from tf_layoutmap.layout.replication import traces

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TensorLike

dtensor = tf.experimental.dtensor

_Default = TypeVar("_Default")


class TensorLayout(keras.distribution.TensorLayout):
    """The mesh axis that shards each dimension of a tensor.

    The class is equivalent to `tf.experimental.dtensor.Layout`, and
    `to_dtensor` converts an object to this type. The class is a subclass of
    `keras.distribution.TensorLayout`.

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
            `keras.distribution.DeviceMesh` or `dtensor.Mesh`. If `device_mesh`
            is None, the attribute `device_mesh` of the layout can be set once
            later.

        Raises:
          TypeError: If an axis is neither a string nor None, or `device_mesh`
            is not a mesh.
          ValueError: If an axis repeats in `axes`, or is not in the mesh.
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
          ValueError: If the mesh is not set.
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
      ValueError: If the layout has no mesh, or its axes do not fit the mesh.
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
      TypeError: If `device_mesh` is not a mesh.
      ValueError: If an axis is not in the mesh, or repeats in the layout. The
        message starts with the message that keras.distribution raises in this
        case.
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


@overload
def distribute_tensor(
    tensor: keras.KerasTensor,
    layout: TensorLayout | Layout | keras.distribution.TensorLayout,
) -> keras.KerasTensor: ...


@overload
def distribute_tensor(
    tensor: TensorLike,
    layout: TensorLayout | Layout | keras.distribution.TensorLayout,
) -> tf.Tensor: ...


def distribute_tensor(
    tensor: TensorLike | keras.KerasTensor,
    layout: TensorLayout | Layout | keras.distribution.TensorLayout,
) -> tf.Tensor | keras.KerasTensor:
    """Returns `tensor` with the layout `layout`.

    ```python
    layout = tlm.distribution.TensorLayout((None, "model"), mesh)
    y = tlm.distribution.distribute_tensor(x, layout)
    ```

    Args:
      tensor: Tensor on the host or on the mesh of `layout`, array, variable, or
        symbolic tensor inside `tf.function`.
      layout: `TensorLayout` of this package or Keras, or `dtensor.Layout`. The
        layout must have a mesh.

    Returns:
      A DTensor with the same value. Inside `tf.function`, the layout is pinned,
      the function runs on the mesh, and its results keep their layouts.
      Gradients propagate through this function.

    Raises:
      TypeError: If `layout` is neither a `TensorLayout` nor a `dtensor.Layout`.
      ValueError: If the layout has no mesh, or does not fit the tensor's shape.
    """
    if isinstance(layout, keras.distribution.TensorLayout):
        layout = to_dtensor_layout(layout)
    checks.check_type(
        "layout", layout, dtensor.Layout, "a TensorLayout or a dtensor.Layout"
    )
    if isinstance(tensor, keras.Variable):
        tensor = tensor.value
    # A symbolic tensor of a Functional model has no value.
    if isinstance(tensor, keras.KerasTensor):
        return tensor
    if tf.is_symbolic_tensor(tensor):
        if keras_private.calling_layer() is None:
            # A function that is called with tensors of the host runs on the
            # mesh, too.
            if tracing.mesh_of_operation() is None:
                tracing.require_mesh(layout.mesh, is_strict=False)
            traces.keep_layouts()
        return dtensor.relayout(tensor, layout)
    if isinstance(tensor, tf.Variable):
        tensor = tensor.read_value()
    if not tracing.on_mesh(tensor) or (
        dtensor.fetch_layout(tensor).mesh != layout.mesh
    ):
        return transfer.to_mesh(tensor, layout)
    tensor = cast("tf.Tensor", tensor)
    transfer.check_fits(layout, tensor.shape)
    return dtensor.relayout(tensor, layout)


class LayoutMap(layout_map.LayoutMap, keras.distribution.LayoutMap):
    """A map from variable names to `TensorLayout`s.

    The class differs from `tlm.LayoutMap` in three ways:

    * A key matches anywhere in a name.
    * If two keys match a name and neither key is equal to the name,
      `ValueError` is raised.
    * A value can be a tuple or list of mesh axis names.

    The class is a subclass of `keras.distribution.LayoutMap`.

    ```python
    layout_map = tlm.distribution.LayoutMap(device_mesh)
    layout_map["dense.*kernel"] = (None, "model")
    layout_map["conv2d.*bias"] = TensorLayout(("model",))

    layout_map["my_model/dense_1/kernel"].axes   # (None, "model")
    layout_map["my_model/conv3d_1/bias"]         # None
    ```
    """

    _refuses_two = True

    if TYPE_CHECKING:

        def __getitem__(
            self, key: str
        ) -> keras.distribution.TensorLayout | None: ...

        def __setitem__(
            self,
            key: str,
            layout: (
                TensorLayout
                | Sequence[str | None]
                | keras.distribution.TensorLayout
            ),
        ) -> None: ...

        @overload
        def get(
            self, key: str, default: None = None
        ) -> keras.distribution.TensorLayout | None: ...

        @overload
        def get(
            self, key: str, default: _Default
        ) -> keras.distribution.TensorLayout | _Default: ...

        def get(self, key: str, default: object = None) -> object: ...

        @overload
        def pop(self, key: str) -> keras.distribution.TensorLayout: ...

        @overload
        def pop(
            self, key: str, default: _Default, /
        ) -> keras.distribution.TensorLayout | _Default: ...

        def pop(self, key: str, *default: object) -> object: ...

        def setdefault(
            self,
            key: str,
            default: (
                keras.distribution.TensorLayout | Sequence[str | None] | None
            ) = None,
        ) -> keras.distribution.TensorLayout: ...

    def __init__(
        self,
        device_mesh: AnyMesh | None = None,
        *,
        match: str = "search",
        strict: bool = False,
    ):
        """Creates an empty map.

        Args:
          device_mesh: `tlm.distribution.DeviceMesh`,
            `keras.distribution.DeviceMesh` or `dtensor.Mesh`. Each layout
            without a mesh gets this mesh. If no key matches a variable, the
            variable is replicated on this mesh.
          match: Where a key must match: `"search"` anywhere in the name,
            `"match"` at the start of the name, or `"fullmatch"` the full name,
            as in Keras.
          strict: Whether to raise an error if a key matches no variable, or if
            DTensor cannot shard an operation or a weight.

        Raises:
          TypeError: If `device_mesh` is not a mesh.
        """
        mesh = None if device_mesh is None else to_dtensor_mesh(device_mesh)
        layout_map.LayoutMap.__init__(self, mesh, match=match, strict=strict)
        self._device_mesh = device_mesh

    @property
    def device_mesh(self) -> AnyMesh | None:
        """The mesh that was passed to the constructor, or None."""
        return self._device_mesh

    def _check_layout(
        self, key: Any, layout: Any
    ) -> keras.distribution.TensorLayout:
        """Converts `layout` to a TensorLayout on the mesh of this map."""
        mesh = self._device_mesh
        if isinstance(layout, tuple | list):
            try:
                return TensorLayout(layout, mesh)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{layout!r} should be a TensorLayout or a tuple of axis "
                    f"names (key {key!r}). {error}"
                ) from error
        if not isinstance(layout, keras.distribution.TensorLayout):
            raise layout_table.LayoutTypeError(
                f"{layout!r} should be a TensorLayout or a tuple of axis "
                f"names, got {type(layout).__name__} (key {key!r})."
            )
        if layout.device_mesh is not None:
            check_axes(layout, layout.device_mesh)
        elif mesh is not None:
            check_axes(layout, mesh)
            # A layout of Keras accepts only a mesh of Keras.
            # `tlm.distribution.DeviceMesh` is a subclass of the mesh of Keras.
            if isinstance(layout, TensorLayout) or not isinstance(mesh, Mesh):
                layout.device_mesh = mesh
        return layout

    def axes_of(
        self, value: keras.distribution.TensorLayout
    ) -> tuple[str | None, ...]:
        return tuple(value.axes)

    def _mesh_of(self, value: keras.distribution.TensorLayout) -> Mesh | None:
        return (
            None
            if value.device_mesh is None
            else to_dtensor_mesh(value.device_mesh)
        )


class DeviceMesh(keras.distribution.DeviceMesh):
    """A grid of devices with a name for each axis.

    The class is equivalent to `tf.experimental.dtensor.Mesh`, and `to_dtensor`
    converts an object to this type. The class is a subclass of
    `keras.distribution.DeviceMesh`.

    ```python
    mesh = tlm.distribution.DeviceMesh(
        (2, 2), ["batch", "model"],
        devices=["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
    ```
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Sequence[str] | np.ndarray | None = None,
    ):
        """Creates the mesh.

        Args:
          shape: Number of devices along each axis, each at least 1.
          axis_names: Unique name of each axis.
          devices: `math.prod(shape)` device names such as `"cpu:0"`, in
            row-major order of the grid; None selects all devices of
            `list_devices()`.

        Raises:
          TypeError: If a size is not an integer, or a name is not a string.
          ValueError: If a size is below 1, a name repeats, the number of names
            differs from the number of axes, or the number of devices differs
            from the size of the grid.
        """
        grid = np.array(
            device_mesh_lib.list_devices() if devices is None else devices
        )
        device_mesh_lib.check_grid(shape, axis_names, grid)
        super().__init__(shape, axis_names, grid)

    @property
    def shape(self) -> Sequence[int]:
        """Number of devices along each axis, as passed to the constructor."""
        return super().shape

    @property
    def axis_names(self) -> Sequence[str]:
        """The name of each axis, as passed to the constructor."""
        return super().axis_names

    @property
    def devices(self) -> np.ndarray:
        """The device names, as an array of `shape`."""
        return super().devices

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.devices.size

    @property
    def backend_mesh(self) -> Mesh:
        """The `dtensor.Mesh`, under the name that keras.distribution uses."""
        return self.to_dtensor()

    def to_dtensor(self) -> Mesh:
        """Returns the `tf.experimental.dtensor.Mesh` of these devices."""
        return device_mesh_lib.to_dtensor_mesh(self)
