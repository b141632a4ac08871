"""Folders to write in, beside what is to be written, and locked meanwhile."""

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

from tf_layoutmap.files import operations, paths

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
        with operations.os_errors(target):
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
