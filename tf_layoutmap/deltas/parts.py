"""Writes the tensors of a delta, whose values can be in several processes.

Each server, and each process, writes the values that it has into a part: a
TensorFlow checkpoint with slices of the delta's tensors. The coordinator, or
the first process, merges the indices of the parts. The delta therefore has the
same format as the delta of one process. `ProcessesDelta` is a delta that all
processes write together. Its `meta.json` contains the checksums of all parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import files, slice_specs, tf_private
from tf_layoutmap.deltas import base as base_file
from tf_layoutmap.deltas.served import chain, storage
from tf_layoutmap.deltas.served.chain import Delta, Meta, Position
from tf_layoutmap.embedding import processes
from tf_layoutmap.embedding.changes import ChangedValues, TableChanges

Array = np.ndarray[Any, Any]

_CALL = "DeltaWriter.write"


# Device of the process that writes a delta.
_HERE = "CPU:0"


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """A tensor of a delta, or a slice of it, that one device writes.

    Attributes:
      name: Name of the tensor.
      value: Values of the slice.
      spec: Slice spec of TensorFlow's checkpoints; empty for a full tensor.
      device: Device that has the values and writes them.
    """

    name: str
    value: Any
    spec: str = ""
    device: str = _HERE


def slices_of(
    name: str,
    value: Array | ChangedValues,
    first: int = 0,
    num_rows: int | None = None,
) -> list[Slice]:
    """Returns the slices of a tensor that this process and servers write.

    Args:
      name: Name of the tensor.
      value: The full tensor, or the rows of this process.
      first: Index of the first of these rows in the tensor.
      num_rows: Number of rows of the tensor. None: `value` has all rows.
    """
    if isinstance(value, ChangedValues):
        parts = value.parts
        if len(parts) == 1 and parts[0].device is None:
            value = parts[0].values
        elif value.dtype not in tf_private.SLICEABLE_DTYPES:
            # TensorFlow cannot read slices of these tensors.
            value = value.numpy()
    if not isinstance(value, ChangedValues):
        if num_rows is None:
            return [Slice(name, value)]
        spec = slice_specs.of_rows(
            [num_rows, *value.shape[1:]], first, len(value)
        )
        return [Slice(name, value, spec)] if len(value) else []
    if not value.shape[0]:
        return [Slice(name, value.numpy())]
    return [
        Slice(
            name,
            part.values,
            slice_specs.of_rows(
                value.shape, part.first, int(part.values.shape[0])
            ),
            part.device or _HERE,
        )
        for part in value.parts
        if int(part.values.shape[0])
    ]


def save(folder: str, prefix: str, slices: Sequence[Slice]) -> None:
    """Writes the tensors of a delta as a checkpoint.

    Each device writes its values into a part: a TensorFlow checkpoint with
    slices of the tensors. This process merges the indices of the parts.

    Args:
      folder: Folder for temporary files. All servers must have access to the
        folder under the same path.
      prefix: Prefix of the checkpoint.
      slices: Slices of all tensors.

    Raises:
      OSError: If a server cannot write its part.
      tf.errors.UnavailableError, tf.errors.AbortedError: If a server is lost.
    """
    by_device: dict[str, list[Slice]] = {_HERE: []}
    for slice_ in slices:
        by_device.setdefault(slice_.device, []).append(slice_)
    if len(by_device) == 1:
        _write_here(prefix, by_device[_HERE])
        return
    prefixes = []
    for number, (device, own_tensors) in enumerate(by_device.items()):
        part = os.path.join(folder, f"part-{number}")
        if device == _HERE:
            _write_here(part, own_tensors)
        else:
            _write_part(device, part, own_tensors)
        if not storage.is_file(f"{part}.index"):
            raise FileNotFoundError(
                errno.ENOENT,
                "the directory of the deltas must be on a file system that the "
                "coordinator and all servers share under the same path; the "
                f"coordinator does not find the part of {device}",
                part,
            )
        prefixes.append(part)
    _merge(prefixes, prefix)


def _merge(prefixes: Sequence[str], target: str) -> None:
    """Merges the indices of parts into one checkpoint."""
    with tf.device(_HERE), files.os_errors(target):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes,
            destination_prefix=target,
            delete_old_dirs=False,
        )


def _write_here(prefix: str, tensors: Sequence[Slice]) -> None:
    """Writes a checkpoint in this process."""
    with tf.device(_HERE), files.os_errors(prefix):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[tensor.name for tensor in tensors],
            shape_and_slices=[tensor.spec for tensor in tensors],
            tensors=[tensor.value for tensor in tensors],
        )


def _write_part(device: str, prefix: str, tensors: Sequence[Slice]) -> None:
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
                tensor_names=[tensor.name for tensor in tensors],
                shape_and_slices=[tensor.spec for tensor in tensors],
                tensors=values,
            )
            # Without this dependency, the function would not run the op.
            with tf.control_dependencies([saved]):
                return tf.constant(True)

    try:
        write([tensor.value for tensor in tensors]).numpy()
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


class ProcessesDelta:
    """A delta that all processes write together.

    All processes call the constructor and `finish`. `write_part` does not
    communicate, and can therefore run in a thread while steps run.
    """

    def __init__(
        self,
        group: processes.Processes,
        path: str,
        staging: str,
        position: Position,
        table_changes: Mapping[str, TableChanges],
        sharded: Mapping[str, bool],
        error: Exception | None,
    ):
        """Creates the staging folder, and exchanges the numbers of rows.

        Args:
          group: The processes.
          path: Path of the delta, which must be on a file system that all
            processes share.
          staging: Target of the staging folder; see `files.staged`.
          position: The last delta. It must be equal in all processes.
          table_changes: Changed rows by table.
          sharded: Whether each process has only its own rows, by table.
          error: Error of this process before the call, or None.

        Raises:
          Exception: `error`, if it is not None.
          OSError: If the staging folder cannot be created, or if another
            process has an error.
          ValueError: If the processes are at different deltas.
        """
        self._group = group
        self._path = path
        self._stack = contextlib.ExitStack()
        self._sharded = sharded
        folder = ""
        if group.is_first and error is None:
            try:
                folder = self._stack.enter_context(files.staged(staging))
                files.new_folder(folder, path, chain.META_FILE)
            except OSError as caught:
                error = caught
        messages = [
            json.loads(text)
            for text in group.gather_texts(
                json.dumps(
                    {
                        "error": processes.describe_error(error),
                        "folder": folder,
                        "rows": {
                            table: len(changes.rows)
                            for table, changes in table_changes.items()
                        },
                        "position": dataclasses.astuple(position),
                        "path": path,
                    }
                )
            )
        ]
        with self._closing_on_error():
            processes.raise_errors(
                _CALL,
                error,
                [message["error"] for message in messages],
                self._make_error,
            )
            for number, message in enumerate(messages):
                for name in ("position", "path"):
                    if message[name] != messages[0][name]:
                        raise ValueError(
                            "All processes must write the same delta of the "
                            f"same base. Received: {name} {messages[0][name]} "
                            f"in process 0, {message[name]} in process "
                            f"{number}."
                        )
        self._folder = messages[0]["folder"]
        self._num_rows = {
            table: [message["rows"][table] for message in messages]
            for table in messages[0]["rows"]
        }

    def num_rows(self, table: str) -> int:
        """Returns the number of rows of a table in the delta."""
        counts = self._num_rows[table]
        return sum(counts) if self._sharded[table] else counts[0]

    def slices_of(
        self, table: str, name: str, value: Array | ChangedValues
    ) -> list[Slice]:
        """Returns the slices of a tensor that this process writes.

        If TensorFlow cannot read slices of the dtype, the values of all
        processes are gathered, and the first process writes the tensor. All
        processes must therefore call this method with the same tensors in the
        same order.

        Args:
          table: Name of the table.
          name: Name of the tensor in the table.
          value: Values in this process.
        """
        counts = self._num_rows[table]
        # All processes have the full sketch, and the numbers of its changed
        # cells, which differ from the rows of the table.
        is_part = (
            self._sharded[table]
            and base_file.has_rows(name)
            and name != base_file.SKETCH_ROWS
        )
        label = f"{table}/{name}"
        if not is_part or not sum(counts):
            return slices_of(label, value) if self._group.is_first else []
        if tf.as_dtype(value.dtype) not in tf_private.SLICEABLE_DTYPES:
            rows = value.numpy() if isinstance(value, ChangedValues) else value
            gathered = self._group.gather_rows(rows)
            return slices_of(label, gathered) if self._group.is_first else []
        return slices_of(
            label, value, sum(counts[: self._group.rank]), sum(counts)
        )

    def write_part(self, slices: Sequence[Slice]) -> chain.FileOfDelta | None:
        """Writes the part of this process.

        Args:
          slices: Slices of all tensors that this process writes.

        Returns:
          Size and checksum of the part, or None if this process has no tensor.

        Raises:
          OSError: If the part cannot be written.
        """
        if not slices:
            return None
        if storage.is_local(self._folder) and not os.path.isdir(self._folder):
            raise FileNotFoundError(
                errno.ENOENT,
                "the directory of the deltas must be on a file system that "
                "all processes share; the folder of process 0 does not exist "
                f"in process {self._group.rank}",
                self._folder,
            )
        prefix = self._prefix_of(self._group.rank)
        _write_here(prefix, slices)
        path = f"{prefix}.data-00000-of-00001"
        for file in (path, f"{prefix}.index"):
            files.sync(file)
        return describe(path)

    def finish(
        self,
        wait: Callable[[], chain.FileOfDelta | None],
        make_meta: Callable[[dict[str, chain.FileOfDelta]], Meta],
    ) -> Delta:
        """Waits for the parts of all processes, and completes the delta.

        Args:
          wait: Function that returns the result of `write_part`.
          make_meta: Function that takes a value for the attribute `files` of
            `Meta`, and returns the `Meta` of the delta.

        Raises:
          OSError: If a process could not write its part, or the delta cannot be
            completed. All processes raise an error.
        """
        part, error = None, None
        try:
            part = wait()
        except Exception as caught:
            error = caught
        with self._closing_on_error():
            messages = self._exchange(error, part)
            content = ""
            if self._group.is_first:
                try:
                    content = self._merge(messages, make_meta)
                except Exception as caught:
                    error = caught
            content = self._exchange(error, content)[0]
        self._stack.close()
        return Delta(
            self._path,
            chain.meta_from_json(
                content, os.path.join(self._path, chain.META_FILE)
            ),
        )

    def _exchange(self, error: Exception | None, value: Any) -> list[Any]:
        """Returns the value of each process; raises the error of a process."""
        answers = [
            json.loads(text)
            for text in self._group.gather_texts(
                json.dumps([processes.describe_error(error), value])
            )
        ]
        processes.raise_errors(
            _CALL, error, [text for text, _ in answers], self._make_error
        )
        return [answer for _, answer in answers]

    def _merge(
        self,
        parts: list[chain.FileOfDelta | None],
        make_meta: Callable[[dict[str, chain.FileOfDelta]], Meta],
    ) -> str:
        """Merges the parts, and gives the delta its name.

        Returns:
          The contents of `meta.json`.
        """
        new = (
            os.path.join(self._folder, "new")
            if storage.is_local(self._path)
            else self._path
        )
        prefix = os.path.join(new, chain.TENSORS)
        written = [number for number, part in enumerate(parts) if part]
        _merge([self._prefix_of(number) for number in written], prefix)
        described = {
            f"{chain.TENSORS}.index": describe(f"{prefix}.index"),
            # TensorFlow numbers the data files in the order of the parts.
            **{
                f"{chain.TENSORS}.data-{index:05d}-of-{len(written):05d}": part
                for index, part in enumerate(
                    parts[number] for number in written
                )
                if part is not None
            },
        }
        for name, description in described.items():
            size = storage.size(os.path.join(new, name))
            if size != description["num_bytes"]:
                raise OSError(
                    errno.EIO,
                    f"the file must have {description['num_bytes']} bytes, "
                    f"which its process has written. Received: {size}",
                    name,
                )
        content = make_meta(dict(sorted(described.items()))).to_json()
        files.publish_folder(
            self._folder, new, self._path, chain.META_FILE, content
        )
        return content

    def _prefix_of(self, process: int) -> str:
        return os.path.join(self._folder, f"part-{process}")

    def _make_error(self, message: str) -> OSError:
        return OSError(errno.EIO, message, self._path)

    @contextlib.contextmanager
    def _closing_on_error(self):
        """Removes the staging folder if the block raises an error."""
        try:
            yield
        except BaseException:
            self._stack.close()
            raise


def describe(path: str) -> chain.FileOfDelta:
    """Returns the entry of a file in `Meta.files`."""
    return {
        "num_bytes": storage.size(path),
        "sha256": chain.checksum(path),
    }
