"""Staging folders, and atomic replacement of files and folders.

Paths may be local or on another file system that TensorFlow supports. Errors
are raised as `OSError`. `deltas/served/storage.py` contains the basic
operations, and documents the guarantees of other file systems.

On the local file system, `replacing_file` and `replacing_folder` yield a path
in a staging folder, which is next to the target. At the end of the block, these
functions rename this path to the target. A staging folder is locked while its
writer is running.

On other file systems, only single files are renamed. A folder is written under
its own path, and readers require its marker: the file that `publish_folder`
writes last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap._core import ops, paths
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.deltas.served.storage import error_number


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Raises TensorFlow's errors about files as `OSError`.

    Args:
      path: Path that is being written, for the error message.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if isinstance(error, RuntimeError):
            # The values to write are on a server that is lost. The error is a
            # `tlm.ps.ServerLostError` or `tlm.ps.StepDeadlineError`.
            raise
        message = re.sub(r"^\{\{.*?\}\} | \[Op:\w+\].*$", "", error.message)
        raise OSError(error_number(error), message, path) from None


def with_prefix(prefix: str) -> list[str]:
    """Returns the paths that start with `prefix`, which is not a pattern.

    `tf.io.gfile.glob` would interpret `[`, `]`, `*`, `?` and a backslash in the
    names of folders.

    Args:
      prefix: Path of a folder, and the start of the names in this folder.
    """
    folder, start = os.path.split(prefix)
    if not tf.io.gfile.isdir(folder or "."):
        return []
    return [
        os.path.join(folder, name)
        for name in sorted(tf.io.gfile.listdir(folder or "."))
        if name.startswith(start)
    ]


def make_parent(path: str) -> None:
    """Creates the parent folder of a path if it does not exist.

    Raises:
      OSError: If the folder cannot be created.
    """
    with os_errors(path):
        tf.io.gfile.makedirs(os.path.dirname(path) or ".")


def make_new(path: str) -> bool:
    """Creates an empty file; returns False if the path already exists.

    If several processes call this function for the same path on a local file
    system, only one of them creates the file.

    Raises:
      OSError: If the file cannot be created.
    """
    if not paths.is_local(path):
        return not tf.io.gfile.exists(path)
    try:
        os.close(
            os.open(
                paths.local_path(path),
                os.O_CREAT | os.O_EXCL | os.O_WRONLY,
                0o666,
            )
        )
    except FileExistsError:
        return False
    return True


def sync(path: str) -> None:
    """Flushes a local file, or the entries of a local folder, to disk."""
    if not paths.is_local(path):
        return
    handle = os.open(paths.local_path(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: str) -> None:
    """Flushes a local folder and its contents to disk."""
    if not paths.is_local(folder):
        return
    for parent, _, names in os.walk(paths.local_path(folder), topdown=False):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)


# The name of a staging folder is the name of its target, followed by this
# suffix.
_STAGED = r"\.partial-[0-9a-f]{16}"
# Name of the replaced folder inside the staging folder; see `replace_folder`.
OLD = "old"


@contextlib.contextmanager
def staged(target: str, *, alone: bool = False) -> Iterator[str]:
    """Yields an empty staging folder, and removes it afterwards.

    The folder is next to the target, so that its contents can be renamed to the
    target. The staging folder is locked until the block or the process ends.
    Before a staging folder is created, folders of writers that have ended are
    removed.

    If the target is not on the local file system, there are no locks. Folders
    of writers that were killed remain, and `alone` has no effect.

    Args:
      target: Resolved path that will be written.
      alone: Whether to raise an error if another writer writes the same target.

    Raises:
      OSError: If the folder cannot be created, or `alone` is True and there is
        another writer.
    """
    if not paths.is_local(target):
        folder = f"{target}.partial-{_token()}"
        storage.make_folders(folder)
        try:
            yield folder
        finally:
            storage.remove_tree(folder)
        return
    folder, handle = _make_locked(target)
    try:
        others = remove_leftovers(target, besides=folder)
        if alone and others:
            raise OSError(
                errno.EBUSY,
                f"another process or thread is writing it, in {others[0]!r}",
                target,
            )
        yield folder
    finally:
        _discard(folder, target)
        os.close(handle)


def remove_leftovers(target: str, besides: str = "") -> list[str]:
    """Removes the staging folders of writers that were killed.

    Args:
      target: Target of the writers, on the local file system.
      besides: Staging folder that must not be removed.

    Returns:
      Staging folders whose writers are still running.
    """
    parent, name = os.path.split(target)
    alive: list[str] = []
    for leftover in sorted(os.listdir(parent or ".")):
        if not re.fullmatch(re.escape(name) + _STAGED, leftover):
            continue
        path = os.path.join(parent, leftover)
        if path != besides and not _remove_if_abandoned(path, target):
            alive.append(path)
    return alive


def _token() -> str:
    return uuid.uuid4().hex[:16]


def _make_locked(target: str) -> tuple[str, int]:
    """Creates a staging folder; returns it and the handle that locks it."""
    while True:
        folder = f"{target}.partial-{_token()}"
        os.mkdir(folder)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # Another writer has removed the folder as a leftover.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            continue  # Another writer is removing the folder as a leftover.
        except OSError:
            # The file system does not support locks. On such file systems,
            # writers do not remove the staging folders of other writers.
            pass
        if os.path.isdir(folder):
            return folder, handle
        os.close(handle)


def _remove_if_abandoned(path: str, target: str) -> bool:
    """Removes a staging folder; returns False if its writer is running."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # The folder was removed, or is not a staging folder.
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Without locks, the state of the writer is unknown.
        return True
    else:
        _discard(path, target)
        return True
    finally:
        os.close(handle)


