"""Devices by name, and a grid of them as a `dtensor.Mesh`."""

# DOC-MERGE: What a layout says of each dimension, and a mesh of each axis.
#
# And which meshes are ours: DTensor is corrected on those only.
#
# DOC-MERGE: Makes a process ready for a mesh, before DTensor is used.
import math
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, dtensor_ops, tf_private
from tf_layoutmap._patches import engine

dtensor = tf.experimental.dtensor

# For signatures.
if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import Layout, Mesh
else:
    Mesh = dtensor.Mesh
    Layout = dtensor.Layout

# The meshes that programs have passed to this package. A mesh is a value, so
# an equal one, as `dtensor.fetch_layout` returns it, is the same mesh.
_own: set[str] = set()


def register_mesh(mesh: Mesh) -> None:
    """Records that a program passes `mesh` to this package."""
    _own.add(mesh.to_string())
    if mesh.device_type() != "CPU":
        # Its datasets and checkpoints are on the hosts of its devices.
        _own.add(mesh.host_mesh().to_string())


def is_registered(mesh: Mesh) -> bool:
    """Whether `mesh` was passed to this package.

    On other meshes, programs that use DTensor alone get TensorFlow's results
    and errors.
    """
    return mesh.to_string() in _own


def axes_of_layout(layout: Layout) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dimension, None where it is whole."""
    return tuple(
        None if spec == dtensor.UNSHARDED else spec
        for spec in layout.sharding_specs
    )


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Returns the size of each axis of a `dtensor.Mesh`."""
    return {name: mesh.dim_size(name) for name in mesh.dim_names}


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
    checks.check_type("device_type", device_type, str, "a string or None")
    kind = checks.check_one_of(
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
        checks.check_int("shape", size, lowest=1)
    for name in axis_names:
        checks.check_type("axis_names", name, str, "strings")
    if len(shape) != len(axis_names):
        raise ValueError(
            "Shape and axis_names should have same size: a DeviceMesh needs "
            f"one axis name for each axis of `shape`. {received}"
        )
    if len(set(axis_names)) < len(axis_names):
        raise ValueError(
            checks.message(
                "axis_names", "different from each other", axis_names
            )
        )
    if dtensor.UNSHARDED in axis_names:
        raise ValueError(
            checks.message(
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
        register_mesh(mesh)
        return mesh
    made = _meshes.get(check_mesh("device_mesh", mesh))
    if made is None:
        devices = np.asarray(mesh.devices)
        check_grid(mesh.shape, mesh.axis_names, devices)
        made = _meshes[mesh] = _make(mesh.shape, mesh.axis_names, devices)
        register_mesh(made)
    return made


def check_mesh(argument: str, mesh: Any) -> Any:
    """Returns `mesh` if `to_dtensor_mesh` takes it, else a TypeError."""
    if isinstance(mesh, Mesh) or all(
        hasattr(mesh, name) for name in ("shape", "axis_names", "devices")
    ):
        return mesh
    raise TypeError(
        checks.message(argument, "a DeviceMesh or a dtensor.Mesh", mesh)
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


def prepare_process(mesh: Mesh | None = None) -> None:
    """Replaces what DTensor needs replaced, the first time it is called.

    Called wherever a mesh, layout map or tensor on a mesh of ours is made:
    the device of DTensor should be made after it.

    Args:
      mesh: The mesh that the program passes to this package: DTensor is
        corrected there. None if it is not known yet.
    """
    if mesh is not None:
        register_mesh(mesh)
    if engine.is_installed("mesh"):
        return
    if tf_private.has_dtensor_device():
        warnings.warn(
            "DTensor was used in this process before tf_layoutmap, so that its "
            "device keeps errors of operations in queues; an error of a step "
            "can then end the process. Make the tlm.LayoutMap, or call "
            "tlm.layout.to_mesh, before the first operation of "
            "tf.experimental.dtensor.",
            stacklevel=3,
        )
    engine.ensure("mesh")
    engine.ensure("checkpoints")
    engine.ensure("memory")
    if dtensor_ops.available():
        dtensor_ops.enable_missing_ops()
