"""Transfers between host values and tensors on a mesh, shard by shard.

During a transfer no device holds more than its shard. `to_mesh` and `to_host`
transfer one tensor. `to_batch` transfers one tensor of a batch to the mesh.

`iterate` and `get_next` correct two defects of `dtensor.DTensorDataset` in
TensorFlow 2.21, at least on the CPU:

* `DTensorDataset` computes the number of clients from the number of all devices
  instead of the number of devices in the mesh. If a mesh uses four of eight
  devices, each batch is repeated for a second client, which does not exist. No
  error is raised.
* At the end of the data, an error occurs in the thread of each device and is
  not removed. Every later operation on a mesh fails with "Function was
  cancelled".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.layout.mesh import errors, shard_shapes, tracing
from tf_layoutmap.layout.mesh.device_mesh import (
    Layout,
    Mesh,
    axes_of_layout,
    check_devices,
    is_registered,
    mesh_sizes,
    prepare_process,
)
from tf_layoutmap.layout.mesh.tracing import on_mesh, on_registered_mesh

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TensorLike

dtensor = tf.experimental.dtensor


def slices_of_devices(shape: Any, layout: Layout) -> list[tuple[slice, ...]]:
    """Returns the slices that each local device holds of a tensor."""
    axes, sizes = axes_of_layout(layout), mesh_sizes(layout.mesh)
    return [
        shard_shapes.shard_slices(axes, shape, sizes, location)
        for location in layout.mesh.local_device_locations()
    ]


class Shard(NamedTuple):
    """One shard of a tensor, and the local devices that hold it.

    Attributes:
      slices: Position of the shard, one slice per dimension.
      devices: Indices into `mesh.local_devices()`, ascending.
    """

    slices: tuple[slice, ...]
    devices: list[int]

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The start and end in each dimension."""
        return tuple((s.start, s.stop) for s in self.slices)


def unique_shards(shape: Any, layout: Layout) -> list[Shard]:
    """Returns the distinct shards on the local devices.

    Args:
      shape: Shape of the unsharded tensor; `layout` must fit it.
      layout: `dtensor.Layout`. Replicas hold the same shard.

    Returns:
      The shards, ordered by their first device.
    """
    unique: dict[tuple, Shard] = {}
    for device, slices in enumerate(slices_of_devices(shape, layout)):
        shard = Shard(slices, [])
        unique.setdefault(shard.bounds, shard).devices.append(device)
    return list(unique.values())


def packed(shards: list[Shard], parts: Iterable[Any], layout: Layout) -> Any:
    """Returns a tensor on a mesh that consists of the given shards.

    Args:
      shards: Result of `unique_shards`.
      parts: Value of each shard. Shorter shards are padded with rows of zeros.
      layout: `dtensor.Layout` of the result.
    """
    size = max(
        (
            shard.slices[0].stop - shard.slices[0].start
            for shard in shards
            if shard.slices
        ),
        default=0,
    )
    part_of = {
        device: _padded(part, size)
        for shard, part in zip(shards, parts)
        for device in shard.devices
    }
    return dtensor.pack([part_of[i] for i in range(len(part_of))], layout)


def _padded(part: Any, num_rows: int) -> Any:
    """Returns `part` padded with rows of zeros to `num_rows` rows."""
    shape = tuple(part.shape)
    if not shape or shape[0] == num_rows:
        return part
    padding = [(0, num_rows - shape[0]), *((0, 0) for _ in shape[1:])]
    if not tf.is_tensor(part):
        return np.pad(part, padding)
    with tf.device(part.device):
        return tf.pad(part, padding)


class ToDTensor(Protocol):
    """A `tlm.distribution.TensorLayout`, which is defined above this module."""

    def to_dtensor(self) -> Layout:
        """Returns the `dtensor.Layout`."""
        ...