def _discard(folder: str, target: str) -> None:
    """Removes a staging folder; first restores the target if it is missing."""
    old = os.path.join(folder, OLD)
    with contextlib.suppress(OSError):
        if os.path.isdir(old) and not os.path.lexists(target):
            os.rename(old, target)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def replacing_file(path: str) -> Iterator[str]:
    """Yields the path of a new file that replaces `path` afterwards.

    If `path` is a link, the file that it points to is replaced. If the block
    fails, nothing is changed.

    Raises:
      OSError: If the file cannot be written.
    """
    target = paths.resolve(path)
    with staged(target) as folder:
        new = os.path.join(folder, os.path.basename(target))
        yield new
        sync(new)
        storage.rename(new, target)
        sync(os.path.dirname(target))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` to a file, which replaces an existing file atomically."""
    with replacing_file(os.fspath(path)) as new:
        storage.write_text(new, text)


@contextlib.contextmanager
def replacing_folder(path: str, marker: str) -> Iterator[str]:
    """Yields the path of a new folder that replaces `path` afterwards.

    If `path` is a link, the folder that it points to is replaced. If the block
    fails, nothing is changed.

    If `path` is not on the local file system, the block receives `path` itself,
    after the old folder was removed, and must write the marker under the name
    `{marker}.partial`. This function then renames the marker. If the block
    fails, the folder is removed. If the process is killed, the folder has no
    marker, and readers reject it. If another writer starts to write the folder,
    this function raises an error.

    Args:
      path: The folder.
      marker: Name of a file in the folder that readers require.

    Raises:
      OSError: If the folder cannot be written.
    """
    target = paths.resolve(path)
    make_parent(target)
    if paths.is_local(target):
        with staged(target) as folder:
            new = os.path.join(folder, "new")
            yield new
            replace_folder(new, target)
        return
    token = storage.begin_folder(target, marker)
    try:
        yield target
        storage.end_folder(target, marker, token)
    except BaseException:
        with contextlib.suppress(OSError):
            if storage.is_writer(target, token):
                storage.remove_tree(target, marker)
        raise


def new_folder(staging: str, path: str, marker: str) -> str:
    """Creates a folder that `publish_folder` completes, and returns its path.

    If `path` is not on the local file system, a file in the folder contains the
    path of the staging folder, which is different for each writer.

    Args:
      staging: Staging folder, next to `path`.
      path: Path of the complete folder.
      marker: Name of the file that `publish_folder` will write.

    Raises:
      FileExistsError: If `path` exists, and is not local.
      OSError: If the folder cannot be created.
    """
    if paths.is_local(path):
        new = os.path.join(staging, "new")
        os.mkdir(new)
        return new
    _check_not_published(path, marker)
    # Files of a writer that was killed may remain.
    storage.remove_tree(path)
    storage.make_folders(path)
    storage.write_text(os.path.join(path, storage.INCOMPLETE), staging)
    return path


def _check_not_published(path: str, marker: str = "") -> None:
    if (
        storage.is_file(os.path.join(path, marker))
        if marker
        else storage.exists(path)
    ):
        raise FileExistsError(
            f"{path!r} already exists: another writer has written it."
        )


def publish_folder(
    staging: str, new: str, path: str, marker: str, content: str
) -> None:
    """Writes the last file of a folder, and renames the folder to its path.

    Readers see the folder completely or not at all. If the path is not on the
    local file system, the folder is not renamed.

    Args:
      staging: Same as for `new_folder`.
      new: Result of `new_folder`.
      path: Path of the complete folder.
      marker: Name of the last file, which readers require.
      content: Contents of the last file.

    Raises:
      OSError: If the file cannot be written, if `path` exists, or if another
        writer has called `new_folder` with the same path.
    """
    file = os.path.join(new, marker)
    if not paths.is_local(path):
        _check_not_published(path, marker)
        storage.write_text(f"{file}.partial", content)
        storage.end_folder(path, marker, staging)
        return
    storage.write_text(file, content)
    sync_tree(new)
    _check_not_published(path)
    os.rename(new, path)
    sync(os.path.dirname(os.path.abspath(path)))


def replace_folder(new: str, target: str) -> None:
    """Replaces `target` with a folder, after flushing the folder to disk.

    If the file system can exchange two folders in one operation, this operation
    is used. Most local file systems of Linux support this operation. Otherwise,
    `target` does not exist for a moment. If this process is killed at that
    moment, the next writer restores the old folder.

    Args:
      new: New folder, inside the staging folder of `target`.
      target: Resolved path to replace, on the local file system.

    Raises:
      OSError: If the folder cannot be replaced. `target` is unchanged.
    """
    sync_tree(new)
    try:
        # The rename succeeds if `target` does not exist or is an empty folder.
        os.rename(new, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        try:
            ops.exchange_paths(new, target)
        except OSError as exchange_error:
            if exchange_error.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
            old = os.path.join(os.path.dirname(new), OLD)
            os.rename(target, old)
            try:
                os.rename(new, target)
            except BaseException:
                os.rename(old, target)
                raise
    sync(os.path.dirname(target))
