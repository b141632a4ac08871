"""Data and model parallelism as keras.distribution names them."""

from typing import Any

import numpy as np

from tf_layoutmap import _checks
from tf_layoutmap.distribution.layout_map import LayoutMap
from tf_layoutmap.layout.device_mesh import (
    DeviceMesh,
    list_devices,
    to_dtensor_mesh,
)
from tf_layoutmap.layout.layout_map import LayoutMap as AnyLayoutMap
from tf_layoutmap.layout.layout_map_scope import layout_map_scope


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
                 batch_dim_name: str | None = None, init: str = "sharded"):
        """Makes the distribution.

        Args:
          layout_map: `tlm.distribution.LayoutMap` or `tlm.LayoutMap`.
          batch_dim_name: Mesh axis along which batches are cut; None for the
            first, as Keras has it.
          init: As in `tlm.layout_map_scope`.

        Raises:
          TypeError: `layout_map` is no LayoutMap.
          ValueError: It has no mesh, or `batch_dim_name` is no axis of it.
        """
        _checks.check_type(
            "layout_map", layout_map, AnyLayoutMap, "a LayoutMap")
        self._mesh = layout_map.mesh_in_use()
        names = list(self._mesh.dim_names)
        self._batch_dim_name = names[0] if batch_dim_name is None else (
            _checks.check_one_of("batch_dim_name", batch_dim_name, names))
        self._layout_map = layout_map
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
    def device_mesh(self) -> Any:
        """The `dtensor.Mesh` of the weights."""
        return self._mesh

    def scope(self) -> Any:
        """Returns the scope under which models are made."""
        return layout_map_scope(
            self._layout_map, init=self._init, batch_dim=self._batch_dim_name)


class DataParallel(ModelParallel):
    """Weights replicated on all devices, batches cut among them.

    The counterpart of `keras.distribution.DataParallel`.

    ```python
    with tlm.distribution.DataParallel().scope():
        model = make_model()
    ```
    """

    def __init__(self, device_mesh: Any = None,
                 devices: list[str] | None = None):
        """Makes the distribution.

        Args:
          device_mesh: `DeviceMesh` (or `dtensor.Mesh`); its first axis cuts
            batches.
          devices: Or the devices, in one row; None for all of
            `list_devices()`.

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
                         init="host")
