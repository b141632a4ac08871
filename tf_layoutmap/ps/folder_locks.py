"""Locks a checkpoint folder, so that only one program writes to it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import socket
import weakref

from absl import logging

# Suffix of the lock file, which is next to the folder.
SUFFIX = ".owner"


class FolderLock:
    """A lock of a folder, which is held until the object is freed.

    The operating system releases the lock when the process ends, also if the
    process is killed or replaced by `os.execv`.
    """

    def __init__(self, handle: int):
        """Takes a locked file handle."""
        self._close = weakref.finalize(self, os.close, handle)


# Several objects of one process may use the same folder.
_locks: weakref.WeakValueDictionary[str, FolderLock] = (
    weakref.WeakValueDictionary()
)


def lock(folder: pathlib.Path) -> FolderLock | None:
    """Locks a folder for this process.

    Args:
      folder: An existing folder.

    Returns:
      The lock, which the caller must keep. None if the file system does not
      support locks.

    Raises:
      OSError: If another process has locked the folder. The message names this
        process and its host.
    """
    real = os.path.realpath(folder)
    # If the parent is not writable, the lock file of all programs is in the
    # folder itself.
    path = (
        real + SUFFIX
        if os.access(os.path.dirname(real), os.W_OK)
        else os.path.join(real, SUFFIX)
    )
    if path in _locks:
        return _locks[path]
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(handle, 4096, 0).decode(errors="replace")
        os.close(handle)
        raise OSError(
            errno.EBUSY,
            "Another program writes checkpoints to this folder "
            f"({_describe(owner)}). Two programs would delete each other's "
            "checkpoints: end the other program, or pass another "
            "`checkpoint_dir`",
            str(folder),
        ) from None
    except OSError as error:
        os.close(handle)
        logging.warning(
            "The file system of %s does not support locks (%s). Make sure that "
            "only one program writes checkpoints to it.",
            folder,
            error.strerror,
        )
        return None
    os.ftruncate(handle, 0)
    owner = {"process": os.getpid(), "host": socket.gethostname()}
    os.pwrite(handle, json.dumps(owner).encode(), 0)
    made = _locks[path] = FolderLock(handle)
    return made


def _describe(owner: str) -> str:
    """Returns the content of a lock file in words."""
    try:
        found = json.loads(owner)
        return f"process {found['process']} on host {found['host']}"
    except (ValueError, TypeError, KeyError):
        return "its lock file does not name it yet"
