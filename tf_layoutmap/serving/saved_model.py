"""Writes a SavedModel whose tables are written block by block, or nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.files import operations
from tf_layoutmap.serving.tables.stored_variable import Blocks, StoredVariable

# What `tf.saved_model.load` looks for.
_MODEL = "saved_model.pb"


def write(
    module: tf.Module,
    signatures: Any,
    folder: str,
    variables: Sequence[tuple[StoredVariable, Blocks]],
) -> None:
    """Writes a SavedModel into an empty folder.

    Args:
      module: Has the variables and functions.
      signatures: As of `tf.saved_model.save`.
      folder: Where to.
      variables: Those whose values come in blocks, attributes of `module`.

    Raises:
      OSError: If it cannot be written.
    """
    with operations.os_errors(folder):
        tf.saved_model.save(module, folder, signatures=signatures)
    prefix = os.path.join(folder, "variables", "variables")
    for variable, blocks in variables:
        variable.write(prefix, blocks)
    with operations.os_errors(folder):
        _tf_private.write_fingerprint(folder)


def check_target(path: str) -> None:
    """Refuses a folder whose files an export would remove.

    Raises:
      ValueError: If there is something that is no SavedModel.
    """
    if not tf.io.gfile.exists(path):
        return
    if tf.io.gfile.isdir(path) and (
        not tf.io.gfile.listdir(path)
        or tf.io.gfile.exists(os.path.join(path, _MODEL))
    ):
        return
    raise ValueError(
        "Argument `path` must be a folder that is new, empty or a SavedModel, "
        f"which is replaced. Received: {path!r}."
    )


def num_bytes(folder: str) -> int:
    """Returns the size of all files in a folder."""
    return sum(
        tf.io.gfile.stat(os.path.join(parent, name)).length
        for parent, _, names in tf.io.gfile.walk(folder)
        for name in names
    )
