"""The DVariable behind a weight, and how `tf.train.Checkpoint` saves it.

DTensor writes its variables with an op of its own, which takes no slices, so
that a table in slices and a variable on a mesh could not be in one
checkpoint. Here a variable is written as what its devices hold: slices of one
tensor, each from its device. Whoever reads them sees the whole tensor, and any
mesh, or none, reads it.
"""

# DOC-MERGE: A variable on a mesh that does not divide its rows.
#
# The DTensor behind it has rows of padding at its end, which nobody is shown:
# shape, reads, files and exports are those of the rows there are.
#
# DOC-MERGE: Handles of variables on a mesh: one compilation serves many.
#
# DTensor compiles each operation once, with its attributes. TensorFlow makes the
# name of a variable an attribute of the operation that makes its handle, for
# messages, so a model of many weights was compiled weight by weight.
#
# DOC-MERGE: Checkpoints of variables on a mesh, together with all other variables.
#
# DTensor's documentation has checkpoints written by DTensor's own device, as
# `tf.train.CheckpointOptions(experimental_io_device=dtensor.device_name())`.
# That device takes tensors on a mesh only. What this package saves are slices on
# the host, of variables on a mesh and of tables in shards alike.
#
from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap._patches import freed_gradients
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.atomic_step import AllOrNothingVariable
from tf_layoutmap.layout.mesh.tracing import ThreadValue

if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import DVariable

dtensor = tf.experimental.dtensor

_is_dtensors = ThreadValue(False)


def save(
    original: Callable,
    saver: Any,
    file_prefix: Any,
    checkpoint_number: Any = None,
    session: Any = None,
    options: Any = None,
) -> Any:
    """Saves as `original` does, from the host."""
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
    """Restores as `original` does, on the host."""
    with _tensors_for(saver):
        return original(saver, save_path, _options_for(saver, options))


def are_slices() -> bool:
    """Whether a checkpoint of this thread takes variables as slices.

    With several clients each has only its parts of a variable, so that only
    DTensor's own operations write all of it; and `DTensorCheckpoint` knows no
    others.
    """
    return dtensor.num_clients() == 1 and not _is_dtensors.get()


def _tensors_for(saver: Any) -> AbstractContextManager[None]:
    return _is_dtensors.set_to(isinstance(saver, tf_private.DTrackableSaver))


def _options_for(saver: Any, options: Any) -> Any:
    """Returns checkpoint options that do not name DTensor's device."""
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


def slice_spec(
    key: str, shape: tf.TensorShape, slices: tuple[slice, ...]
) -> str:
    """Returns how a checkpoint calls a part of a tensor.

    Args:
      key: Of the tensor in the checkpoint.
      shape: Of the whole tensor.
      slices: Which part.
    """
    return tf.Variable.SaveSliceInfo(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
        full_name=key,
        full_shape=shape.as_list(),
        var_offset=[s.start for s in slices],
        var_shape=[s.stop - s.start for s in slices],
    ).spec


_KEY = tf_private.VARIABLE_VALUE_KEY


class StoredVariable(AllOrNothingVariable):
    """A `dtensor.DVariable` that is written as slices of one tensor."""

    # How often it was set outside of a function: processes compare it.
    times_set = 0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        freed_gradients.free_with_variables([self])

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns `value`; counts it unless a function is traced."""
        if tf.executing_eagerly():
            self.times_set += 1
        return super().assign(value, *args, **kwargs)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable]:
        if not are_slices():
            return super()._gather_saveables_for_checkpoint()
        return {_KEY: lambda name=self.name: _ShardsSaveable(self, name)}


def saveables(original: Callable, variable: DVariable) -> dict:
    """Returns how a DVariable of the program's own is written: as slices, too.

    Args:
      original: What is replaced.
      variable: The variable; one that asks for bfloat16 in its file is left
        to TensorFlow.
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
        # Where the mesh does not divide it, devices may have padding only.
        self._shards = [
            shard
            for shard in self._all_shards
            if not variable.shape.num_elements()
            or all(start < stop for start, stop in shard.bounds)
        ]
        if variable.dtype not in tf_private.SLICEABLE_DTYPES:
            # Written as one tensor, by the first device.
            self._shards = self._shards[:1]
        is_cut = len(self._shards) > 1
        super().__init__(
            None,
            [
                self._spec(
                    key, shard.devices[0], shard.slices if is_cut else None
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
            # An export, whose variable is on no mesh.
            value = variable.read_value()
            return value if slices is None else value[slices]

        spec = "" if slices is None else slice_spec(key, variable.shape, slices)
        return tf_private.SaveSpec(
            read,
            spec,
            key,
            variable.dtype,
            variable.layout.mesh.local_devices()[device],
        )

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        """Sets the variable from what was read."""
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
        """What was read for each shard, and nothing for those of padding."""
        parts = iter(restored)
        return [
            next(parts)
            if any(shard is one for one in self._shards)
            else tf.zeros([0, *restored[0].shape[1:]], restored[0].dtype)
            for shard in self._all_shards
        ]


def _part(
    variable: DVariable, device: int, slices: tuple[slice, ...]
) -> tf.Tensor:
    """What a device holds of a variable, without padding."""
    part = dtensor.unpack(transfer.read_divided(variable))[device]
    size = slices[0].stop - slices[0].start
    return part if size == part.shape[0] else part[:size]


def _joined(
    starts: list[tuple[int, ...]], parts: list[tf.Tensor], axis: int = 0
) -> tf.Tensor:
    """Returns the tensor that is cut into boxes, by where each starts."""
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
    """A `dtensor.DVariable` whose last rows are padding."""

    _num_rows: int | None = None

    @classmethod
    def of(cls, value: Any, num_rows: int, **options: Any) -> PaddedVariable:
        """Returns a variable.

        Args:
          value: DTensor with rows of padding.
          num_rows: Rows there are; those behind them are padding.
          **options: Those of `DVariable`.
        """
        variable = cls(value, **options)
        variable._num_rows = num_rows
        return variable

    @property
    def shape(self) -> tf.TensorShape:
        """That of the rows there are."""
        return tf.TensorShape([self._num_rows]).concatenate(self._shape[1:])

    def with_padding(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of a traced function with the padding at its end."""
        missing = self._shape[0] - self._num_rows
        return tf.pad(value, [[0, missing]] + [[0, 0]] * (self._shape.rank - 1))

    def read_divided(self) -> Any:
        """Returns the DTensor as devices hold it, with its padding."""
        return super()._read_variable_op()

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        value = super()._read_variable_op(no_copy)
        if self._num_rows is None or tf_private.in_save_context():
            return value  # It is being made; or has no padding in an export.
        # Whole on each device: no mesh divides what is left.
        return dtensor.relayout(
            value, dtensor.Layout.replicated(self.layout.mesh, self._shape.rank)
        )[: self._num_rows]

    # Reads of some rows, which go by the handle: ids must not name padding.

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
                f"Variable {self.name!r} has {self._num_rows} rows, which its "
                "mesh does not divide: save it by tf.train.Checkpoint, not "
                "by a DTensorCheckpoint."
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


# What messages of TensorFlow's own operations call a variable on a mesh.
HANDLE_NAME = "variable_on_a_mesh"


def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes a handle; on a mesh without the name that only messages have."""
    if (
        "debug_name" in kwargs
        and tf.executing_eagerly()
        and (tracing.mesh_of_operation() is not None)
    ):
        kwargs["debug_name"] = HANDLE_NAME
    return original(*args, **kwargs)
