"""Functions that resolve and compare paths, without TensorFlow."""

from __future__ import annotations

import os

from tf_layoutmap.deltas.served.storage import is_local, local_path


def resolve(path: str) -> str:
    """Returns a path without links, `..` and trailing slashes.

    The path does not have to exist. If the path is not on the local file
    system, only the trailing slash is removed.
    """
    if not is_local(path):
        return path.rstrip("/")
    return os.path.realpath(local_path(path))


def is_same(path: str, other: str) -> bool:
    """Returns whether two paths refer to the same file or folder.

    The paths can be written differently, and can be symbolic or hard links.
    """
    path, other = resolve(path), resolve(other)
    if path == other:
        return True
    try:
        return os.path.samefile(path, other)
    except OSError:  # One of the paths does not exist or is not local.
        return False
