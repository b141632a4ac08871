"""Locks a checkpoint folder, so that only one program writes to it.

On the local file system, the operating system locks a file. Other file systems
of TensorFlow have no locks, and cannot create a file exclusively. There, the
program that was started last owns the folder, and the program that owned it
before raises an error at its next checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import uuid
import weakref

from absl import logging

from tf_layoutmap._core import files
from tf_layoutmap.deltas.served import storage

# Suffix of the lock file, which is next to the folder. On other file systems
# than local ones, the folder contains a file with this name.
SUFFIX = ".owner"


class FolderLock:
    """A lock of a folder, which is held until the object is freed.

    The operating system releases the lock when the process ends, also if the
    process is killed or replaced by `os.execv`.
    """

    def __init__(self, handle: int):
        """Takes a locked file handle."""
        self._close = weakref.finalize(self, os.close, handle)

    def check(self) -> None:
        """Does nothing: the lock cannot be lost."""


class FolderClaim:
    """A claim on a folder that is not local, until another program claims it.

    The claim is a file with a random token. Between two calls of `check`,
    another program can claim the folder.
    """

    def __init__(self, folder: str):
        """Claims a folder.

        Raises:
          OSError: If the file cannot be written.
        """
        self._folder = folder
        self._path = os.path.join(folder, SUFFIX)
        self._token = uuid.uuid4().hex
        self.claim()

    def claim(self) -> None:
        """Claims the folder, also if another program has claimed it.

        Raises:
          OSError: If the file cannot be written.
        """
        if storage.is_file(self._path):
            owner = storage.read_text(self._path)
            if self._token in owner:
                return
            logging.info(
                "Claiming %s, which was claimed before (%s).",
                self._folder,
                _describe(owner),
            )
        self._write()

    def check(self) -> None:
        """Checks that no other program has claimed the folder.

        Raises:
          OSError: If another program has claimed the folder. The message names
            this process and its host.
        """
        try:
            owner = storage.read_text(self._path)
        except FileNotFoundError:
            self._write()
            return
        if self._token not in owner:
            raise OSError(
                errno.EBUSY,
                "Another program was started with this folder "
                f"({_describe(owner)}), and only the program that was started "
                "last writes checkpoints. End one of the programs, or pass "
                "another `checkpoint_dir`",
                self._folder,
            )

    def _write(self) -> None:
        files.write_text(
            self._path, json.dumps({**_this_program(), "token": self._token})
        )


def _this_program() -> dict[str, object]:
    return {"process": os.getpid(), "host": socket.gethostname()}


# Several objects of one process may use the same folder.
_locks: weakref.WeakValueDictionary[str, FolderLock | FolderClaim] = (
    weakref.WeakValueDictionary()
)


def lock(folder: str) -> FolderLock | FolderClaim | None:
    """Locks a folder for this process.

    Args:
      folder: An existing folder.

    Returns:
      The lock, which the caller must keep. None if the local file system does
      not support locks.

    Raises:
      OSError: If another process has locked the folder. The message names this
        process and its host.
    """
    if not storage.is_local(folder):
        claim = _locks.get(folder)
        if isinstance(claim, FolderClaim):
            # Another program may have claimed the folder since then.
            claim.claim()
        else:
            claim = _locks[folder] = FolderClaim(folder)
        return claim
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
    os.pwrite(handle, json.dumps(_this_program()).encode(), 0)
    made = _locks[path] = FolderLock(handle)
    return made


def _describe(owner: str) -> str:
    """Returns the content of a lock file in words."""
    try:
        description = json.loads(owner)
        return f"process {description['process']} on host {description['host']}"
    except (ValueError, TypeError, KeyError):
        return "its lock file does not name it yet"
