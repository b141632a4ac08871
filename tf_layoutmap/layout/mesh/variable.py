"""The `DVariable` of a weight, and how `tf.train.Checkpoint` saves it.

Checkpoints of TensorFlow write a DVariable with a DTensor op that does not
support slices. This module writes a variable as slices of one tensor. Each
slice is read from the device that holds it. In the checkpoint, the tensor is
unsharded. Therefore, a checkpoint can be restored on any mesh or without a
mesh. One checkpoint can contain both variables on a mesh and sharded tables.

In DTensor's documentation, checkpoints are saved with the option
`tf.train.CheckpointOptions(experimental_io_device=dtensor.device_name())`.
`save` and `restore` remove this option, because DTensor's device accepts only
tensors on a mesh, and the slices are on the host.

`PaddedVariable` holds a table whose number of rows the mesh does not divide.
The DTensor of this variable has rows of padding after the last row. Shapes,
reads, files and exports of the variable do not contain the padding.

`make` removes the variable name from handles. The name is an attribute of an
op, and DTensor compiles an op again for each set of attributes. With names, the
op would be compiled separately for each weight.

A layer can also hold a `tf.Variable` on the host that Keras does not track. An
op on a mesh can read such a variable correctly, but cannot write it correctly.
The reason is that every device runs the write. For example, four devices
increment a counter four times. Therefore, eager writes run on the host, and a
write in a function for a mesh raises an error.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import freed_gradients, slice_specs, tf_private
from tf_layoutmap.layout.mesh import device_mesh, errors, tracing, transfer
from tf_layoutmap.layout.mesh.atomic_step import AllOrNothingVariable
from tf_layoutmap.layout.mesh.tracing import ThreadValue

if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import DVariable

dtensor = tf.experimental.dtensor

# Whether this thread saves or restores with a `DTensorCheckpoint`.
_in_dtensor_checkpoint = ThreadValue(False)


def save(
    original: Callable,
    saver: Any,
    file_prefix: Any,
    checkpoint_number: Any = None,
    session: Any = None,
    options: Any = None,
) -> Any:
    """Saves a checkpoint; removes DTensor's I/O device if necessary."""
    with _tensors_for(saver):
        return original(
            saver,
            file_prefix,
            checkpoint_number,
            session,
            _options_for(saver, options),
        )


def restore(
    original: Callable, saver: Any, save_path: Any, options: Any = None
) -> Any:
    """Restores a checkpoint; removes DTensor's I/O device if necessary."""
    with _tensors_for(saver):
        return original(saver, save_path, _options_for(saver, options))


def are_slices() -> bool:
    """Returns whether this thread saves variables as slices.

    The result is False in two cases. If there are several clients, each client
    holds only its own shards, and only DTensor's own ops can write the full
    variable. A `DTensorCheckpoint` also supports only these ops.
    """
    return dtensor.num_clients() == 1 and not _in_dtensor_checkpoint.get()


def _tensors_for(saver: Any) -> AbstractContextManager[None]:
    return _in_dtensor_checkpoint.set_to(
        isinstance(saver, tf_private.DTrackableSaver)
    )


def _options_for(saver: Any, options: Any) -> Any:
    """Returns `options` without DTensor's device as I/O device."""
    device = getattr(options, "experimental_io_device", None)
    if (
        not device
        or not tf_private.has_dtensor_device()
        or isinstance(saver, tf_private.DTrackableSaver)
        or dtensor.num_clients() > 1
        or tf.DeviceSpec.from_string(device)
        != tf.DeviceSpec.from_string(dtensor.device_name())
    ):
        return options
    options = copy.copy(options)
    options.experimental_io_device = None
    return options


_KEY = tf_private.VARIABLE_VALUE_KEY


class Sharding(NamedTuple):
    """The axis of each dimension of a weight; None if unsharded."""

    spec: tuple[str | None, ...]


