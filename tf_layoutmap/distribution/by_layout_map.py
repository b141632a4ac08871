"""Distributions whose weights are where a layout map says."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import keras

from tf_layoutmap import _checks, _deprecated, _keras_private
from tf_layoutmap._patches import engine as patches
from tf_layoutmap.distribution.base import Distribution
from tf_layoutmap.distribution.tensor_layout import TensorLayout
from tf_layoutmap.layout.keras_layout_map import as_table
from tf_layoutmap.layout.layout_map import LayoutMap
from tf_layoutmap.layout.layout_map_scope import (
    layout_map_scope,
    prepared_context,
)
from tf_layoutmap.layout.mesh.device_mesh import axis_sizes
from tf_layoutmap.layout.mesh.layouts import Layout, axes_of_layout


class ByLayoutMap(Distribution):
    """Weights where a layout map says, batches cut along one mesh axis."""

    def __init__(
        self,
        layout_map: LayoutMap | keras.distribution.LayoutMap,
        batch_dim_name: str | None,
        auto_shard_dataset: bool,
        init: str,
    ):
        self._layout_map = layout_map
        self._table = as_table(layout_map)
        mesh = getattr(layout_map, "device_mesh", None)
        mesh = self._table.mesh_in_use() if mesh is None else mesh
        names = list(axis_sizes(mesh))
        super().__init__(
            mesh,
            names[0]
            if batch_dim_name is None
            else (
                _checks.check_one_of("batch_dim_name", batch_dim_name, names)
            ),
            auto_shard_dataset,
        )
        self._init = init
        # Keras' own set_distribution may be given it, and tells nobody.
        patches.ensure("keras3")

    @property
    def layout_map(self) -> Any:
        """Where the layouts come from, as given."""
        return self._layout_map

    @property
    def num_model_replicas(self) -> int:
        """Parts into which a batch is cut."""
        return axis_sizes(self.device_mesh)[self._batch_dim_name]

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """Returns the layout of a batch of this shape."""
        return self._layout(
            (self._batch_dim_name, *[None] * (len(data_shape) - 1))
        )

    def get_variable_layout(
        self, variable: Any
    ) -> keras.distribution.TensorLayout:
        """Returns the layout of a variable, or the one it would get here."""
        layout = _keras_private.given_layout(variable)
        if layout is None:
            layout = getattr(variable, "layout", None)
        if isinstance(layout, keras.distribution.TensorLayout):
            return layout
        if isinstance(layout, Layout):
            return self._layout(axes_of_layout(layout))
        found = self.get_tensor_layout(variable.path)
        return (
            self._layout((None,) * len(variable.shape))
            if (found is None)
            else found
        )

    def get_tensor_layout(
        self, path: str
    ) -> keras.distribution.TensorLayout | None:
        """Returns what the layout map has for a name, or None."""
        layout = self._layout_map[path]
        return (
            self._layout(axes_of_layout(layout))
            if isinstance(layout, Layout)
            else layout
        )

    def _layout(self, axes: tuple[str | None, ...]) -> TensorLayout:
        return TensorLayout(axes, self.device_mesh)

    def context(self) -> Any:
        """Returns what new models belong to; for `set_distribution`."""
        return prepared_context(self._table, self._init, self._batch_dim_name)

    @functools.cached_property
    def _context_if_set_in_keras(self) -> Any:
        """Asked for if `keras.distribution.set_distribution` was given this."""
        return self.context()

    home = _deprecated.renamed_method("home", "context")

    def _place_new_models(self) -> contextlib.AbstractContextManager:
        """Returns the scope that places what is made in it."""
        return layout_map_scope(
            self._layout_map, init=self._init, batch_dim=self._batch_dim_name
        )
