"""`LayoutMap` with the interface of `keras.distribution.LayoutMap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from tf_layoutmap.distribution.tensor_layout import TensorLayout, check_axes
from tf_layoutmap.layout import layout_map, layout_table
from tf_layoutmap.layout.mesh.device_mesh import AnyMesh, Mesh, to_dtensor_mesh


class LayoutMap(layout_map.LayoutMap, keras.distribution.LayoutMap):
    """A map from variable names to `TensorLayout`s.

    Differs from `tlm.LayoutMap` in three ways. A key matches anywhere in a
    name. A name that two keys match raises `ValueError`, except if one of them
    equals the name. A value may be a tuple or list of mesh axis names. It is a
    subclass of `keras.distribution.LayoutMap`.

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
            `keras.distribution.DeviceMesh` or `dtensor.Mesh`. It is set on each
            layout without a mesh. Variables without a key are replicated on it.
          match: `"search"` if keys match anywhere in a name, `"match"` if they
            match its start, or `"fullmatch"` if they match the full name, as in
            Keras.
          strict: Whether keys that match no variable also raise an error.

        Raises:
          TypeError: `device_mesh` is not a mesh.
        """
        mesh = None if device_mesh is None else to_dtensor_mesh(device_mesh)
        layout_map.LayoutMap.__init__(self, mesh, match=match, strict=strict)
        self._device_mesh = device_mesh

    @property
    def device_mesh(self) -> AnyMesh | None:
        """The mesh passed at creation, or None."""
        return self._device_mesh

    def _check_layout(
        self, key: Any, layout: Any
    ) -> keras.distribution.TensorLayout:
        """Returns `layout` as a TensorLayout, with the mesh if there is one."""
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
            # Layouts of Keras accept only meshes of Keras, which include
            # `tlm.distribution.DeviceMesh`.
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
