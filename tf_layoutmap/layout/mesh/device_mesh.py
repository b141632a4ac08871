"""A grid of devices with named axes, in the terms of keras.distribution."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.layout.mesh.layouts import Mesh

dtensor = tf.experimental.dtensor


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns the devices of one type, as `"cpu:0"`, `"cpu:1"`, ...

    Args:
      device_type: `"cpu"`, `"gpu"` or `"tpu"`; None for the accelerators if
        there are any, else the CPUs.

    Returns:
      The logical devices of TensorFlow; with several clients, those of all.

    Raises:
      TypeError: `device_type` is no string.
      ValueError: It is none of the three.
    """
    if device_type is None:
        for kind in ("tpu", "gpu"):
            if found := list_devices(kind):
                return found
        return list_devices("cpu")
    _checks.check_type("device_type", device_type, str, "a string or None")
    kind = _checks.check_one_of(
        "device_type", device_type.lower(), ("cpu", "gpu", "tpu"))
    return [f"{kind}:{device.name.split(':')[-1]}"
            for device in tf.config.list_logical_devices(kind.upper())]


class DevicesInAGrid(Protocol):
    """What a `DeviceMesh` has, ours or that of `keras.distribution`."""

    @property
    def shape(self) -> Any:
        """Devices along each axis."""
        ...

    @property
    def axis_names(self) -> Any:
        """The name of each axis."""
        ...

    @property
    def devices(self) -> Any:
        """The device names."""
        ...


# For signatures: what `to_dtensor_mesh` takes.
AnyMesh = DevicesInAGrid | Mesh


class DeviceMesh:
    """Devices in a grid, each axis with a name.

    Aligned with `tf.experimental.dtensor.Mesh`, which `to_dtensor` returns.

    ```python
    mesh = tlm.distribution.DeviceMesh(
        (2, 2), ("batch", "model"),
        devices=["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
    ```
    """

    def __init__(self, shape: Sequence[int], axis_names: Sequence[str],
                 devices: Sequence[str] | np.ndarray | None = None):
        """Makes the mesh.

        Args:
          shape: Devices along each axis, each at least 1.
          axis_names: A name per axis, no two alike.
          devices: `math.prod(shape)` device names such as `"cpu:0"`, in the
            order of the grid; None for all of `list_devices()`.

        Raises:
          TypeError: A size is no integer or a name no string.
          ValueError: A size below 1, names that repeat or whose number is not
            that of the axes, or another number of devices than the grid has.
        """
        shape = tuple(_checks.check_int("shape", size, lowest=1)
                      for size in shape)
        names = tuple(_checks.check_type(
            "axis_names", name, str, "strings") for name in axis_names)
        if not shape or len(shape) != len(names):
            raise ValueError(
                "A DeviceMesh needs one axis name for each axis of `shape`, "
                f"at least one. Received: shape={shape}, axis_names={names}.")
        if len(set(names)) < len(names):
            raise ValueError(_checks.message(
                "axis_names", "different from each other", names))
        if dtensor.UNSHARDED in names:
            raise ValueError(_checks.message(
                "axis_names", f"other than {dtensor.UNSHARDED!r}, DTensor's "
                "word for no axis", names))
        found = np.array(
            list_devices() if devices is None else devices, dtype=object)
        if found.size != math.prod(shape):
            raise ValueError(
                f"A DeviceMesh of shape {shape} has {math.prod(shape)} "
                f"devices. Received: {found.size} devices "
                f"({', '.join(map(str, found.flat))}). For more devices of "
                "one CPU see "
                "tf.config.set_logical_device_configuration.")
        self._shape = shape
        self._axis_names = names
        self._devices = found.reshape(shape)
        self._dtensor: Mesh | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return self._shape

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The name of each axis."""
        return self._axis_names

    @property
    def devices(self) -> np.ndarray:
        """The device names, as an array of `shape`."""
        return self._devices

    @property
    def backend_mesh(self) -> Mesh:
        """The `dtensor.Mesh`, by keras.distribution's name."""
        return self.to_dtensor()

    def to_dtensor(self) -> Mesh:
        """Returns the `tf.experimental.dtensor.Mesh` of these devices."""
        mesh = self._dtensor
        if mesh is None:
            dims = list(zip(self._axis_names, self._shape))
            names = [str(device).upper() for device in self._devices.flat]
            if dtensor.num_clients() > 1:
                mesh = dtensor.create_distributed_mesh(
                    dims, device_type=names[0].split(":")[0])
            else:
                mesh = dtensor.create_mesh(dims, devices=names)
            self._dtensor = mesh
        return mesh

    def __repr__(self) -> str:
        return (f"DeviceMesh(shape={self._shape}, "
                f"axis_names={self._axis_names})")


def to_dtensor_mesh(mesh: AnyMesh) -> Mesh:
    """Returns a DeviceMesh of ours or of Keras, or a Mesh, as a Mesh.

    Raises:
      TypeError: It is none of them.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        shape, names, devices = [
            getattr(mesh, name, None)
            for name in ("shape", "axis_names", "devices")]
        if shape is None or names is None or devices is None:
            raise TypeError(_checks.message(
                "device_mesh", "a DeviceMesh or a dtensor.Mesh", mesh))
        mesh = DeviceMesh(shape, names, np.ravel(devices))
    return mesh.to_dtensor()
