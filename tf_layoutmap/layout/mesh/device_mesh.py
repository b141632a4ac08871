"""Devices by name, and a grid of them as a `dtensor.Mesh`."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.layout.mesh.layouts import Mesh, claim

dtensor = tf.experimental.dtensor

# Of each grid its mesh, made when it is first asked for.
_meshes: "weakref.WeakKeyDictionary[Any, Mesh]" = weakref.WeakKeyDictionary()


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
        "device_type", device_type.lower(), ("cpu", "gpu", "tpu")
    )
    return [
        f"{kind}:{device.name.split(':')[-1]}"
        for device in tf.config.list_logical_devices(kind.upper())
    ]


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


def check_grid(shape: Any, axis_names: Any, devices: Any) -> None:
    """Refuses what is no grid, in the words of keras.distribution.

    Args:
      shape: Devices along each axis.
      axis_names: The name of each axis.
      devices: Array of as many device names as the grid has.

    Raises:
      TypeError: A size is no integer or a name no string.
      ValueError: A size below 1, names that repeat or whose number is not
        that of the axes, or another number of devices than the grid has.
    """
    received = f"Received: shape={shape}, axis_names={axis_names}"
    if len(shape) == 0 or len(axis_names) == 0:
        raise ValueError(
            "Shape and axis_names cannot be empty: a DeviceMesh needs at "
            f"least one axis. {received}"
        )
    for size in shape:
        _checks.check_int("shape", size, lowest=1)
    for name in axis_names:
        _checks.check_type("axis_names", name, str, "strings")
    if len(shape) != len(axis_names):
        raise ValueError(
            "Shape and axis_names should have same size: a DeviceMesh needs "
            f"one axis name for each axis of `shape`. {received}"
        )
    if len(set(axis_names)) < len(axis_names):
        raise ValueError(
            _checks.message(
                "axis_names", "different from each other", axis_names
            )
        )
    if dtensor.UNSHARDED in axis_names:
        raise ValueError(
            _checks.message(
                "axis_names",
                f"other than {dtensor.UNSHARDED!r}, DTensor's word for no axis",
                axis_names,
            )
        )
    if devices.size != math.prod(shape):
        raise ValueError(
            "Shape does not match the number of devices: a DeviceMesh of "
            f"shape {tuple(shape)} has {math.prod(shape)} devices. Received: "
            f"{devices.size} devices ({', '.join(map(str, devices.flat))}). "
            "For more devices of one CPU see "
            "tf.config.set_logical_device_configuration."
        )


def to_dtensor_mesh(mesh: AnyMesh) -> Mesh:
    """Returns a DeviceMesh of ours or of Keras, or a Mesh, as a Mesh.

    Raises:
      TypeError: It is none of them.
      ValueError: It is no grid of devices.
    """
    if isinstance(mesh, Mesh):
        claim(mesh)
        return mesh
    made = _meshes.get(check_mesh("device_mesh", mesh))
    if made is None:
        devices = np.asarray(mesh.devices)
        check_grid(mesh.shape, mesh.axis_names, devices)
        made = _meshes[mesh] = _make(mesh.shape, mesh.axis_names, devices)
        claim(made)
    return made


def check_mesh(argument: str, mesh: Any) -> Any:
    """Returns `mesh` if `to_dtensor_mesh` takes it, else a TypeError."""
    if isinstance(mesh, Mesh) or all(
        hasattr(mesh, name) for name in ("shape", "axis_names", "devices")
    ):
        return mesh
    raise TypeError(
        _checks.message(argument, "a DeviceMesh or a dtensor.Mesh", mesh)
    )


def _make(
    shape: Sequence[int], axis_names: Sequence[str], devices: np.ndarray
) -> Mesh:
    dims = list(zip(axis_names, map(int, shape)))
    names = [str(device).upper() for device in devices.flat]
    if dtensor.num_clients() > 1:
        return dtensor.create_distributed_mesh(
            dims, device_type=names[0].split(":")[0]
        )
    return dtensor.create_mesh(dims, devices=names)


def axis_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Returns the size of each axis; makes no mesh for it."""
    if isinstance(mesh, Mesh):
        return {name: mesh.dim_size(name) for name in mesh.dim_names}
    return dict(zip(mesh.axis_names, map(int, mesh.shape)))