def to_mesh(value: TensorLike, layout: Layout | ToDTensor) -> tf.Tensor:
    """Copies a value to a mesh.

    Args:
      value: numpy array or eager tensor. A tensor on this or another mesh is
        copied through the host, because TensorFlow's `copy_to_mesh` truncates
        sharded tensors.
      layout: `tlm.distribution.TensorLayout` or `dtensor.Layout` of the result.

    Returns:
      An eager DTensor. The result shares no memory with `value`, unless `value`
      is on a mesh with the same layout and is returned unchanged.

    Raises:
      TypeError: If `layout` has another type.
      ValueError: If `layout` does not fit the shape.
    """
    target = _dtensor_layout(layout)
    prepare_process(target.mesh)
    if on_mesh(value):
        value = cast("tf.Tensor", value)
        if dtensor.fetch_layout(value) == target:
            return value
        value = to_host(value)
    tensor = (
        cast("tf.Tensor", value) if tf.is_tensor(value) else np.asarray(value)
    )
    check_fits(target, tensor.shape)
    return padded_to_mesh(tensor, target)


def _dtensor_layout(layout: Layout | ToDTensor) -> Layout:
    """Returns a layout of this package or of DTensor as a `dtensor.Layout`."""
    if hasattr(layout, "to_dtensor"):
        return cast("ToDTensor", layout).to_dtensor()
    return checks.check_type(
        "layout",
        layout,
        Layout,
        "a tlm.distribution.TensorLayout or a dtensor.Layout",
    )


def padded_to_mesh(value: Any, layout: Layout) -> Any:
    """Copies a host value to a mesh, padded if necessary.

    If the mesh does not divide the number of rows, rows of zeros are appended.

    Args:
      value: numpy array or eager tensor.
      layout: `dtensor.Layout` of the result. The layout must fit the padded
        shape.
    """
    check_devices(layout.mesh)
    prepare_process(layout.mesh)
    errors.complete_groups(layout.mesh)
    tensor = value if tf.is_tensor(value) else np.asarray(value)
    shards = unique_shards(tensor.shape, layout)
    return packed(
        shards, (_part(tensor, shard.slices) for shard in shards), layout
    )


def check_fits(layout: Layout, shape: Any) -> None:
    """Raises a `ValueError` if `layout` does not fit a tensor of `shape`."""
    axes, shape = axes_of_layout(layout), tuple(shape)
    problems = shard_shapes.fit_problems(axes, shape, mesh_sizes(layout.mesh))
    if problems:
        raise ValueError(
            f"Layout {axes} does not fit a tensor of shape {shape}: "
            f"{'; '.join(problems)}."
        )


def _part(tensor: Any, slices: tuple[slice, ...]) -> Any:
    if not tf.is_tensor(tensor):
        # The array is copied, because TensorFlow may reference it instead of
        # copying it.
        return np.array(tensor[slices], order="C")
    # The device is set explicitly, because the caller may be inside
    # `default_mesh`.
    with tf.device(tensor.device):
        return tensor[slices]


def to_host(tensor: tf.Tensor | tf.Variable) -> np.ndarray:
    """Returns the unsharded value of a DTensor or variable as an array.

    With several clients, this function is a collective operation that all
    clients must call.
    """
    prepare_process()
    shape = cast("tuple[int, ...]", tuple(tensor.shape))
    if isinstance(tensor, tf.Variable):
        tensor = read_divided(tensor)
    layout = dtensor.fetch_layout(tensor)
    with errors.errors_once(layout.mesh):
        return _to_host(tensor, layout, shape)


def numpy_of(original: Callable[[Any], Any], tensor: Any) -> Any:
    """Returns the value of an eager tensor; gathers a sharded tensor.

    For a sharded tensor on a mesh that was not passed to this package,
    DTensor's error is raised.

    Args:
      original: TensorFlow's function, which can read only tensors that are
        replicated or on one device.
      tensor: An eager tensor.
    """
    try:
        return original(tensor)
    except tf.errors.UnimplementedError:
        # TensorFlow also reads a tensor in order to create a constant in a
        # function. If the read raises an error, TensorFlow captures the tensor
        # instead.
        if (
            not tf.executing_eagerly()
            or not on_registered_mesh(tensor)
            or dtensor.fetch_layout(tensor).is_fully_replicated()
        ):
            raise
    return to_host(tensor)


