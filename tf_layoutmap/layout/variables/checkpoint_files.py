"""Checkpoints of variables on a mesh, together with all other variables.

DTensor's documentation has checkpoints written by DTensor's own device, as
`tf.train.CheckpointOptions(experimental_io_device=dtensor.device_name())`.
That device takes tensors on a mesh only. What this package saves are slices on
the host, of variables on a mesh and of tables in shards alike.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh.thread_value import ThreadValue

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
    return _is_dtensors.set_to(isinstance(saver, _tf_private.DTrackableSaver))


def _options_for(saver: Any, options: Any) -> Any:
    """Returns checkpoint options that do not name DTensor's device."""
    device = getattr(options, "experimental_io_device", None)
    if (
        not device
        or not _tf_private.has_dtensor_device()
        or isinstance(saver, _tf_private.DTrackableSaver)
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
