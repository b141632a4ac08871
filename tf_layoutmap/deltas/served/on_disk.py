"""`update_export`: writes a SavedModel to which deltas were applied."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import fingerprint_pb2

from . import changes, export_state, storage
from .changes import VariableChanges
from .export_state import StoredVariable

FINGERPRINT = "fingerprint.pb"
# Small variables are written to one file until they have this number of bytes.
_FILE_BYTES = 64 * 2**20


def update_export(
    path: str | os.PathLike[str],
    deltas: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
) -> int:
    """Writes a copy of a SavedModel to which deltas were applied.

    The tables and weights in the copy are bitwise identical to the variables of
    a model that is exported when the last delta is written. The copy is written
    to a temporary folder next to `target`, which is renamed when the copy is
    complete. On a file system that is not local, the function writes the file
    `saved_model.pb` of the copy last. Later deltas can be applied to the copy.
    The function requires only TensorFlow and NumPy, and holds one variable, or
    one block of a table that `tlm.export` has written, in memory.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(1000, 4, initializer=tf.ones, name="words")
    >>> embedding = tlm.TPUEmbedding(
    ...     {"title": tpu.FeatureConfig(words)}, tpu.SGD(0.5))
    >>> embedding.build()
    >>> where = tempfile.mkdtemp()
    >>> base = tf.train.Checkpoint(embedding=embedding).save(where + "/base")
    >>> writer = tlm.deltas.DeltaWriter(embedding, where + "/deltas", base=base)
    >>> spec = [{"title": tf.TensorSpec([None], tf.int64)}]
    >>> _ = tlm.export(
    ...     embedding, where + "/model/1", input_signature=spec,
    ...     delta_writer=writer)
    >>> embedding.enqueue({"title": tf.constant([3])})
    >>> _ = embedding.dequeue()
    >>> embedding.apply_gradients({"title": tf.ones([1, 4])})
    >>> _ = writer.write()
    >>> tlm.deltas.update_export(where + "/model/1", where + "/deltas",
    ...                   where + "/model/2")
    1
    >>> served = tf.saved_model.load(where + "/model/2")
    >>> ids = tf.constant([3, 4], tf.int64)
    >>> served.serve({"title": ids})["title"][:, 0].numpy().tolist()
    [0.5, 1.0]

    Args:
      path: Folder of the SavedModel, which is written with
        `tlm.export(..., delta_writer=writer)` or marked by
        `tlm.deltas.DeltaWriter.mark_export`. The folder is not changed.
      deltas: Directory of the deltas, or a list of paths of deltas. Deltas of a
        directory that were already applied are ignored. In a list, they raise
        an error.
      target: Folder of the copy, which must not exist or must be empty.

    Returns:
      The number of the last applied delta.

    Raises:
      ValueError: If the SavedModel was not written for deltas, or was truncated
        or modified. The function also raises this error if a delta is missing,
        is repeated, has another base, does not follow the last applied delta,
        was truncated or modified, does not match the tables and weights, or
        contains a row that the storage type of the table cannot represent. No
        file is written.
      OSError: If `target` cannot be written, or is not empty.
      RuntimeError: If the SavedModel was replaced while it was read.
    """
    path = storage.local_path(os.fspath(path))
    target = storage.absolute(os.fspath(target))
    before = export_state.read(path)
    delta_changes = changes.read_changes(before, deltas)
    if storage.exists(target) and not (
        storage.is_empty(target)
        or storage.is_unfinished(target, export_state.MODEL)
    ):
        raise FileExistsError(
            f"Argument `target` must be a folder that does not exist or is "
            f"empty. Received: {target!r}."
        )
    if not storage.is_local(target):
        token = storage.begin_folder(target, export_state.MODEL)
        model = os.path.join(target, f"{export_state.MODEL}.partial")
        state = _write(path, target, delta_changes, target, model)
        _check_unchanged(path, before)
        storage.end_folder(target, export_state.MODEL, token)
        return state.sequence
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with _staged(target) as folder:
        new = os.path.join(folder, "new")
        model = os.path.join(new, export_state.MODEL)
        state = _write(path, new, delta_changes, target, model)
        _check_unchanged(path, before)
        _sync_tree(new)
        os.rename(new, target)
        _sync(os.path.dirname(target))
    return state.sequence


def _check_unchanged(path: str, before: export_state.ExportState) -> None:
    """Checks that a SavedModel was not replaced while it was read.

    Raises:
      RuntimeError: If the SavedModel was replaced.
    """
    try:
        is_same = export_state.read(path) == before
    except ValueError:  # The SavedModel is being replaced.
        is_same = False
    if not is_same:
        raise RuntimeError(
            f"{path!r} was replaced while it was read. Update it again."
        )


def _write(
    path: str, new: str, delta_changes: changes.Changes, target: str, model: str
) -> export_state.ExportState:
    """Writes all files of the copy.

    Args:
      path: Folder of the SavedModel.
      new: Folder of the copy.
      delta_changes: Changes of the variables.
      target: Final path of the copy, for messages.
      model: Path of the copy of `export_state.MODEL`.

    Returns:
      The state of the copy.
    """
    _copy_without_variables(path, new)
    with _os_errors(target):
        _write_variables(
            path, new, delta_changes.by_key(), delta_changes.state.variables()
        )
    state = dataclasses.replace(
        delta_changes.state, index=export_state.index_checksum(new)
    )
    storage.write_text(os.path.join(new, export_state.FILE), state.to_json())
    _write_fingerprint(new)
    storage.copy(os.path.join(path, export_state.MODEL), model)
    return state


def _copy_without_variables(path: str, new: str) -> None:
    """Copies a SavedModel, with an empty folder instead of the variables.

    The file `export_state.MODEL` is not copied either. The modes are not
    copied, because the files and folders of an image of a container are
    read-only, and some of them are written again.
    """
    variables = os.path.dirname(export_state.VARIABLES)
    if not (storage.is_local(path) and storage.is_local(new)):
        storage.make_folders(os.path.join(new, variables))
        for name in storage.files_below(path):
            if name in (export_state.MODEL, storage.INCOMPLETE):
                continue
            if name.startswith(f"{variables}/"):
                continue
            copied = os.path.join(new, name)
            storage.make_folders(os.path.dirname(copied))
            storage.copy(os.path.join(path, name), copied)
        return
    for parent, folders, names in os.walk(path, followlinks=True):
        copied = os.path.join(new, os.path.relpath(parent, path))
        os.makedirs(copied, exist_ok=True)
        if os.path.samefile(parent, os.path.join(path, variables)):
            folders.clear()
            continue
        for name in names:
            if os.path.join(parent, name) != os.path.join(
                path, export_state.MODEL
            ):
                shutil.copyfile(
                    os.path.join(parent, name), os.path.join(copied, name)
                )


def _write_variables(
    path: str,
    new: str,
    by_key: dict[str, list[VariableChanges]],
    stored: dict[str, StoredVariable],
) -> None:
    """Writes all variables of a SavedModel with their changes.

    Raises:
      ValueError: If a variable cannot be read.
    """
    source = os.path.join(path, export_state.VARIABLES)
    target = os.path.join(new, export_state.VARIABLES)
    dtypes = storage.open_checkpoint(source).get_variable_to_dtype_map()
    parts: list[str] = []

    def save(names: list[str], slices: list[str], tensors: list[Any]) -> None:
        parts.append(f"{target}-{len(parts)}")
        tf.raw_ops.SaveV2(
            prefix=parts[-1],
            tensor_names=names,
            shape_and_slices=slices,
            tensors=tensors,
        )

    small: dict[str, Any] = {}
    num_bytes = 0
    with tf.device("CPU:0"):
        for key in sorted(dtypes):
            variable, changed = stored.get(key), by_key.get(key, [])
            if variable is not None and variable.blocks:
                for spec, block in _blocks(source, variable, changed):
                    save([key], [spec], [block])
                continue
            value = _read(source, key, "", dtypes[key])
            if changed:
                array = changes.as_array(value.numpy())
                for part in changed:
                    array = part.apply_to(array)
                value = tf.constant(array, dtypes[key])
            small[key] = value
            num_bytes += value.dtype.size * int(tf.size(value))
            if num_bytes > _FILE_BYTES:
                save([*small], [""] * len(small), [*small.values()])
                small, num_bytes = {}, 0
        if small:
            save([*small], [""] * len(small), [*small.values()])
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts,
            destination_prefix=target,
            delete_old_dirs=False,
        )


def _blocks(
    source: str, variable: StoredVariable, changed: Sequence[VariableChanges]
) -> Iterator[tuple[str, Any]]:
    """Yields the slice and the new value of each block of a variable."""
    num_rows, width = variable.shape
    ends = (*variable.blocks[1:], num_rows)
    for start, end in zip(variable.blocks, ends):
        spec = f"{num_rows} {width} {start},{end - start}:0,{width}"
        value = _read(source, variable.key, spec, tf.as_dtype(variable.dtype))
        for change in changed:
            # Rows are in ascending order.
            first, last = np.searchsorted(change.rows, [start, end])
            if first < last:
                block = np.array(value.numpy())
                block[change.rows[first:last] - start] = change.values[
                    first:last
                ]
                value = tf.constant(block, value.dtype)
        yield spec, value


def _read(source: str, key: str, spec: str, dtype: tf.DType) -> Any:
    """Reads a tensor, or a slice of a tensor, and verifies its checksum.

    Raises:
      ValueError: If the file was truncated or modified.
    """
    try:
        (value,) = tf.raw_ops.RestoreV2(
            prefix=source,
            tensor_names=[key],
            shape_and_slices=[spec],
            dtypes=[dtype],
        )
    except tf.errors.OpError as error:
        raise ValueError(
            f"Reading variable {key!r} of {source!r} failed; the file was "
            f"truncated or modified: {error.message}"
        ) from None
    return value


def _write_fingerprint(folder: str) -> None:
    """Updates the fingerprint of a SavedModel after a change of its variables.

    The fingerprint is optional.
    """
    path = os.path.join(folder, FINGERPRINT)
    if storage.is_file(path):
        index = f"{os.path.join(folder, export_state.VARIABLES)}.index"
        storage.write_bytes(
            path,
            updated_fingerprint(
                storage.read_bytes(path), storage.read_bytes(index)
            ),
        )


def updated_fingerprint(fingerprint: bytes, index: bytes) -> bytes:
    """Returns the fingerprint of a SavedModel with other variables.

    TensorFlow computes the hash of the checkpoint in the same way.

    Args:
      fingerprint: Contents of the file `FINGERPRINT` of the SavedModel.
      index: Contents of the index of the new variables.
    """
    updated: Any = fingerprint_pb2.FingerprintDef()
    updated.ParseFromString(fingerprint)
    hashed = tf.fingerprint([index]).numpy()
    updated.checkpoint_hash = int(hashed.view("<u8")[0, 0])
    updated.uuid = str(uuid.uuid4().int)
    return updated.SerializeToString()


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Raises TensorFlow's errors about files as `OSError`."""
    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(f"Writing {path!r} failed: {error.message}") from None


@contextlib.contextmanager
def _staged(target: str) -> Iterator[str]:
    """Yields a new folder next to `target`, and removes it afterwards.

    The folder is locked while it is in use. Before a folder is created, folders
    of processes that were killed are removed. The names and locks are the same
    as in `_core/files.py`.
    """
    parent, name = os.path.split(target)
    for leftover in os.listdir(parent):
        if re.fullmatch(re.escape(name) + r"\.partial-[0-9a-f]{16}", leftover):
            with _locked(os.path.join(parent, leftover)) as is_free:
                if is_free:
                    shutil.rmtree(
                        os.path.join(parent, leftover), ignore_errors=True
                    )
    folder = f"{target}.partial-{uuid.uuid4().hex[:16]}"
    os.mkdir(folder)
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[bool]:
    """Locks a folder; yields False if another process has locked it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except OSError:
            # Some file systems do not support locks.
            is_free = False
        yield is_free
    finally:
        os.close(handle)


def _sync(path: str) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: str) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(os.path.join(parent, name))
        _sync(parent)
