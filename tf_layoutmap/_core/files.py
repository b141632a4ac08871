"""Single operations on files, local or not, which raise `OSError`."""

# DOC-MERGE: Folders to write in, beside what is to be written, and locked meanwhile.
# DOC-MERGE: Puts new files and folders in the place of others, at once.
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

_ERROR_NUMBERS = {
    tf.errors.AlreadyExistsError: errno.EEXIST,
    tf.errors.NotFoundError: errno.ENOENT,
    tf.errors.OutOfRangeError: errno.EFBIG,
    tf.errors.PermissionDeniedError: errno.EACCES,
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
}


def error_number(error: tf.errors.OpError) -> int:
    """Returns the `errno` of TensorFlow's error about a file."""
    return _ERROR_NUMBERS.get(type(error), errno.EIO)


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Raises TensorFlow's errors about files as `OSError`.

    Args:
      path: What is being written, for the message.
    """
    try:
        yield
    except tf.errors.OpError as error:
        message = re.sub(r"^\{\{.*?\}\} | \[Op:\w+\].*$", "", error.message)
        raise OSError(error_number(error), message, path) from None


def make_parent(path: str) -> None:
    """Makes the folder that a path is in, if it is not there.

    Raises:
      OSError: If it cannot be made.
    """
    with os_errors(path):
        tf.io.gfile.makedirs(os.path.dirname(path) or ".")


def make_new(path: str) -> bool:
    """Makes an empty file; returns False if something is there already.

    Of several processes only one makes it, on a local file system.

    Raises:
      OSError: If it cannot be made.
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


def rename(old: str, new: str) -> None:
    """Renames a file; one that is at `new` is replaced, as is a link.

    Raises:
      OSError: If it cannot be done.
    """
    if paths.is_local(new):
        os.replace(paths.local_path(old), paths.local_path(new))
        return
    with os_errors(new):
        tf.io.gfile.rename(old, new, overwrite=True)


def remove(path: str) -> None:
    """Removes a file; it may be gone already.

    Raises:
      OSError: If it cannot be done.
    """
    with contextlib.suppress(FileNotFoundError):
        if paths.is_local(path):
            os.remove(paths.local_path(path))
            return
        with os_errors(path):
            tf.io.gfile.remove(path)


def sync(path: str) -> None:
    """Waits until the disk has a local file, or the names in a folder."""
    if not paths.is_local(path):
        return
    handle = os.open(paths.local_path(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: str) -> None:
    """Waits until the disk has a local folder and all that is in it."""
    if not paths.is_local(folder):
        return
    for parent, _, names in os.walk(paths.local_path(folder), topdown=False):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)


# What follows the target's name in the name of a staging folder.
_STAGED = r"\.partial-[0-9a-f]{16}"
# Where `replace_folder` puts what it replaces, in the staging folder.
OLD = "old"


@contextlib.contextmanager
def staged(target: str, *, alone: bool = False) -> Iterator[str]:
    """Gives an empty folder to write in, and removes it afterwards.

    It is beside the target, so that what is in it can be renamed, and locked
    until the block ends or the process does. Folders of processes that have
    ended are removed first.

    Args:
      target: What is to be written, resolved.
      alone: Whether to refuse two writers of the target at a time.

    Raises:
      OSError: If the folder cannot be made; or `alone`, and there is another
        writer.
    """
    if not paths.is_local(target):
        folder = f"{target}.partial-{_token()}"
        with os_errors(target):
            tf.io.gfile.makedirs(folder)
        try:
            yield folder
        finally:
            with contextlib.suppress(tf.errors.OpError):
                if tf.io.gfile.exists(target) or not tf.io.gfile.exists(
                    os.path.join(folder, OLD)
                ):
                    tf.io.gfile.rmtree(folder)
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
    """Removes what writers of a target left when they were killed.

    Args:
      target: What they were to write, on the local file system.
      besides: A staging folder that stays.

    Returns:
      Staging folders whose writers are alive.
    """
    parent, name = os.path.split(target)
    alive: list[str] = []
    for leftover in sorted(os.listdir(parent or ".")):
        if not re.fullmatch(re.escape(name) + _STAGED, leftover):
            continue
        path = os.path.join(parent, leftover)
        if path != besides and not _removed(path, target):
            alive.append(path)
    return alive


def _token() -> str:
    return uuid.uuid4().hex[:16]


def _make_locked(target: str) -> tuple[str, int]:
    """Makes a staging folder; returns it and the handle that locks it."""
    while True:
        folder = f"{target}.partial-{_token()}"
        os.mkdir(folder)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # Another writer took it for a leftover.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            continue  # The same.
        except OSError:
            pass  # A network file system without locks: no writer removes it.
        if os.path.isdir(folder):
            return folder, handle
        os.close(handle)


def _removed(path: str, target: str) -> bool:
    """Removes a leftover; returns False if its writer is alive."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # It has gone, or is no staging folder.
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # It cannot be locked, so nothing is known of its writer.
        return True
    else:
        _discard(path, target)
        return True
    finally:
        os.close(handle)


def _discard(folder: str, target: str) -> None:
    """Removes a staging folder; puts back what it has instead of the target."""
    old = os.path.join(folder, OLD)
    with contextlib.suppress(OSError):
        if os.path.isdir(old) and not os.path.lexists(target):
            os.rename(old, target)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def replacing_file(path: str) -> Iterator[str]:
    """Gives a path of a file that takes the place of `path` afterwards.

    A link stays one, and the file that it points to is replaced. If the block
    fails, all is as it was.

    Raises:
      OSError: If it cannot be written.
    """
    target = paths.resolve(path)
    with staged(target) as folder:
        new = os.path.join(folder, os.path.basename(target))
        yield new
        sync(new)
        rename(new, target)
        sync(os.path.dirname(target))


@contextlib.contextmanager
def replacing_folder(path: str) -> Iterator[str]:
    """Gives a path of a folder that takes the place of `path` afterwards.

    A link stays one, and the folder that it points to is replaced. If the
    block fails, all is as it was.

    Raises:
      OSError: If it cannot be written.
    """
    target = paths.resolve(path)
    make_parent(target)
    with staged(target) as folder:
        new = os.path.join(folder, "new")
        yield new
        replace_folder(new, target)


def replace_folder(new: str, target: str) -> None:
    """Puts a folder at a path, once the disk has all of it.

    Both folders change places in one operation where the file system can do
    that, as Linux' own can. Elsewhere nothing is at `target` for a moment; the
    next writer puts back what was there if this one is killed then.

    Args:
      new: The folder, in the staging folder of `target`.
      target: Where to, resolved.

    Raises:
      OSError: If it cannot be done. `target` is as it was.
    """
    if not paths.is_local(target):
        _replace_remote_folder(new, target)
        return
    sync_tree(new)
    try:
        os.rename(new, target)  # Where nothing is, or an empty folder.
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        try:
            ops.exchange_paths(new, target)
        except OSError as refused:
            if refused.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
            old = os.path.join(os.path.dirname(new), OLD)
            os.rename(target, old)
            try:
                os.rename(new, target)
            except BaseException:
                os.rename(old, target)
                raise
    sync(os.path.dirname(target))


def _replace_remote_folder(new: str, target: str) -> None:
    with os_errors(target):
        if not tf.io.gfile.exists(target):
            tf.io.gfile.rename(new, target)
            return
        old = os.path.join(os.path.dirname(new), OLD)
        tf.io.gfile.rename(target, old)
        try:
            tf.io.gfile.rename(new, target)
        except BaseException:
            tf.io.gfile.rename(old, target)
            raise
