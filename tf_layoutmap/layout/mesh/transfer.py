"""Host values to tensors on a mesh and back, shard by shard.

No device ever holds more than its own shard on the way.
"""

# DOC-MERGE: Batches and tensors from the host to a mesh, and results back.
# DOC-MERGE: `dtensor.DTensorDataset`: every batch once, and a mesh that works afterwards.
#
# Two things are wrong with it in TensorFlow 2.21, on the CPU at least.
#
# * It divides the number of all devices of a kind, not of those on its mesh, by
#   what each of its replicas has here, and takes the quotient for a number of
#   clients. On four of eight devices it repeats each batch for a second client
#   that is not there, without an error.
# * The end of the data is an error inside each device's thread. It stays there:
#   every later operation on a mesh fails with "Function was cancelled".
#
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import errors, pinning, shard_shapes
from tf_layoutmap.layout.mesh.device_mesh import (
    Layout,
    Mesh,
    axes_of_layout,
    is_registered,
    mesh_sizes,
    prepare_process,
)
from tf_layoutmap.layout.mesh.pinning import on_mesh

dtensor = tf.experimental.dtensor


def slices_of_devices(shape: Any, layout: Layout) -> list[tuple[slice, ...]]:
    """Returns what each local device holds of a tensor of `shape`."""
    axes, sizes = axes_of_layout(layout), mesh_sizes(layout.mesh)
    return [
        shard_shapes.shard_slices(axes, shape, sizes, location)
        for location in layout.mesh.local_device_locations()
    ]


class Shard(NamedTuple):
    """One part of a tensor, and which local devices hold it.

    Attributes:
      slices: Where the part is, one slice for each dimension.
      devices: Positions in `mesh.local_devices()`, ascending.
    """

    slices: tuple[slice, ...]
    devices: list[int]

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The start and end in each dimension."""
        return tuple((s.start, s.stop) for s in self.slices)


def unique_shards(shape: Any, layout: Layout) -> list[Shard]:
    """Returns the parts that local devices hold, each of them once.

    Args:
      shape: Of the whole tensor; `layout` fits it.
      layout: `dtensor.Layout`. Its replicas hold the same part.

    Returns:
      In the order of the first device of each.
    """
    found: dict[tuple, Shard] = {}
    for device, slices in enumerate(slices_of_devices(shape, layout)):
        shard = Shard(slices, [])
        found.setdefault(shard.bounds, shard).devices.append(device)
    return list(found.values())


def packed(shards: list[Shard], parts: Iterable[Any], layout: Layout) -> Any:
    """Returns the tensor on a mesh that has these parts.

    Args:
      shards: From `unique_shards`.
      parts: The value of each shard. Those with fewer rows get padding.
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
    """A part with zeros for the rows that it lacks."""
    shape = tuple(part.shape)
    if not shape or shape[0] == num_rows:
        return part
    padding = [(0, num_rows - shape[0]), *((0, 0) for _ in shape[1:])]
    if not tf.is_tensor(part):
        return np.pad(part, padding)
    with tf.device(part.device):
        return tf.pad(part, padding)


def to_mesh(value: Any, layout: Layout) -> Any:
    """Returns a value as a tensor on a mesh, with a layout.

    Args:
      value: numpy array, eager tensor, or eager tensor on this or another
        mesh, which then comes over the host: TensorFlow's `copy_to_mesh` cuts
        off what is sharded.
      layout: `dtensor.Layout` wanted.

    Returns:
      An eager DTensor; its components are copies.

    Raises:
      ValueError: `layout` does not fit the shape.
    """
    prepare_process(layout.mesh)
    if on_mesh(value):
        if dtensor.fetch_layout(value) == layout:
            return value
        value = to_host(value)
    tensor = value if tf.is_tensor(value) else np.asarray(value)
    check_fits(layout, tensor.shape)
    return padded_to_mesh(tensor, layout)


def padded_to_mesh(value: Any, layout: Layout) -> Any:
    """Returns a value from the host as a tensor on a mesh.

    Where the mesh does not divide its rows, rows of zeros follow them.

    Args:
      value: numpy array or eager tensor.
      layout: `dtensor.Layout` wanted; it fits the padded shape.
    """
    prepare_process(layout.mesh)
    tensor = value if tf.is_tensor(value) else np.asarray(value)
    shards = unique_shards(tensor.shape, layout)
    return packed(
        shards, (_part(tensor, shard.slices) for shard in shards), layout
    )


def check_fits(layout: Layout, shape: Any) -> None:
    """Raises a ValueError if no tensor of `shape` can have `layout`."""
    axes, shape = axes_of_layout(layout), tuple(shape)
    problems = shard_shapes.fit_problems(axes, shape, mesh_sizes(layout.mesh))
    if problems:
        raise ValueError(
            f"Layout {axes} does not fit a tensor of shape {shape}: "
            f"{'; '.join(problems)}."
        )


def _part(tensor: Any, slices: tuple[slice, ...]) -> Any:
    if not tf.is_tensor(tensor):
        # A copy: TensorFlow may keep a numpy array instead of copying it.
        return np.array(tensor[slices], order="C")
    # Where the tensor is: the caller may be inside `default_mesh`.
    with tf.device(tensor.device):
        return tensor[slices]


