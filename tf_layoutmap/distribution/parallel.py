"""Data and model parallelism as keras.distribution names them."""

import warnings
from typing import Any

import keras
import numpy as np

from tf_layoutmap.distribution.by_layout_map import ByLayoutMap
from tf_layoutmap.distribution.device_mesh import DeviceMesh
from tf_layoutmap.distribution.layout_map import LayoutMap
from tf_layoutmap.layout.layout_map import LayoutMap as AnyLayoutMap
from tf_layoutmap.layout.mesh.device_mesh import (
    AnyMesh,
    axis_sizes,
    check_mesh,
    list_devices,
)
from tf_layoutmap.layout.plan.layout_table import LayoutTypeError


class ModelParallel(ByLayoutMap, keras.distribution.ModelParallel):
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

    def __init__(
        self,
        *,
        layout_map: AnyLayoutMap | keras.distribution.LayoutMap | None = None,
        batch_dim_name: str | None = None,
        auto_shard_dataset: bool = True,
        init: str = "sharded",
        **kwargs: Any,
    ):
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
                f"ModelParallel takes no arguments {sorted(kwargs)}."
            )
        if layout_map is None:
            raise ValueError("You must specify a layout_map argument.")
        if not isinstance(
            layout_map, (AnyLayoutMap, keras.distribution.LayoutMap)
        ):
            raise LayoutTypeError(
                "Argument `layout_map` must be a `LayoutMap` instance. "
                f"Received: layout_map={layout_map!r}"
            )
        super().__init__(layout_map, batch_dim_name, auto_shard_dataset, init)


class DataParallel(ByLayoutMap, keras.distribution.DataParallel):
    """Weights replicated on all devices, batches cut among them.

    The counterpart of `keras.distribution.DataParallel`.

    ```python
    with tlm.distribution.DataParallel().scope():
        model = make_model()
    ```
    """

    def __init__(
        self,
        device_mesh: AnyMesh | None = None,
        devices: list[str] | None = None,
        auto_shard_dataset: bool = True,
    ):
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
                f"Received: device_mesh={device_mesh!r}, devices={devices!r}."
            )
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
                "sharding.",
                stacklevel=2,
            )
        # From the host: all replicas, and a model without a mesh, start with
        # the same bits.
        super().__init__(
            LayoutMap(device_mesh), None, auto_shard_dataset, init="host"
        )
