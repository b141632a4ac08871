"""Puts new files and folders in the place of others, at once."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.files import operations, paths, staging


@contextlib.contextmanager
def replacing_file(path: str) -> Iterator[str]:
    """Gives a path of a file that takes the place of `path` afterwards.

    A link stays one, and the file that it points to is replaced. If the block
    fails, all is as it was.

    Raises:
      OSError: If it cannot be written.
    """
    target = paths.resolve(path)
    with staging.staged(target) as folder:
        new = os.path.join(folder, os.path.basename(target))
        yield new
        operations.sync(new)
        operations.rename(new, target)
        operations.sync(os.path.dirname(target))


@contextlib.contextmanager
def replacing_folder(path: str) -> Iterator[str]:
    """Gives a path of a folder that takes the place of `path` afterwards.

    A link stays one, and the folder that it points to is replaced. If the
    block fails, all is as it was.

    Raises:
      OSError: If it cannot be written.
    """
    target = paths.resolve(path)
    operations.make_parent(target)
    with staging.staged(target) as folder:
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
    operations.sync_tree(new)
    try:
        os.rename(new, target)  # Where nothing is, or an empty folder.
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        try:
            _ops.exchange_paths(new, target)
        except OSError as refused:
            if refused.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
            old = os.path.join(os.path.dirname(new), staging.OLD)
            os.rename(target, old)
            try:
                os.rename(new, target)
            except BaseException:
                os.rename(old, target)
                raise
    operations.sync(os.path.dirname(target))


def _replace_remote_folder(new: str, target: str) -> None:
    with operations.os_errors(target):
        if not tf.io.gfile.exists(target):
            tf.io.gfile.rename(new, target)
            return
        old = os.path.join(os.path.dirname(new), staging.OLD)
        tf.io.gfile.rename(target, old)
        try:
            tf.io.gfile.rename(new, target)
        except BaseException:
            tf.io.gfile.rename(old, target)
            raise