def to_host(tensor: Any) -> np.ndarray:
    """Returns the whole value of an eager DTensor or variable as an array.

    With several clients this is a collective: all must call it.
    """
    prepare_process()
    shape = tuple(tensor.shape)
    if isinstance(tensor, tf.Variable):
        tensor = read_divided(tensor)
    layout = dtensor.fetch_layout(tensor)
    with errors.errors_once(layout.mesh):
        return _to_host(tensor, layout, shape)


def numpy_of(original: Callable[[Any], Any], tensor: Any) -> Any:
    """Returns the value of an eager tensor; gathers it if it is sharded.

    Args:
      original: Reads a tensor that one device, or each device, holds in full.
      tensor: An eager tensor.
    """
    try:
        return original(tensor)
    except tf.errors.UnimplementedError:
        # TensorFlow reads tensors to make constants of functions, too, and
        # captures what cannot be read.
        if (
            not tf.executing_eagerly()
            or not on_mesh(tensor)
            or (dtensor.fetch_layout(tensor).is_fully_replicated())
        ):
            raise
    return to_host(tensor)


def read_divided(variable: Any) -> Any:
    """Returns the DTensor of a variable, with the padding that it may have."""
    read = getattr(variable, "read_divided", variable.read_value)
    return read()


def _to_host(tensor: Any, layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    mesh = layout.mesh
    if layout.is_fully_replicated():
        return _array(dtensor.unpack(tensor)[0])
    if mesh.num_local_devices() < mesh.size:
        whole = dtensor.relayout(
            tensor, dtensor.Layout.replicated(mesh, layout.rank)
        )
        return _array(dtensor.unpack(whole)[0])
    parts = dtensor.unpack(tensor)
    out = np.empty(shape, tensor.dtype.as_numpy_dtype)
    for shard in unique_shards(shape, layout):
        part = out[shard.slices]
        part[...] = parts[shard.devices[0]].numpy()[: len(part)]
    return out


def _array(tensor: Any) -> np.ndarray:
    # A scalar's numpy() is no array; this one is a copy, too.
    return np.array(tensor.numpy(), tensor.dtype.as_numpy_dtype)


def layout_of_batch(shape: Any, mesh: Mesh, batch_dim: str | None) -> Layout:
    """Returns the layout of a tensor of a batch on `mesh`.

    Cut along `batch_dim`; replicated if its first dimension does not divide,
    or without a `batch_dim`.
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
    """Returns one tensor of a batch on `mesh`, cut along `batch_dim`.

    Replicated if its first dimension does not divide, or without a
    `batch_dim`, as are strings. What is on a mesh already, and None, stays.

    Raises:
      TypeError: It is a sparse or ragged tensor.
    """
    if x is None or pinning.on_mesh(x):
        return x
    if isinstance(x, tf.SparseTensor | tf.RaggedTensor):
        raise TypeError(
            "A batch for a model on a mesh is made of dense tensors. "
            f"Received: {type(x).__name__} of shape {x.shape}. Use "
            "`.to_tensor()` or tf.sparse.to_dense."
        )
    if not tf.is_tensor(x):
        x = np.asarray(x)
    if tf.as_dtype(x.dtype) == tf.string and dtensor.num_clients() == 1:
        # Devices could not exchange parts of it.
        batch_dim = None
    return to_mesh(x, layout_of_batch(x.shape, mesh, batch_dim))


def to_host_tensor(x: Any) -> Any:
    """Returns `x`, from a mesh to the host if it is on one."""
    if not pinning.on_mesh(x):
        return x
    if dtensor.fetch_layout(x).is_fully_replicated():
        return dtensor.unpack(x)[0]
    with tf.device("CPU:0"):
        return tf.constant(to_host(x))


def is_host_value(x: Any) -> bool:
    """Whether `x` is an array or a tensor that is not on a mesh."""
    return isinstance(x, np.ndarray) or (
        isinstance(x, tf.Tensor) and not pinning.on_mesh(x)
    )


def to_replicated(x: Any, mesh: Mesh) -> Any:
    """Returns a host value as a tensor on `mesh`, whole everywhere."""
    if not is_host_value(x):
        return x
    # copy_to_mesh and not pack: gradients flow through it. From the host to
    # a replicated layout is the case it copies whole.
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
    """Returns a tensor on a mesh so that `numpy()` can read it."""
    if not pinning.on_mesh(x):
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
    """Returns an iterator over batches, each of which comes once."""
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
    """Returns the next batch; the devices are never asked for one too many.

    Raises:
      StopIteration: There is no further batch.
      RuntimeError: The same, where the number of batches was not known.
    """
    left = getattr(iterator, "_num_batches_left", None)
    if left is None or not tf.executing_eagerly():
        # A function may take any number of batches.
        iterator._num_batches_left = None
        return original(iterator)
    if left == 0:
        raise StopIteration
    try:
        batch = original(iterator)
    except (StopIteration, tf.errors.CancelledError) as error:
        # Which of the two comes depends on which device is asked first.
        if left > 0 and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(
            "The data of a DTensorDataset of unknown length ended, after "
            "which TensorFlow runs nothing more on these devices. State the "
            "length, before the DTensorDataset is made, with dataset.apply("
            "tf.data.experimental.assert_cardinality(n)), or take no more "
            "steps than there are batches (`steps_per_epoch`, `epochs=1`)."
        ) from None
    if left > 0:
        iterator._num_batches_left = left - 1
    return batch
