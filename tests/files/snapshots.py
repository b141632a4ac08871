"""Records the folder states that a killed process could leave behind."""

import contextlib
import os
import shutil

from tf_layoutmap._core import ops

# These operations create, rename, remove or flush files.
_OPERATIONS = (
    "fsync",
    "mkdir",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "unlink",
)


class Snapshots:
    """Copies of a folder, taken before and after each file operation.

    Attributes:
      folders: The copies. Each has the state that SIGKILL would leave behind at
        this time.
      calls: The operations as pairs of name and first argument.
    """

    def __init__(self, folder, copies):
        self._folder, self._copies = folder, copies
        self._is_copying = False
        self.folders, self.calls = [], []

    def take(self):
        """Copies the folder."""
        self._is_copying = True
        try:
            copy = self._copies / f"{len(self.folders):04d}"
            shutil.copytree(self._folder, copy, symlinks=True)
            self.folders.append(copy)
        finally:
            self._is_copying = False

    def _around(self, name, function):
        def call(*args, **kwargs):
            if self._is_copying:
                return function(*args, **kwargs)
            self.calls.append((name, args[0]))
            self.take()
            found = function(*args, **kwargs)
            self.take()
            return found

        return call

    @contextlib.contextmanager
    def of_operations(self, monkeypatch):
        """Copies the folder before and after each file operation."""
        with monkeypatch.context() as patched:
            for module, names in (
                (os, _OPERATIONS),
                (ops, ("exchange_paths",)),
            ):
                for name in names:
                    patched.setattr(
                        module, name, self._around(name, getattr(module, name))
                    )
            yield self
