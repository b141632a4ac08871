"""Writes the tensors of a delta, whose values can be on parameter servers.

Each server writes the values of its rows into a part: a TensorFlow checkpoint
with slices of the delta's tensors. The coordinator writes all other tensors,
and merges the indices of the parts. The delta therefore has the same format as
the delta of one process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import files, slice_specs, tf_private
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.embedding.servers.changes import ServerValues

Array = np.ndarray[Any, Any]
# Name of a tensor, its slice spec, and its value.
_Tensor = tuple[str, str, Any]
# Device of the coordinator.
_HERE = "CPU:0"


def save(
    folder: str,
    prefix: str,
    tensors: Mapping[str, Array | ServerValues],
) -> None:
    """Writes the tensors of a delta as a checkpoint.

    Args:
      folder: Folder for temporary files. All servers must have access to the
        folder under the same path.
      prefix: Prefix of the checkpoint.
      tensors: Tensors by name.

    Raises:
      OSError: If a server cannot write its part.
      tf.errors.UnavailableError, tf.errors.AbortedError: If a server is lost.
    """
    by_device = _tensors_by_device(tensors)
    if len(by_device) == 1:
        _write_here(prefix, by_device[_HERE])
        return
    prefixes = []
    for number, (device, own) in enumerate(by_device.items()):
        part = os.path.join(folder, f"part-{number}")
        if device == _HERE:
            _write_here(part, own)
        else:
            _write_part(device, part, own)
        if not storage.is_file(f"{part}.index"):
            raise FileNotFoundError(
                errno.ENOENT,
                "the directory of the deltas must be on a file system that the "
                "coordinator and all servers share under the same path; the "
                f"coordinator does not find the part of {device}",
                part,
            )
        prefixes.append(part)
    with tf.device(_HERE), files.os_errors(prefix):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes,
            destination_prefix=prefix,
            delete_old_dirs=False,
        )


def _tensors_by_device(
    tensors: Mapping[str, Array | ServerValues],
) -> dict[str, list[_Tensor]]:
    """Returns the tensors that each device writes; first the coordinator."""
    here: list[_Tensor] = []
    by_device = {_HERE: here}
    for name, value in tensors.items():
        if not isinstance(value, ServerValues):
            here.append((name, "", value))
        elif (
            not value.shape[0] or value.dtype not in tf_private.SLICEABLE_DTYPES
        ):
            # TensorFlow cannot read slices of these tensors.
            here.append((name, "", value.numpy()))
        else:
            for part in value.parts:
                size = int(part.values.shape[0])
                if not size:
                    continue
                spec = slice_specs.of_rows(value.shape, part.first, size)
                by_device.setdefault(part.device, []).append(
                    (name, spec, part.values)
                )
    return by_device


def _write_here(prefix: str, tensors: Sequence[_Tensor]) -> None:
    """Writes a checkpoint in this process."""
    names, specs, values = zip(*tensors)
    with tf.device(_HERE), files.os_errors(prefix):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=names,
            shape_and_slices=specs,
            tensors=values,
        )


def _write_part(device: str, prefix: str, tensors: Sequence[_Tensor]) -> None:
    """Writes a checkpoint on a server.

    Raises:
      OSError: If the server cannot write the files.
      tf.errors.UnavailableError, tf.errors.AbortedError: If the server is lost.
    """

    # In contrast to an eager op on another process, a function has finished
    # when it returns its result.
    @tf.function(autograph=False)
    def write(values: list[tf.Tensor]) -> tf.Tensor:
        with tf.device(device):
            saved = tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=[name for name, _, _ in tensors],
                shape_and_slices=[spec for _, spec, _ in tensors],
                tensors=values,
            )
            # Without this dependency, the function would not run the op.
            with tf.control_dependencies([saved]):
                return tf.constant(True)

    try:
        write([value for _, _, value in tensors]).numpy()
    except (tf.errors.UnavailableError, tf.errors.AbortedError):
        raise  # A server is lost.
    except tf.errors.OpError as error:
        # The message of a function also contains the places in Python.
        lines = error.message.split("\n\t [[")[0].splitlines() or [""]
        raise OSError(
            files.error_number(error),
            f"{device} did not write its part of the delta ({lines[-1]})",
            prefix,
        ) from error
