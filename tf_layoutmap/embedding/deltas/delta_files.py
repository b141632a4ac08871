"""Writes the files of a delta, and removes incomplete deltas."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tf_layoutmap._core import files
from tf_layoutmap.embedding.deltas import server_parts
from tf_layoutmap.embedding.servers.changes import ServerValues
from tf_layoutmap.serving_deltas import chain
from tf_layoutmap.serving_deltas.chain import Delta, Meta

Array = np.ndarray[Any, Any]

# Prefix of the directory names of incomplete deltas. A name with this prefix is
# not a number, so `chain.read_deltas` ignores the directory.
_STAGING_PREFIX = ".writing-"


def remove_leftovers(directory: str) -> None:
    """Removes incomplete deltas of processes that were killed."""
    for name in os.listdir(directory):
        delta = re.match(
            re.escape(_STAGING_PREFIX) + r"(\d{8}-)?\d{8}(?=\.)", name
        )
        if delta:
            files.remove_leftovers(os.path.join(directory, delta[0]))


def staging_path(path: str) -> str:
    """Returns the target that is passed to `files.staged` for a delta."""
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, _STAGING_PREFIX + name)


def write_files(
    path: str,
    tensors: Mapping[str, Array | ServerValues],
    make_meta: Callable[[dict[str, dict[str, Any]]], Meta],
) -> Delta:
    """Writes a delta to a staging directory, and then renames the directory.

    Args:
      path: Path of the delta.
      tensors: Tensors of the delta, by name.
      make_meta: Function that takes a value for the attribute `files` of
        `Meta`, and returns the `Meta` of the delta.

    Raises:
      OSError: If the delta cannot be written, or `path` exists.
    """
    with files.staged(staging_path(path)) as folder:
        new = os.path.join(folder, "new")
        os.mkdir(new)
        server_parts.save(folder, os.path.join(new, chain.TENSORS), tensors)
        meta = make_meta(
            {
                name: {
                    "num_bytes": os.path.getsize(os.path.join(new, name)),
                    "sha256": chain.checksum(os.path.join(new, name)),
                }
                for name in sorted(os.listdir(new))
            }
        )
        with open(
            os.path.join(new, chain.META_FILE), "w", encoding="utf-8"
        ) as file:
            file.write(meta.to_json())
        files.sync_tree(new)
        if os.path.exists(path):
            raise FileExistsError(
                f"{path!r} already exists: another writer has written it."
            )
        os.rename(new, path)
        files.sync(os.path.dirname(os.path.abspath(path)))
    return Delta(path, meta)
