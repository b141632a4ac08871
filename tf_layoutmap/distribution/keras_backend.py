"""`enable`: implements Keras' own `keras.distribution` on TensorFlow.

Keras' objects and functions call a module of the backend. For TensorFlow, this
backend module is a prototype. The functions here replace the functions of the
backend module, and add the missing functions. New layers and variables get the
mesh of Keras' current distribution from the property `context_if_set`.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import distribution_notice, keras_private, patches
from tf_layoutmap.distribution import layout_map, parallel, processes
from tf_layoutmap.layout.keras3.context import context_of
from tf_layoutmap.layout.mesh import cpu_threads
from tf_layoutmap.layout.mesh import device_mesh as device_mesh_lib
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh
from tf_layoutmap.layout.processes import messages

dtensor = tf.experimental.dtensor

# The groups of replaced names: for models on a mesh, and for the functions of
# `keras.distribution`.
_MODELS = "keras3"
_FUNCTIONS = "keras_distribution"
# Attribute of a Keras distribution that holds its context.
_CONTEXT = "_tf_layoutmap_context"


def enable() -> None:
    """Makes `keras.distribution` shard models on the TensorFlow backend.

    Afterwards, `set_distribution`, `DeviceMesh`, `TensorLayout`, `LayoutMap`,
    `ModelParallel`, `DataParallel`, `distribute_tensor`, `list_devices`,
    `get_device_count` and `initialize` of `keras.distribution` behave as on
    JAX. Objects that were created before this call can also be used. Models
    must be created after this call and after `set_distribution`. The initial
    values of weights are bitwise identical to the values without a
    distribution. The function does nothing if it has been called before.

    ```python
    tlm.distribution.enable()

    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*d1/kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map))
    model = make_model()
    ```
    """
    if is_enabled():
        return
    cpu_threads.share_cores()
    patches.install(_MODELS)
    try:
        patches.install(_FUNCTIONS)
    except BaseException:
        patches.uninstall(_MODELS)
        raise
    distribution_notice.stop()


def disable() -> None:
    """Restores `keras.distribution`.

    Models that were created on a mesh keep their mesh. The names that these
    models require remain replaced. The function does nothing if
    `keras.distribution` is not enabled.
    """
    if not is_enabled():
        return
    patches.uninstall(_FUNCTIONS)
    patches.uninstall(_MODELS)
    distribution_notice.start()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Returns a scope in which `keras.distribution` is enabled.

    ```python
    with tlm.distribution.enabled():
        with keras.distribution.DataParallel().scope():
            model = make_model()
    ```
    """
    before = is_enabled()
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def is_enabled() -> bool:
    """Returns whether `keras.distribution` is enabled."""
    return patches.is_installed(_FUNCTIONS)


def as_property(original: Callable[..., Any], ours: Any) -> property:
    """Returns `ours` as a property."""
    del original
    return property(ours)


def context_if_set(original: Callable[..., Any], distribution: Any) -> Any:
    """Returns the context of models under a distribution of Keras.

    Raises:
      NotImplementedError: If `distribution` is a `Distribution` without
        layouts, as on JAX.
      ValueError: If a device of the mesh does not exist.
    """
    del original
    context = vars(distribution).get(_CONTEXT)
    if context is None:
        device_mesh_lib.check_devices(distribution.device_mesh)
        context = parallel.context_of_keras_distribution(distribution)
        vars(distribution)[_CONTEXT] = context
    return context


def with_checked_setter(original: property, ours: Any) -> property:
    """Returns the property `original` with `ours` as its setter."""
    return property(original.fget, ours, doc=original.__doc__)


def set_auto_shard_dataset(
    original: property, distribution: Any, value: bool
) -> None:
    """Sets `auto_shard_dataset` of a distribution of Keras.

    Raises:
      ValueError: If `value` is False with several processes.
    """
    parallel.check_feeding(value)
    assert original.fset is not None
    original.fset(distribution, value)


