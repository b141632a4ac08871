"""The DVariable behind a weight, and how `tf.train.Checkpoint` saves it.

DTensor writes its variables with an op of its own, which takes no slices, so
that a table in slices and a variable on a mesh could not be in one
checkpoint. Here a variable is written as what its devices hold: slices of one
tensor, each from its device. Whoever reads them sees the whole tensor, and any
mesh, or none, reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap._patches import freed_gradients
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.variables import checkpoint_files
from tf_layoutmap.layout.variables.all_or_nothing_variable import (
    AllOrNothingVariable,
)

if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import DVariable

dtensor = tf.experimental.dtensor

_KEY = _tf_private.VARIABLE_VALUE_KEY


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
        if not checkpoint_files.are_slices():
            return super()._gather_saveables_for_checkpoint()
        return {_KEY: lambda name=self.name: _ShardsSaveable(self, name)}


def saveables(original: Callable, variable: DVariable) -> dict:
    """Returns how a DVariable of the program's own is written: as slices, too.

    Args:
      original: What is replaced.
      variable: The variable; one that asks for bfloat16 in its file is left
        to TensorFlow.
    """
    if variable.save_as_bf16 or not checkpoint_files.are_slices():
        return original(variable)
    return {_KEY: lambda name=variable.name: _ShardsSaveable(variable, name)}


class _ShardsSaveable(_tf_private.SaveableObject):
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
        if variable.dtype not in _tf_private.SLICEABLE_DTYPES:
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

        spec = (
            ""
            if slices is None
            else checkpoint_files.slice_spec(key, variable.shape, slices)
        )
        return _tf_private.SaveSpec(
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
