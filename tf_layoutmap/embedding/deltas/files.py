"""A delta's directory: complete and on the disk, or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.deltas import chain
from tf_layoutmap.embedding.deltas import meta as meta_file
from tf_layoutmap.embedding.deltas.chain import Delta
from tf_layoutmap.embedding.deltas.meta import Meta

# What is being written; nobody reads it.
_ASIDE = ".writing-"


def remove_leftovers(directory: str) -> None:
    """Removes what a process that was killed has left half-written."""
    for name in os.listdir(directory):
        if name.startswith(_ASIDE):
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


def write(
    directory: str, sequence: int, tensors: Mapping[str, np.ndarray[Any, Any]],
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
    aside = os.path.join(
        directory, f"{_ASIDE}{chain.name_of(sequence)}-{os.getpid()}")
    os.mkdir(aside)
    try:
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=os.path.join(aside, chain.TENSORS),
                tensor_names=list(tensors),
                shape_and_slices=[""] * len(tensors),
                tensors=list(tensors.values()))
        meta = make_meta({
            name: {"num_bytes": os.path.getsize(os.path.join(aside, name)),
                   "sha256": chain.checksum(os.path.join(aside, name))}
            for name in sorted(os.listdir(aside))})
        with open(os.path.join(aside, meta_file.FILE), "w",
                  encoding="utf-8") as file:
            file.write(meta.to_json())
        for name in os.listdir(aside):
            sync(os.path.join(aside, name))
        sync(aside)
        if os.path.exists(path):
            raise FileExistsError(
                f"{path!r} is there already: another writer has written it.")
        os.rename(aside, path)
        sync(directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Delta(path, meta)


def sync(path: str) -> None:
    """Waits until the disk has a file, or the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
