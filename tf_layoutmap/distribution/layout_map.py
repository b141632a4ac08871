"""The LayoutMap of keras.distribution: TensorLayouts, or tuples of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tf_layoutmap.layout import layout_map
from tf_layoutmap.layout.mesh.device_mesh import AnyMesh, to_dtensor_mesh
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.mesh.tensor_layout import TensorLayout
from tf_layoutmap.layout.plan import layout_table

if TYPE_CHECKING:
    import keras


class LayoutMap(layout_map.LayoutMap):
    """Maps the names of variables to `TensorLayout`s.

    Like `tlm.LayoutMap`, but a key is searched anywhere in the name, and a
    value may be a tuple or list of mesh axis names.

    ```python
    layout_map = tlm.distribution.LayoutMap(device_mesh)
    layout_map["dense.*kernel"] = (None, "model")
    layout_map["conv2d.*bias"] = TensorLayout(("model",))

    layout_map["my_model/dense_1/kernel"].axes   # (None, "model")
    layout_map["my_model/conv3d_1/bias"]         # None
    ```
    """

    if TYPE_CHECKING:
        def __getitem__(self, key: str) -> TensorLayout | None: ...

        def __setitem__(
            self, key: str,
            layout: (TensorLayout | Sequence[str | None] |
                     keras.distribution.TensorLayout)) -> None: ...

    def __init__(self, device_mesh: AnyMesh | None = None, *,
                 match: str = "search", strict: bool = False):
        """Makes an empty map.

        Args:
          device_mesh: `DeviceMesh` (or `dtensor.Mesh`) given to each layout
            that has none, and on which other variables are replicated.
          match: `"search"`, or `"match"` for keys that start the name.
          strict: Refuse a name that two keys match, unless one equals it.

        Raises:
          TypeError: `device_mesh` is no mesh.
        """
        mesh = None if device_mesh is None else to_dtensor_mesh(device_mesh)
        super().__init__(mesh, match=match, strict=strict)
        self._device_mesh = device_mesh

    @property
    def device_mesh(self) -> AnyMesh | None:
        """The mesh given at creation, or None."""
        return self._device_mesh

    def _check_layout(self, key: Any, layout: Any) -> TensorLayout:
        if isinstance(layout, tuple | list):
            layout = TensorLayout(layout)
        elif not isinstance(layout, TensorLayout):
            # keras.distribution.TensorLayout, by its two attributes.
            if not (hasattr(layout, "axes") and
                    hasattr(layout, "device_mesh")):
                raise layout_table.LayoutTypeError(
                    f"{layout!r} should be a TensorLayout or a tuple of axis "
                    f"names, got {type(layout).__name__} (key {key!r}).")
            layout = TensorLayout(layout.axes, layout.device_mesh)
        if layout.device_mesh is None and self._device_mesh is not None:
            layout = TensorLayout(layout.axes, self._device_mesh)
        return layout

    def axes_of(self, value: TensorLayout) -> tuple[str | None, ...]:
        return value.axes

    def _mesh_of(self, value: TensorLayout) -> Mesh | None:
        return (None if value.device_mesh is None
                else to_dtensor_mesh(value.device_mesh))
