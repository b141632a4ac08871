"""The LayoutMap of keras.distribution: TensorLayouts, or tuples of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from tf_layoutmap.distribution.tensor_layout import TensorLayout, check_axes
from tf_layoutmap.layout import layout_map, layout_table
from tf_layoutmap.layout.mesh.device_mesh import AnyMesh, Mesh, to_dtensor_mesh


class LayoutMap(layout_map.LayoutMap, keras.distribution.LayoutMap):
    """Maps the names of variables to `TensorLayout`s.

    Like `tlm.LayoutMap`, but a key is searched anywhere in the name, a name
    that two keys match is refused unless one equals it, and a value may be a
    tuple or list of mesh axis names. It is a `keras.distribution.LayoutMap`,
    for whoever asks for one.

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
        """Makes an empty map.

        Args:
          device_mesh: `DeviceMesh`, ours or Keras' (or `dtensor.Mesh`), given
            to each layout that has none, and on which other variables are
            replicated.
          match: `"search"`; `"match"` for keys that start the name,
            `"fullmatch"` for keys that match all of it, as Keras has them.
          strict: Refuse keys without a variable, too.

        Raises:
          TypeError: `device_mesh` is no mesh.
        """
        mesh = None if device_mesh is None else to_dtensor_mesh(device_mesh)
        layout_map.LayoutMap.__init__(self, mesh, match=match, strict=strict)
        self._device_mesh = device_mesh

    @property
    def device_mesh(self) -> AnyMesh | None:
        """The mesh given at creation, or None."""
        return self._device_mesh

    def _check_layout(
        self, key: Any, layout: Any
    ) -> keras.distribution.TensorLayout:
        """Returns a TensorLayout as it is, with a mesh if there is one."""
        mesh = self._device_mesh
        if isinstance(layout, tuple | list):
            try:
                return TensorLayout(layout, mesh)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{layout!r} should be a TensorLayout or axis names "
                    f"(key {key!r}). {error}"
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
            # Keras' layouts take Keras' meshes, which ours are.
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