def read_divided(variable: Any) -> Any:
    """Returns the sharded DTensor of a variable, including padding."""
    read = getattr(variable, "read_divided", variable.read_value)
    return read()


def _to_host(tensor: Any, layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    mesh = layout.mesh
    if layout.is_fully_replicated():
        return _array(dtensor.unpack(tensor)[0])
    if mesh.num_local_devices() < mesh.size:
        replicated = dtensor.relayout(
            tensor, dtensor.Layout.replicated(mesh, layout.rank)
        )
        return _array(dtensor.unpack(replicated)[0])
    parts = dtensor.unpack(tensor)
    out = np.empty(shape, tensor.dtype.as_numpy_dtype)
    for shard in unique_shards(shape, layout):
        part = out[shard.slices]
        part[...] = parts[shard.devices[0]].numpy()[: len(part)]
    return out


def _array(tensor: Any) -> np.ndarray:
    # `np.array` is called because `numpy()` of a scalar does not return an
    # array, and because the result must be a copy.
    return np.array(tensor.numpy(), tensor.dtype.as_numpy_dtype)


def layout_of_batch(shape: Any, mesh: Mesh, batch_dim: str | None) -> Layout:
    """Returns the layout of a tensor of a batch on `mesh`.

    The first dimension is sharded along `batch_dim`. The tensor is replicated
    if `batch_dim` is None or does not divide the first dimension.
    """
    rank = len(shape)
    if (
        batch_dim is not None
        and rank > 0
        and (shape[0] % mesh.dim_size(batch_dim) == 0)
    ):
        return dtensor.Layout.batch_sharded(mesh, batch_dim, rank)
    return dtensor.Layout.replicated(mesh, rank)


def to_batch(x: Any, mesh: Mesh, batch_dim: str | None) -> Any:
    """Returns one tensor of a batch on `mesh`, sharded along `batch_dim`.

    The tensor is replicated if it contains strings, or if `batch_dim` is None
    or does not divide the first dimension. None and tensors on a mesh are
    returned unchanged.

    Raises:
      TypeError: If `x` is a sparse or ragged tensor.
    """
    if x is None or tracing.on_mesh(x):
        return x
    if isinstance(x, tf.SparseTensor | tf.RaggedTensor):
        raise TypeError(
            "A batch for a model on a mesh must consist of dense tensors. "
            f"Received: {type(x).__name__} of shape {x.shape}. Use "
            "`.to_tensor()` or tf.sparse.to_dense."
        )
    if not tf.is_tensor(x):
        x = np.asarray(x)
    if tf.as_dtype(x.dtype) == tf.string and dtensor.num_clients() == 1:
        # Devices cannot exchange shards of strings.
        batch_dim = None
    return to_mesh(x, layout_of_batch(x.shape, mesh, batch_dim))


def to_host_tensor(x: Any) -> Any:
    """Returns `x`; a tensor on a mesh is copied to the host."""
    if not tracing.on_mesh(x):
        return x
    layout = dtensor.fetch_layout(x)
    if layout.is_fully_replicated():
        return dtensor.unpack(x)[0]
    axes = axes_of_layout(layout)
    sharded = [
        dim
        for dim, axis in enumerate(axes)
        if axis is not None and layout.mesh.dim_size(axis) > 1
    ]
    if (
        len(sharded) == 1
        and layout.mesh.device_type() == "CPU"
        and layout.mesh.num_local_devices() == layout.mesh.size
    ):
        # `to_host` would copy the shards to an array, and then the array.
        shards = sorted(
            unique_shards(x.shape, layout),
            key=lambda shard: shard.bounds[sharded[0]],
        )
        with errors.errors_once(layout.mesh), tf.device("CPU:0"):
            parts = dtensor.unpack(x)
            return tf.concat(
                [parts[shard.devices[0]] for shard in shards], sharded[0]
            )
    with tf.device("CPU:0"):
        return tf.constant(to_host(x))


def is_host_value(x: Any) -> bool:
    """Returns whether `x` is an array or a tensor that is not on a mesh."""
    return isinstance(x, np.ndarray) or (
        isinstance(x, tf.Tensor) and not tracing.on_mesh(x)
    )


def to_replicated(x: Any, mesh: Mesh) -> Any:
    """Returns a host value as a replicated tensor on `mesh`."""
    if not is_host_value(x):
        return x
    # `copy_to_mesh` is used because it propagates gradients, unlike `pack`. Its
    # result is correct because `x` is on the host and the layout is replicated.
    with tf.device("CPU:0"):
        tensor = tf.convert_to_tensor(x)
    moved = dtensor.copy_to_mesh(
        tensor, dtensor.Layout.replicated(mesh, tensor.shape.rank)
    )
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        moved._keras_mask = to_replicated(mask, mesh)
    return moved


def readable_tensor(x: Any) -> Any:
    """Returns a tensor that `numpy()` can read; replicates it on its mesh."""
    if not tracing.on_mesh(x):
        return x
    layout = dtensor.fetch_layout(x)
    if layout.is_fully_replicated():
        return x
    return dtensor.relayout(
        x, dtensor.Layout.replicated(layout.mesh, layout.rank)
    )


def iterate(
    original: Callable[[Any], Any],
    dataset: tf.experimental.dtensor.DTensorDataset,
) -> Any:
    """Returns an iterator that yields each batch exactly once.

    Args:
      original: The replaced `DTensorDataset.__iter__`.
      dataset: The dataset.
    """
    if not is_registered(dataset._mesh):
        return original(dataset)
    per_client = dataset._num_local_devices_per_replica
    clients = dataset._mesh.size // (dataset.num_global_replicas * per_client)
    dataset._num_clients_per_replica = clients
    dataset._partition_offset = (
        tf.experimental.dtensor.client_id() % clients * per_client
    )
    iterator = original(dataset)
    length = int(dataset._batched_dataset.cardinality())
    if length >= 0:
        length //= dataset.num_global_replicas
    iterator._num_batches_left = length
    return iterator


def get_next(original: Callable[[Any], Any], iterator: Any) -> Any:
    """Returns the next batch without reading past the last one.

    Args:
      original: The replaced method of the iterator.
      iterator: Iterator of a `DTensorDataset`.

    Raises:
      StopIteration: If there is no further batch.
      RuntimeError: If there is no further batch, and the number of batches was
        unknown.
    """
    left = getattr(iterator, "_num_batches_left", None)
    if left is None or not tf.executing_eagerly():
        # A traced function may read any number of batches, so the remaining
        # number is unknown.
        iterator._num_batches_left = None
        return original(iterator)
    if left == 0:
        raise StopIteration
    try:
        batch = original(iterator)
    except (StopIteration, tf.errors.CancelledError) as error:
        # The type of the error depends on the order in which the devices fail.
        if left > 0 and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(
            "A DTensorDataset of unknown length must not be read past its "
            "last batch, because TensorFlow cannot run further operations on "
            "its devices afterwards. Received: a request after the last "
            "batch. Set the length before the DTensorDataset is created, "
            "with dataset.apply("
            "tf.data.experimental.assert_cardinality(n)), or limit the number "
            "of steps to the number of batches (`steps_per_epoch`, "
            "`epochs=1`)."
        ) from None
    if left > 0:
        iterator._num_batches_left = left - 1
    return batch