def list_devices(
    original: Callable[..., Any], device_type: str | None = None
) -> list[str]:
    """Returns the devices of one type; see `device_mesh.list_devices`.

    As on JAX, the devices of several processes have different numbers.
    """
    del original
    names = device_mesh_lib.list_devices(device_type)
    if dtensor.num_clients() == 1:
        return names
    return [
        f"{name.partition(':')[0]}:{index}" for index, name in enumerate(names)
    ]


def get_device_count(
    original: Callable[..., Any], device_type: str | None = None
) -> int:
    """Returns the number of devices of one type."""
    del original
    return processes.get_device_count(device_type)


def initialize(
    original: Callable[..., Any],
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Connects the processes of one program; see `processes.initialize`.

    As on JAX, all processes get the same random seed if the program has not
    called `keras.utils.set_random_seed`.
    """
    del original
    processes.initialize(job_addresses, num_processes, process_id)
    if dtensor.num_clients() > 1 and keras_private.random_seed() is None:
        seeds = messages.exchange(
            "seed", random.randrange(2**31), "in keras.distribution.initialize"
        )
        keras.utils.set_random_seed(seeds[0])


def num_processes(original: Callable[..., Any]) -> int:
    """Returns the number of processes of this program."""
    del original
    return dtensor.num_clients()


def process_id(original: Callable[..., Any]) -> int:
    """Returns the index of this process."""
    del original
    return dtensor.client_id()


def to_backend_mesh(original: Callable[..., Any], device_mesh: Any) -> Mesh:
    """Returns the `dtensor.Mesh` of a DeviceMesh."""
    del original
    device_mesh_lib.check_devices(device_mesh)
    return device_mesh_lib.to_dtensor_mesh(device_mesh)


def to_backend_layout(
    original: Callable[..., Any], tensor_layout: Any
) -> Layout:
    """Returns the `dtensor.Layout` of a TensorLayout."""
    del original
    return layout_map.to_dtensor_layout(tensor_layout)


def distribute_tensor(
    original: Callable[..., Any], tensor: Any, layout: Any
) -> Any:
    """Returns `tensor` with another layout.

    Keras also calls this function for the output of a layer whose path is a key
    of the layout map. An output that is not on the mesh is not changed. A batch
    that cannot be sharded evenly is replicated, as in `fit`.
    """
    del original
    layer = keras_private.calling_layer()
    if layer is not None:
        context = context_of(layer)
        if context is None:
            return tensor
        layout = _without_uneven_batch(tensor, layout, context.batch_dim)
    return layout_map.distribute_tensor(tensor, layout)


def _without_uneven_batch(
    tensor: Any, layout: Any, batch_dim: str | None
) -> Any:
    """Returns `layout`; unshards dimension 0 if the mesh does not divide it."""
    mesh = getattr(layout, "device_mesh", None)
    if mesh is None or batch_dim is None or not tensor.shape.rank:
        return layout
    axes, size = tuple(layout.axes), tensor.shape[0]
    if axes[:1] != (batch_dim,) or size is None:
        return layout
    if size % device_mesh_lib.axis_sizes(mesh)[batch_dim] == 0:
        return layout
    return layout_map.TensorLayout((None, *axes[1:]), mesh)


def init_dataset_adapter(
    original: Callable[..., Any],
    adapter: Any,
    dataset: Any,
    class_weight: Any = None,
    distribution: Any = None,
) -> None:
    """Creates an adapter that does not shard the dataset over processes."""
    if isinstance(distribution, keras_private.Distribution):
        distribution = None
    original(adapter, dataset, class_weight, distribution)


def init_py_dataset_adapter(
    original: Callable[..., Any], adapter: Any, *args: Any, **kwargs: Any
) -> None:
    """Creates an adapter that does not shard a `PyDataset` over processes."""
    with keras_private.without_distribution():
        original(adapter, *args, **kwargs)
