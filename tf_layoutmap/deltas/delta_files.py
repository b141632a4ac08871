"""Writes the files of a delta, and removes incomplete deltas."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tf_layoutmap._core import files
from tf_layoutmap.deltas import parts
from tf_layoutmap.deltas.served import chain, storage
from tf_layoutmap.deltas.served.chain import Delta, Meta
from tf_layoutmap.embedding.changes import ChangedValues
from tf_layoutmap.vocabulary import checkpoint_files

Array = np.ndarray[Any, Any]

# Prefix of the directory names of incomplete deltas. A name with this prefix is
# not a number, so `chain.read_deltas` ignores the directory.
_STAGING_PREFIX = ".writing-"


def remove_leftovers(directory: str) -> None:
    """Removes incomplete deltas of processes that were killed.

    On a file system that is not local, incomplete deltas cannot be
    distinguished from deltas that are being written. The next delta with the
    same number replaces them.
    """
    if not storage.is_local(directory):
        return
    directory = storage.local_path(directory)
    for name in os.listdir(directory):
        delta = re.match(
            re.escape(_STAGING_PREFIX) + r"(\d{8}-)?\d{8}(?=\.)", name
        )
        if delta:
            files.remove_leftovers(os.path.join(directory, delta[0]))


def staging_path(path: str) -> str:
    """Returns the target that is passed to `files.staged` for a delta."""
    parent, name = os.path.split(storage.absolute(path))
    return os.path.join(parent, _STAGING_PREFIX + name)


def write_files(
    path: str,
    tensors: Mapping[str, Array | ChangedValues],
    make_meta: Callable[[dict[str, chain.FileOfDelta]], Meta],
) -> Delta:
    """Writes a delta, which readers see completely or not at all.

    Args:
      path: Path of the delta.
      tensors: Tensors of the delta, by name.
      make_meta: Function that takes a value for the attribute `files` of
        `Meta`, and returns the `Meta` of the delta.

    Raises:
      OSError: If the delta cannot be written, or `path` exists.
    """
    with files.staged(staging_path(path)) as folder:
        new = files.new_folder(folder, path, chain.META_FILE)
        prefix = os.path.join(new, chain.TENSORS)
        parts.save(
            folder,
            prefix,
            [
                part
                for name, value in tensors.items()
                for part in parts.slices_of(name, value)
            ],
        )
        meta = make_meta(
            {
                storage.name_of(file): parts.describe(file)
                for file in (
                    *checkpoint_files.files_of(prefix),
                    f"{prefix}.index",
                )
            }
        )
        files.publish_folder(folder, new, path, chain.META_FILE, meta.to_json())
    return Delta(path, meta)