class StoredVariable(AllOrNothingVariable):
    """A `dtensor.DVariable` that checkpoints store as slices of one tensor."""

    # Number of eager assignments. The processes of a mesh compare their counts.
    times_set = 0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        freed_gradients.free_with_variables([self])

    @property
    def sharding(self) -> Sharding:
        """The axes of the weight.

        Programs for Keras on JAX print `variable.value.sharding.spec`.
        """
        return Sharding(device_mesh.axes_of_layout(self.layout))

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns `value`; counts eager assignments."""
        if tf.executing_eagerly():
            self.times_set += 1
        return super().assign(value, *args, **kwargs)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable]:
        if not are_slices():
            return super()._gather_saveables_for_checkpoint()
        return {_KEY: lambda name=self.name: _ShardsSaveable(self, name)}

    def _is_eager_and_sharded(self) -> bool:
        return tf.executing_eagerly() and not self.layout.is_fully_replicated()

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        if (
            not tf.executing_eagerly()
            and tracing.is_in_dataset_function()
            and not self.layout.is_fully_replicated()
        ):
            raise errors.UnsupportedByDTensorError(
                "A function of tf.data runs on the host, and cannot read "
                f"sharded weights. Received: variable {self.name!r} in a "
                "function that is passed to a dataset, for example by "
                "dataset.map. Call the model on the batches of the dataset "
                "instead, or pass a model that is created outside the scope "
                "and has the same weights."
            )
        return super()._read_variable_op(no_copy)

    # DTensor has no rules for TensorFlow's next methods if a variable is
    # sharded.

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Returns rows of the variable."""
        if not self._is_eager_and_sharded():
            return super().sparse_read(indices, name)
        return tf.gather(self.read_value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """Returns slices of the variable."""
        if not self._is_eager_and_sharded():
            return super().gather_nd(indices, name)
        return tf.gather_nd(self.read_value(), indices, name=name)

    def _scattered(
        self, scatter: Callable[..., tf.Tensor], indices: Any, updates: Any
    ) -> Any:
        """Assigns the result of an op such as `tf.tensor_scatter_nd_add`."""
        with tf.device("CPU:0"):
            value, indices, updates = (
                tf.convert_to_tensor(transfer.to_host_tensor(x))
                for x in (self.read_value(), indices, updates)
            )
            value = scatter(value, indices, tf.cast(updates, value.dtype))
        return self.assign(transfer.padded_to_mesh(value, self.layout))


def saveables(original: Callable, variable: DVariable) -> dict:
    """Returns saveables that write a DVariable of user code as slices.

    Args:
      original: The replaced function of TensorFlow.
      variable: A variable. If this variable is stored as bfloat16
        (`save_as_bf16`), TensorFlow's function is used.
    """
    if variable.save_as_bf16 or not are_slices():
        return original(variable)
    return {_KEY: lambda name=variable.name: _ShardsSaveable(variable, name)}


class _ShardsSaveable(tf_private.SaveableObject):
    """Reads and restores the shards of a variable under one key."""

    def __init__(self, variable: DVariable, key: str):
        self._variable = variable
        self._all_shards = transfer.unique_shards(
            variable.shape, variable.layout
        )
        # Shards without elements contain only padding and are not written.
        self._shards = [
            shard
            for shard in self._all_shards
            if not variable.shape.num_elements()
            or all(start < stop for start, stop in shard.bounds)
        ]
        if variable.dtype not in tf_private.SLICEABLE_DTYPES:
            # If TensorFlow cannot read slices of a dtype, the variable is
            # written as one tensor.
            self._shards = self._shards[:1]
        is_sharded = len(self._shards) > 1
        super().__init__(
            None,
            [
                self._spec(
                    key, shard.devices[0], shard.slices if is_sharded else None
                )
                for shard in self._shards
            ],
            key,
        )

    def _spec(
        self, key: str, device: int, slices: tuple[slice, ...] | None
    ) -> Any:
        variable = self._variable

        def read() -> tf.Tensor:
            with tf.init_scope():
                if tf.executing_eagerly():
                    if slices is not None:
                        return _part(variable, device, slices)
                    with tf.device("CPU:0"):
                        return tf.constant(transfer.to_host(variable))
            # While a model is exported, the variable is not on a mesh.
            value = variable.read_value()
            return value if slices is None else value[slices]

        spec = (
            ""
            if slices is None
            else slice_specs.of_block(
                variable.shape.as_list(),
                [slice_.start for slice_ in slices],
                [slice_.stop - slice_.start for slice_ in slices],
            )
        )
        return tf_private.SaveSpec(
            read,
            spec,
            key,
            variable.dtype,
            variable.layout.mesh.local_devices()[device],
        )

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        """Assigns the restored tensors to the variable."""
        del restored_shapes
        variable = self._variable
        if not tf.executing_eagerly():
            starts = [
                tuple(s.start for s in shard.slices) for shard in self._shards
            ]
            value = _joined(starts, restored_tensors)
            pad = getattr(variable, "with_padding", None)
            return variable.assign(value if pad is None else pad(value))
        if len(restored_tensors) > 1:
            return variable.assign(
                transfer.packed(
                    self._all_shards,
                    self._parts(restored_tensors),
                    variable.layout,
                )
            )
        (value,) = restored_tensors
        if value.shape != variable.shape:
            raise ValueError(
                f"Variable {variable.name!r} must be restored from a tensor "
                f"of shape {variable.shape}. Received: shape {value.shape}."
            )
        return variable.assign(transfer.padded_to_mesh(value, variable.layout))

    def _parts(self, restored: Any) -> list[tf.Tensor]:
        """Returns the restored tensor of each shard; empty for padding."""
        parts = iter(restored)
        return [
            next(parts)
            if any(shard is stored for stored in self._shards)
            else tf.zeros([0, *restored[0].shape[1:]], restored[0].dtype)
            for shard in self._all_shards
        ]


def _part(
    variable: DVariable, device: int, slices: tuple[slice, ...]
) -> tf.Tensor:
    """Returns the shard of a variable on one device, without padding."""
    part = dtensor.unpack(transfer.read_divided(variable))[device]
    size = slices[0].stop - slices[0].start
    return part if size == part.shape[0] else part[:size]


def _joined(
    starts: list[tuple[int, ...]], parts: list[tf.Tensor], axis: int = 0
) -> tf.Tensor:
    """Returns a tensor assembled from `parts` that begin at `starts`."""
    if len(parts) == 1:
        return parts[0]
    rows = []
    for start in sorted({s[axis] for s in starts}):
        here = [i for i, s in enumerate(starts) if s[axis] == start]
        rows.append(
            _joined(
                [starts[i] for i in here], [parts[i] for i in here], axis + 1
            )
        )
    return tf.concat(rows, axis)


class PaddedVariable(StoredVariable):
    """A variable whose DTensor has rows of padding at its end."""

    _num_rows: int | None = None

    @classmethod
    def of(cls, value: Any, num_rows: int, **options: Any) -> PaddedVariable:
        """Creates a padded variable.

        Args:
          value: DTensor including the rows of padding.
          num_rows: Number of rows without padding.
          **options: Keyword arguments of `DVariable`.
        """
        variable = cls(value, **options)
        variable._num_rows = num_rows
        return variable

    @property
    def shape(self) -> tf.TensorShape:
        """The shape without padding."""
        return tf.TensorShape([self._num_rows]).concatenate(self._shape[1:])

    def with_padding(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a symbolic tensor with rows of padding appended."""
        missing = self._shape[0] - self._num_rows
        return tf.pad(value, [[0, missing]] + [[0, 0]] * (self._shape.rank - 1))

    def read_divided(self) -> Any:
        """Returns the sharded DTensor, including its padding."""
        return super()._read_variable_op()

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        value = super()._read_variable_op(no_copy)
        if self._num_rows is None or tf_private.in_save_context():
            # Either the constructor is still running, or a model is being
            # exported. The variables of an exported model have no padding.
            return value
        # The result is replicated, because the size of the mesh axis does not
        # divide the number of rows.
        return dtensor.relayout(
            value, dtensor.Layout.replicated(self.layout.mesh, self._shape.rank)
        )[: self._num_rows]

    # TensorFlow's versions of the next two methods read from the handle. With
    # these versions, an id could select a row of padding.

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        if tf_private.in_save_context():
            return super().sparse_read(indices, name)
        return tf.gather(self.read_value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        if tf_private.in_save_context():
            return super().gather_nd(indices, name)
        return tf.gather_nd(self.read_value(), indices, name=name)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        if not are_slices():
            raise ValueError(
                "DTensorCheckpoint does not support a variable whose number "
                "of rows is not a multiple of the size of its mesh axis. "
                f"Received: variable {self.name!r} with {self._num_rows} "
                "rows. Use tf.train.Checkpoint."
            )
        return super()._gather_saveables_for_checkpoint()

    def _export_to_saved_model_graph(
        self,
        object_map: Any,
        tensor_map: Any,
        options: Any,
        **kwargs: Any,
    ) -> Any:
        del options, kwargs
        variable = object_map[self] = tf_private.UninitializedVariable(
            shape=self.shape,
            dtype=self.dtype,
            name=self._shared_name,
            trainable=self.trainable,
        )
        tensor_map[self.handle] = variable.handle
        return [self.handle]


def _on_host(name: str) -> Callable[..., Any]:
    """Returns a method that updates parts of a sharded variable on the host.

    Args:
      name: Name of the method of `tf.Variable`. In graphs, and for replicated
        variables, the method of TensorFlow is called.
    """
    original = getattr(StoredVariable, name)
    parameters = inspect.signature(original)
    scatter = getattr(tf, f"tensor_scatter_nd_{name.rpartition('_')[2]}")

    @functools.wraps(original)
    def method(variable: Any, *args: Any, **kwargs: Any) -> Any:
        if not variable._is_eager_and_sharded():
            return original(variable, *args, **kwargs)
        arguments = parameters.bind(variable, *args, **kwargs).arguments
        if "sparse_delta" not in arguments:
            return variable._scattered(
                scatter, arguments["indices"], arguments["updates"]
            )
        delta = arguments["sparse_delta"]
        if not isinstance(delta, tf.IndexedSlices):
            raise TypeError(
                f"Argument `sparse_delta` of `{name}` must be a "
                f"tf.IndexedSlices. Received: {delta!r}."
            )
        rows = tf.convert_to_tensor(transfer.to_host_tensor(delta.indices))
        rows = tf.expand_dims(rows, -1)
        return variable._scattered(scatter, rows, delta.values)

    return method


for _operation in ("add", "sub", "max", "min", "update"):
    for _kind in ("scatter", "scatter_nd"):
        _name = f"{_kind}_{_operation}"
        setattr(StoredVariable, _name, _on_host(_name))


# Messages of TensorFlow's ops use this name for every variable on a mesh.
HANDLE_NAME = "variable_on_a_mesh"


def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Creates a handle; all handles on a mesh have the same `debug_name`.

    The name is an attribute of the op, and DTensor compiles an op again for
    each set of attributes. TensorFlow uses the name only in error messages.
    """
    if (
        "debug_name" in kwargs
        and tf.executing_eagerly()
        and (tracing.mesh_of_operation() is not None)
    ):
        kwargs["debug_name"] = HANDLE_NAME
    return original(*args, **kwargs)


def host_write_method(
    original: Callable[..., Any], replacement: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the replacement for a method that writes to a variable."""

    @functools.wraps(original)
    def method(variable: Any, *args: Any, **kwargs: Any) -> Any:
        handle = variable.handle
        # Writes to variables on a mesh, and to variables in graphs of
        # TensorFlow 1, are not changed.
        if tracing.DEVICE in handle.device or tf.is_symbolic_tensor(handle):
            return original(variable, *args, **kwargs)
        return replacement(variable, *args, **kwargs)

    return method


def write_host_variable(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> Any:
    """Writes to a host variable on the host.

    Args:
      original: The replaced method.
      variable: `tf.Variable` on the host.
      *args: Arguments of the method.
      **kwargs: Keyword arguments of the method.

    Raises:
      RuntimeError: If a function for a mesh is being traced.
    """
    if not tf.executing_eagerly():
        _check_no_mesh(
            f"`{original.__name__}` of tf.Variable {variable.name!r} of shape "
            f"{variable.shape}"
        )
    elif _runs_on_mesh(*args, *kwargs.values()):
        args, kwargs = tf.nest.map_structure(
            transfer.to_host_tensor, (args, kwargs)
        )
        with tf.device(variable.handle.device):
            return original(variable, *args, **kwargs)
    return original(variable, *args, **kwargs)


def add_to_host_variable(
    original: Callable[..., Any],
    resource: Any,
    value: Any,
    name: str | None = None,
) -> Any:
    """Runs an op that adds a value to a variable, or subtracts it.

    Args:
      original: Function that creates the op.
      resource: Handle of the variable.
      value: Value to add or subtract.
      name: Name of the op.

    Raises:
      RuntimeError: If a function for a mesh is being traced, and the variable
        is on the host.
    """
    handle = resource
    if not tf.executing_eagerly():
        # In a loop or branch, the handle is a placeholder that captures the
        # original handle.
        handle = tf_private.captured_by_trace(resource)
    if (
        not isinstance(handle, tf.Tensor)
        or tf.is_symbolic_tensor(handle)
        or (tracing.DEVICE in handle.device)
    ):
        return original(resource=resource, value=value, name=name)
    if not tf.executing_eagerly():
        _check_no_mesh(f"an operation `{original.__name__}` on a variable")
    elif _runs_on_mesh(value):
        with tf.device(handle.device):
            return original(
                resource=resource,
                name=name,
                value=transfer.to_host_tensor(value),
            )
    return original(resource=resource, value=value, name=name)


def _runs_on_mesh(*values: Any) -> bool:
    """Returns whether an eager op with the inputs `values` runs on a mesh."""
    return tracing.mesh_of_operation() is not None or any(
        map(tracing.on_registered_mesh, values)
    )


def _check_no_mesh(received: str) -> None:
    mesh = tracing.mesh_of_operation()
    if mesh is None:
        return
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    raise RuntimeError(
        f"A function for mesh {mesh.dim_names} of size {mesh.shape()} must "
        "write to variables on that mesh only, because each of its devices "
        f"runs it. Received: {received}, which is on the host"
        f"{f', in {scope!r}' if scope else ''}. Create the variable as a "
        "weight, with `self.add_weight(..., trainable=False)` in the layer, "
        "or as a keras.Variable inside the scope; or write to it outside of "
        "the function, for example in a callback."
    )
