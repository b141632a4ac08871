"""What a path names: which file system, and whether two name the same place.

Pure: no TensorFlow.
"""

from __future__ import annotations

import os


def is_local(path: str) -> bool:
    """Returns whether a path is one of the local file system."""
    return "://" not in path or path.startswith("file://")


def local_path(path: str) -> str:
    """Returns a local path without the scheme `file://`."""
    return path.removeprefix("file://")


def resolve(path: str) -> str:
    """Returns the path without links, `..` and a slash at its end.

    What is not there yet is resolved, too. The path of another file system
    only loses its slash.
    """
    if not is_local(path):
        return path.rstrip("/")
    return os.path.realpath(local_path(path))


def is_same(one: str, other: str) -> bool:
    """Returns whether two paths name the same file or folder.

    They may be spelled differently, or be links, symbolic or hard.
    """
    one, other = resolve(one), resolve(other)
    if one == other:
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # One of them is not there, or not local.
        return False
