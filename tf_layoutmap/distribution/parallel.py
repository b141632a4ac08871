"""Data and model parallelism as keras.distribution names them."""

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_layoutmap import _checks, _deprecated, _keras_private
from tf_layoutmap._patches import engine as patches
from tf_layoutmap.distribution.base import Distribution
from tf_layoutmap.distribution.device_mesh import DeviceMesh
from tf_layoutmap.distribution.layout_map import LayoutMap
from tf_layoutmap.distribution.tensor_layout import TensorLayout
from tf_layoutmap.layout.keras_layout_map import as_table
from tf_layoutmap.layout.layout_map import LayoutMap as AnyLayoutMap
from tf_layoutmap.layout.layout_map_scope import (
    layout_map_scope,
    prepared_context,
)
from tf_layoutmap.layout.mesh.device_mesh import (
    AnyMesh,
    axis_sizes,
    check_mesh,
    list_devices,
)
from tf_layoutmap.layout.mesh.layouts import Layout, axes_of_layout
from tf_layoutmap.layout.plan.layout_table import LayoutTypeError


class _ByLayoutMap(Distribution):
    """Weights where a layout map says, batches cut along one mesh axis."""

    def __init__(self, layout_map: AnyLayoutMap | keras.distribution.LayoutMap,
                 batch_dim_name: str | None, auto_shard_dataset: bool,
                 init: str):
        self._layout_map = layout_map
        self._table = as_table(layout_map)
        mesh = getattr(layout_map, "device_mesh", None)
        mesh = self._table.mesh_in_use() if mesh is None else mesh
        names = list(axis_sizes(mesh))
        super().__init__(mesh, names[0] if batch_dim_name is None else (
            _checks.check_one_of("batch_dim_name", batch_dim_name, names)),
            auto_shard_dataset)
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
            (self._batch_dim_name, *[None] * (len(data_shape) - 1)))

    def get_variable_layout(
            self, variable: Any) -> keras.distribution.TensorLayout:
        """Returns the layout of a variable, or the one it would get here."""
        layout = _keras_private.given_layout(variable)
        if layout is None:
            layout = getattr(variable, "layout", None)
        if isinstance(layout, keras.distribution.TensorLayout):
            return layout
        if isinstance(layout, Layout):
            return self._layout(axes_of_layout(layout))
        found = self.get_tensor_layout(variable.path)
        return self._layout((None,) * len(variable.shape)) if (
            found is None) else found

    def get_tensor_layout(
            self, path: str) -> keras.distribution.TensorLayout | None:
        """Returns what the layout map has for a name, or None."""
        layout = self._layout_map[path]
        return self._layout(axes_of_layout(layout)) if isinstance(
            layout, Layout) else layout

    def _layout(self, axes: tuple[str | None, ...]) -> TensorLayout:
        return TensorLayout(axes, self.device_mesh)

    def context(self) -> Any:
        """Returns what new models belong to; for `set_distribution`."""
        return prepared_context(
            self._table, self._init, self._batch_dim_name)

    @functools.cached_property
    def _context_if_set_in_keras(self) -> Any:
        """Asked for if `keras.distribution.set_distribution` was given this."""
        return self.context()

    home = _deprecated.renamed_method("home", "context")

    def _place_new_models(self) -> contextlib.AbstractContextManager:
        """Returns the scope that places what is made in it."""
        return layout_map_scope(self._layout_map, init=self._init,
                                batch_dim=self._batch_dim_name)


class ModelParallel(_ByLayoutMap, keras.distribution.ModelParallel):
    """Weights sharded by a layout map, batches cut along one mesh axis.

    The counterpart of `keras.distribution.ModelParallel`, which shards
    nothing on TensorFlow. Models are made under its scope.

    ```python
    layout_map = tlm.distribution.LayoutMap(device_mesh)
    layout_map["dense.*kernel"] = (None, "model")
    distribution = tlm.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch")
    with distribution.scope():
        model = make_model()
    model.compile("adam", "mse")
    model.fit(x, y)
    ```
    """

    def __init__(self, *,
                 layout_map: AnyLayoutMap | keras.distribution.LayoutMap |
                 None = None, batch_dim_name: str | None = None,
                 auto_shard_dataset: bool = True, init: str = "sharded",
                 **kwargs: Any):
        """Makes the distribution.

        Args:
          layout_map: `tlm.distribution.LayoutMap`, `tlm.LayoutMap`, or
            `keras.distribution.LayoutMap`, whose keys then match as Keras
            matches them: the whole path of a variable.
          batch_dim_name: Mesh axis along which batches are cut; None for the
            first, as Keras has it.
          auto_shard_dataset: True: with several processes, each is fed whole
            batches and takes its part of them.
          init: As in `tlm.layout_map_scope`.
          **kwargs: `device_mesh`, of older programs: the layout map has it.

        Raises:
          TypeError: `layout_map` is no LayoutMap (also a ValueError, which
            Keras raises).
          ValueError: There is none, it has no mesh, `batch_dim_name` is no
            axis of it, or several processes are to be fed parts of batches.
        """
        kwargs.pop("device_mesh", None)
        if kwargs:
            raise TypeError(
                f"ModelParallel takes no arguments {sorted(kwargs)}.")
        if layout_map is None:
            raise ValueError("You must specify a layout_map argument.")
        if not isinstance(
                layout_map, (AnyLayoutMap, keras.distribution.LayoutMap)):
            raise LayoutTypeError(
                "Argument `layout_map` must be a `LayoutMap` instance. "
                f"Received: layout_map={layout_map!r}")
        super().__init__(layout_map, batch_dim_name, auto_shard_dataset, init)


class DataParallel(_ByLayoutMap, keras.distribution.DataParallel):
    """Weights replicated on all devices, batches cut among them.

    The counterpart of `keras.distribution.DataParallel`.

    ```python
    with tlm.distribution.DataParallel().scope():
        model = make_model()
    ```
    """

    def __init__(self, device_mesh: AnyMesh | None = None,
                 devices: list[str] | None = None,
                 auto_shard_dataset: bool = True):
        """Makes the distribution.

        Args:
          device_mesh: `DeviceMesh`, ours or Keras' (or `dtensor.Mesh`); its
            first axis cuts batches.
          devices: Or the devices, in one row; None for all of
            `list_devices()`.
          auto_shard_dataset: As in `ModelParallel`.

        Raises:
          TypeError: `device_mesh` is no mesh (also a ValueError, which Keras
            raises).
          ValueError: Both are given.
        """
        if device_mesh is not None and devices is not None:
            raise ValueError(
                "DataParallel takes `device_mesh` or `devices`, not both. "
                f"Received: device_mesh={device_mesh!r}, devices={devices!r}.")
        if device_mesh is None:
            row = np.ravel(list_devices() if devices is None else devices)
            device_mesh = DeviceMesh((row.size,), ["batch"], row)
        try:
            check_mesh("device_mesh", device_mesh)
        except TypeError as error:
            raise LayoutTypeError(
                "Expect `mesh` to be an instance of `DeviceMesh`. Received: "
                f"mesh={device_mesh!r} (of type {type(device_mesh)})"
            ) from error
        if (ndim := len(axis_sizes(device_mesh))) != 1:
            warnings.warn(
                "Expect the input mesh to be 1D, but received mesh.devices."
                f"ndim={ndim}. The first axis will be used for data-parallel "
                "sharding.", stacklevel=2)
        # From the host: all replicas, and a model without a mesh, start with
        # the same bits.
        super().__init__(
            LayoutMap(device_mesh), None, auto_shard_dataset, init="host")
