"""Layout maps of Keras, as tables of this package.

`as_table` converts a `keras.distribution.LayoutMap` to a `LayoutTable`. As in
Keras, the keys of this table must match the full path of a variable.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import keras

from tf_layoutmap._core import checks
from tf_layoutmap.layout.key_matching import Match
from tf_layoutmap.layout.layout_table import LayoutTable
from tf_layoutmap.layout.mesh.device_mesh import Mesh, to_dtensor_mesh

# Attribute of a Keras layout map that holds its `_KerasLayoutTable`.
_TABLE = "_tf_layoutmap_table"


def as_table(layout_map: Any) -> LayoutTable:
    """Returns the `LayoutTable` of a layout map of this package or of Keras.

    Raises:
      TypeError: If `layout_map` is not a layout map.
    """
    if isinstance(layout_map, LayoutTable) or not isinstance(
        layout_map, keras.distribution.LayoutMap
    ):
        return checks.check_type(
            "layout_map", layout_map, LayoutTable, "a LayoutMap"
        )
    table = getattr(layout_map, _TABLE, None)
    if table is None:
        table = _KerasLayoutTable(layout_map)
        setattr(layout_map, _TABLE, table)
    return table


class _KerasLayoutTable(LayoutTable):
    """The entries of a Keras layout map, which user code can still change.

    Exactly one key may match the full path that Keras gives to a variable.
    """

    _refuses_two = True

    def __init__(self, layout_map: keras.distribution.LayoutMap):
        mesh = layout_map.device_mesh
        super().__init__(
            None if mesh is None else to_dtensor_mesh(mesh), match="fullmatch"
        )
        self._keras_map = layout_map
        self._synchronize()

    def _synchronize(self) -> None:
        """Copies the entries that user code has changed since the last call."""
        current = dict(self._keras_map.items())
        if list(current) == list(self._layouts) and all(
            self._layouts[key] is layout for key, layout in current.items()
        ):
            return
        for key in list(self._layouts):
            del self[key]
        for key, layout in current.items():
            self[key] = layout

    def find(
        self, keys: Sequence[str], *, reserved_names: Container[str] = ()
    ) -> Match | None:
        self._synchronize()
        return super().find(keys, reserved_names=reserved_names)

    def _names_to_match(self, path: str, names: Sequence[str]) -> Sequence[str]:
        del names
        return [path]

    def _is_layer_output(self, key: str) -> bool:
        # Keras looks up the path of a layer and the suffix "/output". A regular
        # expression need not contain the slash.
        return key.removesuffix("$").endswith("output")

    def mesh_in_use(self) -> Mesh:
        self._synchronize()
        return super().mesh_in_use()

    def __iter__(self) -> Iterator[str]:
        self._synchronize()
        return super().__iter__()

    def axes_of(self, value: Any) -> tuple[str | None, ...]:
        return tuple(value.axes)

    def _mesh_of(self, value: Any) -> Mesh | None:
        return (
            None
            if value.device_mesh is None
            else to_dtensor_mesh(value.device_mesh)
        )

    def _check_layout(self, key: Any, layout: Any) -> Any:
        del key
        return layout
