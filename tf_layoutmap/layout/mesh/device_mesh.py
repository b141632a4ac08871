"""Device names, device meshes, and the preparation of a process for DTensor.

If a program passes a mesh to this package, the mesh is registered. The package
corrects the behavior of DTensor only on registered meshes (`is_registered`).
`prepare_process` installs the corrections before DTensor is used.

`grappler_disabled` disables Grappler, TensorFlow's graph optimizer, for
functions on a mesh. DTensor creates a function for each device, and Grappler
optimizes each function separately. This optimization takes about a third of the
time of the first step (`docs/benchmarks.md`). The simplifications that make
later steps faster are in `layout/ops/simplifications.py`. In addition,
Grappler's cost model cannot infer the shapes of some matrix products and writes
"Incompatible Matrix dimensions" to stderr for each trace of a step.
"""

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from tf_layoutmap import process_end
from tf_layoutmap._core import (
    checks,
    dtensor_ops,
    patches,
    tf_private,
    user_warnings,
)
from tf_layoutmap.layout.mesh import collective_keys, cpu_threads

dtensor = tf.experimental.dtensor

# Types for signatures.
if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import Layout, Mesh
else:
    Mesh = dtensor.Mesh
    Layout = dtensor.Layout

# The meshes that programs have passed to this package. Meshes are compared by
# value, because `dtensor.fetch_layout` returns an equal copy.
_registered: set[str] = set()


def register_mesh(mesh: Mesh) -> None:
    """Registers a mesh that a program passes to this package."""
    _registered.add(mesh.to_string())
    if mesh.num_local_devices() < mesh.size:
        process_end.wait_for_group()
    if mesh.device_type() != "CPU":
        # The host mesh is also registered, because datasets and checkpoints use
        # it.
        _registered.add(mesh.host_mesh().to_string())


def is_registered(mesh: Mesh) -> bool:
    """Returns whether `mesh` was passed to this package.

    On meshes that are not registered, this package does not change the results
    and errors of TensorFlow.
    """
    return mesh.to_string() in _registered


def axes_of_layout(layout: Layout) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dimension; None if unsharded."""
    return tuple(
        None if spec == dtensor.UNSHARDED else spec
        for spec in layout.sharding_specs
    )


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Returns the size of each axis of a `dtensor.Mesh`."""
    return {name: mesh.dim_size(name) for name in mesh.dim_names}


# The `dtensor.Mesh` of each DeviceMesh, created on first use.
_meshes: "weakref.WeakKeyDictionary[Any, Mesh]" = weakref.WeakKeyDictionary()


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns the names of all devices of one type: `"cpu:0"`, `"cpu:1"`, ...

    Args:
      device_type: `"cpu"`, `"gpu"` or `"tpu"`. None selects TPUs, GPUs or
        CPUs, in this order of preference.

    Returns:
      The logical devices of TensorFlow. With several clients, the result
      contains the devices of all clients.

    Raises:
      TypeError: If `device_type` is not a string.
      ValueError: If `device_type` is a string but not one of these three.
    """
    if device_type is None:
        for kind in ("tpu", "gpu"):
            if devices := list_devices(kind):
                return devices
        return list_devices("cpu")
    checks.check_type("device_type", device_type, str, "a string or None")
    kind = checks.check_one_of(
        "device_type", device_type.lower(), ("cpu", "gpu", "tpu")
    )
    # The list of devices starts TensorFlow, which then creates its threads.
    cpu_threads.share_cores()
    return [
        f"{kind}:{device.name.split(':')[-1]}"
        for device in tf.config.list_logical_devices(kind.upper())
    ]


class DevicesInAGrid(Protocol):
    """A `DeviceMesh` of this package or of `keras.distribution`."""

    @property
    def shape(self) -> Any:
        """The number of devices along each axis."""
        ...

    @property
    def axis_names(self) -> Any:
        """The name of each axis."""
        ...

    @property
    def devices(self) -> Any:
        """The device names."""
        ...


# Types that `to_dtensor_mesh` accepts.
AnyMesh = DevicesInAGrid | Mesh


def check_grid(shape: Any, axis_names: Any, devices: Any) -> None:
    """Checks the arguments of a DeviceMesh.

    Each error message contains the message that keras.distribution raises in
    the same case.

    Args:
      shape: Number of devices along each axis.
      axis_names: Name of each axis.
      devices: Array of device names with `prod(shape)` elements.

    Raises:
      TypeError: If a size is not an integer or a name is not a string.
      ValueError: If a size is below 1, names are repeated, or the number of
        names or devices does not match `shape`.
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
                f"other than {dtensor.UNSHARDED!r}, which is reserved",
                axis_names,
            )
        )
    if devices.size != math.prod(shape):
        raise ValueError(
            "Shape does not match the number of devices: a DeviceMesh of "
            f"shape {tuple(shape)} has {math.prod(shape)} devices. Received: "
            f"{devices.size} devices ({', '.join(map(str, devices.flat))}). "
            "To split a CPU into several devices, use "
            "tf.config.set_logical_device_configuration."
        )


# The meshes whose devices exist, as strings. The devices of a process do not
# change after TensorFlow's first operation.
_with_devices: set[str] = set()


