"""Single operations on files, local or not, which raise `OSError`."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap.files import paths

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
