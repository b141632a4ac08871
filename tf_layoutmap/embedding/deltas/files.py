"""A delta's directory: complete and on the disk, or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.deltas import chain
from tf_layoutmap.embedding.deltas import meta as meta_file
from tf_layoutmap.embedding.deltas.chain import Delta
from tf_layoutmap.embedding.deltas.meta import Meta
from tf_layoutmap.files import operations, staging

# What begins the names of folders in which deltas are being written. Programs
# that look for deltas by their numbers do not find them.
_ASIDE = ".writing-"


def remove_leftovers(directory: str) -> None:
    """Removes what processes that were killed have left half-written."""
    for name in os.listdir(directory):
        delta = re.match(re.escape(_ASIDE) + r"\d{8}(?=\.)", name)
        if delta:
            staging.remove_leftovers(os.path.join(directory, delta[0]))


def write(
    directory: str,
    sequence: int,
    tensors: Mapping[str, np.ndarray[Any, Any]],
    make_meta: Callable[[dict[str, dict[str, Any]]], Meta],
) -> Delta:
    """Writes a delta aside, waits until the disk has it, and renames it.

    Args:
      directory: That of all deltas.
      sequence: Its number.
      tensors: By name.
      make_meta: Takes sizes and checksums by name of the file.

    Raises:
      OSError: If it cannot be written, or there is one of this number.
    """
    path = os.path.join(directory, chain.name_of(sequence))
    aside = os.path.join(directory, f"{_ASIDE}{chain.name_of(sequence)}")
    with staging.staged(os.path.abspath(aside)) as folder:
        new = os.path.join(folder, "new")
        os.mkdir(new)
        with tf.device("CPU:0"), operations.os_errors(path):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(new, chain.TENSORS),
                tensor_names=list(tensors),
                shape_and_slices=[""] * len(tensors),
                tensors=list(tensors.values()),
            )
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
            os.path.join(new, meta_file.FILE), "w", encoding="utf-8"
        ) as file:
            file.write(meta.to_json())
        operations.sync_tree(new)
        if os.path.exists(path):
            raise FileExistsError(
                f"{path!r} is there already: another writer has written it."
            )
        os.rename(new, path)
        operations.sync(directory)
    return Delta(path, meta)