def check_devices(mesh: AnyMesh) -> None:
    """Checks that all devices of a mesh exist.

    A mesh can be created without its devices, for example to plan layouts. The
    function is called before tensors or variables are placed on the mesh.

    Args:
      mesh: `DeviceMesh` of this package or of Keras, or `dtensor.Mesh`. With
        several processes, nothing is checked.

    Raises:
      ValueError: If a device does not exist. The message starts with the
        message that Keras raises on JAX.
    """
    if dtensor.num_clients() > 1:
        return
    if isinstance(mesh, Mesh):
        if mesh.to_string() in _with_devices:
            return
        specs = [
            tf.DeviceSpec.from_string(device) for device in mesh.local_devices()
        ]
        names = [f"{spec.device_type}:{spec.device_index}" for spec in specs]
    else:
        names = [str(name) for name in np.ravel(mesh.devices)]
    names = [name.lower() for name in names]
    kinds = {name.partition(":")[0] for name in names} & {"cpu", "gpu", "tpu"}
    existing = [name for kind in sorted(kinds) for name in list_devices(kind)]
    missing = [name for name in names if name not in existing]
    if missing:
        raise ValueError(
            f"Device not found: {missing[0]}. All devices of a mesh must be in "
            f"tlm.distribution.list_devices(). Received: {names}, and "
            f"TensorFlow has {existing}. To split a CPU into several devices, "
            "call tf.config.set_logical_device_configuration at the start of "
            "the program."
        )
    if isinstance(mesh, Mesh):
        _with_devices.add(mesh.to_string())


def to_dtensor_mesh(mesh: AnyMesh) -> Mesh:
    """Converts a DeviceMesh to a `dtensor.Mesh` and registers it.

    Args:
      mesh: `DeviceMesh` of this package or of Keras, or `dtensor.Mesh`, which
        is returned unchanged.

    Raises:
      TypeError: If `mesh` has another type.
      ValueError: If the shape, names and devices of `mesh` do not match.
    """
    if isinstance(mesh, Mesh):
        register_mesh(mesh)
        return mesh
    result = _meshes.get(check_mesh("device_mesh", mesh))
    if result is None:
        devices = np.asarray(mesh.devices)
        check_grid(mesh.shape, mesh.axis_names, devices)
        result = _meshes[mesh] = _create_mesh(
            mesh.shape, mesh.axis_names, devices
        )
        register_mesh(result)
    return result


def check_mesh(argument: str, mesh: Any) -> Any:
    """Returns `mesh`; raises `TypeError` if it is not a mesh."""
    if isinstance(mesh, Mesh) or all(
        hasattr(mesh, name) for name in ("shape", "axis_names", "devices")
    ):
        return mesh
    raise TypeError(
        checks.message(argument, "a DeviceMesh or a dtensor.Mesh", mesh)
    )


def _create_mesh(
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
    """Returns the size of each axis without creating a `dtensor.Mesh`."""
    if isinstance(mesh, Mesh):
        return {name: mesh.dim_size(name) for name in mesh.dim_names}
    return dict(zip(mesh.axis_names, map(int, mesh.shape)))


def prepare_process(mesh: Mesh | None = None) -> None:
    """Installs the patches that meshes need, on the first call.

    The package calls this function whenever it creates a mesh, a layout map or
    a tensor on a mesh, because the patches must be installed before DTensor's
    device is created.

    Args:
      mesh: The mesh to register. None if the mesh is not known yet.
    """
    if mesh is not None:
        register_mesh(mesh)
    if patches.is_installed("mesh"):
        return
    cpu_threads.share_cores()
    if tf_private.has_dtensor_device():
        user_warnings.warn(
            "DTensor was used in this process before tf_layoutmap. Its device "
            "therefore queues errors of operations, and an error of a step "
            "can end the process. Create the tlm.LayoutMap, or call "
            "tlm.layout.to_mesh, before the first operation of "
            "tf.experimental.dtensor."
        )
    collective_keys.check_no_strategy_was_used()
    patches.ensure("mesh")
    patches.ensure("checkpoints")
    patches.ensure("memory")
    if dtensor_ops.available():
        dtensor_ops.enable_missing_ops()


_thread = threading.local()


@contextlib.contextmanager
def grappler_disabled() -> Iterator[None]:
    """Compiles functions that are called inside the context without Grappler.

    The function does not disable Grappler if user code has called
    `tf.config.optimizer.set_experimental_options`, because Grappler implements
    some of the options, such as `auto_mixed_precision`.
    """
    before = tf_private.function_call_options()
    if before is getattr(_thread, "without", None):
        yield
        return
    # TensorFlow creates one options object per configuration, so the object
    # identifies the configuration.
    if before is not getattr(_thread, "before", None):
        _thread.before = before
        _thread.without = (
            before
            if _is_configured()
            else tf_private.options_without_graph_optimizer(before)
        )
    tf_private.set_function_call_options(_thread.without)
    try:
        yield
    finally:
        # TensorFlow discards these options when its configuration changes.
        if tf_private.function_call_options() is _thread.without:
            tf_private.set_function_call_options(before)


def _is_configured() -> bool:
    return any(tf.config.optimizer.get_experimental_options().values())
