"""Data and model parallelism as keras.distribution names them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap import _checks, _deprecated
from tf_layoutmap.distribution import state
from tf_layoutmap.distribution.layout_map import LayoutMap
from tf_layoutmap.layout.layout_map import LayoutMap as AnyLayoutMap
from tf_layoutmap.layout.layout_map_scope import (
    layout_map_scope,
    prepared_context,
)
from tf_layoutmap.layout.mesh.device_mesh import (
    AnyMesh,
    DeviceMesh,
    list_devices,
    to_dtensor_mesh,
)
from tf_layoutmap.layout.mesh.layouts import Layout, Mesh, axes_of_layout
from tf_layoutmap.layout.mesh.tensor_layout import TensorLayout

dtensor = tf.experimental.dtensor


class ModelParallel:
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

    def __init__(self, *, layout_map: AnyLayoutMap,
                 batch_dim_name: str | None = None,
                 auto_shard_dataset: bool = True, init: str = "sharded"):
        """Makes the distribution.

        Args:
          layout_map: `tlm.distribution.LayoutMap` or `tlm.LayoutMap`.
          batch_dim_name: Mesh axis along which batches are cut; None for the
            first, as Keras has it.
          auto_shard_dataset: True: with several processes, each is fed whole
            batches and takes its part of them.
          init: As in `tlm.layout_map_scope`.

        Raises:
          TypeError: `layout_map` is no LayoutMap of ours.
          ValueError: It has no mesh, `batch_dim_name` is no axis of it, or
            several processes are to be fed parts of batches.
        """
        if isinstance(layout_map, keras.distribution.LayoutMap):
            raise TypeError(
                "Argument `layout_map` must be a tlm.distribution.LayoutMap. "
                "Received: a keras.distribution.LayoutMap, whose keys must "
                "match whole names where ours are searched in them. Fill one "
                "of ours: it takes the same keys, TensorLayouts and meshes.")
        _checks.check_type(
            "layout_map", layout_map, AnyLayoutMap, "a LayoutMap")
        if not auto_shard_dataset and dtensor.num_clients() > 1:
            raise ValueError(
                "Argument `auto_shard_dataset` must be True with several "
                "processes: each is fed whole batches and takes its part. "
                f"Received: False, in one of {dtensor.num_clients()}.")
        self._mesh = layout_map.mesh_in_use()
        names = list(self._mesh.dim_names)
        self._batch_dim_name = names[0] if batch_dim_name is None else (
            _checks.check_one_of("batch_dim_name", batch_dim_name, names))
        self._layout_map = layout_map
        self._auto_shard_dataset = bool(auto_shard_dataset)
        self._init = init

    @property
    def layout_map(self) -> AnyLayoutMap:
        """Where the layouts come from."""
        return self._layout_map

    @property
    def batch_dim_name(self) -> str:
        """The mesh axis along which batches are cut."""
        return self._batch_dim_name

    @property
    def device_mesh(self) -> Mesh:
        """The `dtensor.Mesh` of the weights."""
        return self._mesh

    @property
    def auto_shard_dataset(self) -> bool:
        """As given; see `__init__`."""
        return self._auto_shard_dataset

    @property
    def num_processes(self) -> int:
        """Processes of this program."""
        return dtensor.num_clients()

    @property
    def num_model_replicas(self) -> int:
        """Parts into which a batch is cut."""
        return self._mesh.dim_size(self._batch_dim_name)

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """Returns the layout of a batch of this shape."""
        return TensorLayout(
            (self._batch_dim_name, *[None] * (len(data_shape) - 1)),
            self._mesh)

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        """Returns the layout of a variable, or the one it would get here."""
        layout = getattr(variable, "layout", None)
        if isinstance(layout, Layout):
            return TensorLayout(axes_of_layout(layout), self._mesh)
        axes = self._axes_of(variable.path)
        return TensorLayout(
            (None,) * len(variable.shape) if axes is None else axes,
            self._mesh)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Returns what the layout map has for a name, or None."""
        axes = self._axes_of(path)
        return None if axes is None else TensorLayout(axes, self._mesh)

    def _axes_of(self, name: str) -> tuple[str | None, ...] | None:
        match = self._layout_map.find([name])
        return None if match is None else self._layout_map.axes_of(
            self._layout_map[match.pattern])

    def distribute_dataset(self, dataset: Any) -> Any:
        """Returns `dataset`: processes take their part of each batch."""
        return dataset

    def context(self) -> Any:
        """Returns what new models belong to; for `set_distribution`."""
        return prepared_context(self._layout_map, self._init,
                             self._batch_dim_name)

    home = _deprecated.renamed_method("home", "context")

    @contextlib.contextmanager
    def scope(self) -> Iterator[AnyLayoutMap]:
        """The scope under which models are made."""
        before = state.distribution()
        with layout_map_scope(
                self._layout_map, init=self._init,
                batch_dim=self._batch_dim_name) as layout_map:
            state.note(self)
            try:
                yield layout_map
            finally:
                state.note(before)


class DataParallel(ModelParallel):
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
          device_mesh: `DeviceMesh` (or `dtensor.Mesh`); its first axis cuts
            batches.
          devices: Or the devices, in one row; None for all of
            `list_devices()`.
          auto_shard_dataset: As in `ModelParallel`.

        Raises:
          TypeError: `device_mesh` is no mesh.
          ValueError: Both are given.
        """
        if device_mesh is not None and devices is not None:
            raise ValueError(
                "DataParallel takes `device_mesh` or `devices`, not both. "
                f"Received: device_mesh={device_mesh!r}, devices={devices!r}.")
        if device_mesh is None:
            row = np.ravel(list_devices() if devices is None else devices)
            device_mesh = DeviceMesh((row.size,), ("batch",), list(row))
        # From the host: all replicas, and a model without a mesh, start with
        # the same bits.
        super().__init__(layout_map=LayoutMap(to_dtensor_mesh(device_mesh)),
                         auto_shard_dataset=auto_shard_dataset, init="host")
