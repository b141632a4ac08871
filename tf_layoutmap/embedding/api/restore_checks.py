"""Refuses a checkpoint before any of its values is written.

TensorFlow assigns the variables of a checkpoint one after the other, so a
shape that does not fit would be found with half of the tables overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.vocabulary import state as vocabulary_state


def check_shapes(
    path: str, attribute: str, variables: Mapping[str, Mapping[str, Any]]
):
    """Raises if the checkpoint holds these tables otherwise only.

    Args:
      path: The checkpoint's prefix.
      attribute: The name of the attribute that holds `variables`.
      variables: `{table name: {variable name: variable}}`.

    Raises:
      ValueError: If a variable of a table has another shape or dtype there,
        or the table has keys here and ids there, or the other way round.
    """
    found = dict(tf.train.list_variables(path))
    dtypes = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    own = {
        key_of(attribute, table, name): (
            table,
            list(variable.shape),
            tf.as_dtype(variable.dtype),
        )
        for table, by_name in variables.items()
        for name, variable in by_name.items()
    }
    # Which object of the checkpoint is ours is not known here, so any whose
    # shapes fit will do: two embeddings may have tables of equal names.
    mismatches: dict[str, str | None] = {}
    for key, shape in found.items():
        suffix = key[key.rfind(f"{attribute}/") :]
        if suffix not in own:
            continue
        prefix = key.removesuffix(suffix)
        mismatches.setdefault(prefix, None)
        table, expected, dtype = own[suffix]
        if shape != expected:
            mismatches[prefix] = (
                f"Table {table!r} must be restored from a tensor of shape "
                f"{expected}. Received: shape {shape} ({key!r} in checkpoint "
                f"{path!r})."
            )
        elif dtypes[key] != dtype:
            mismatches[prefix] = (
                f"Table {table!r} must be restored from a tensor of dtype "
                f"{dtype.name}; `table_dtypes` says how a table is stored. "
                f"Received: {dtypes[key].name} ({key!r} in checkpoint "
                f"{path!r})."
            )
    for prefix in mismatches:
        mismatches[prefix] = (
            _other_vocabulary(found, path, prefix, attribute, variables)
            or mismatches[prefix]
        )
    if mismatches and all(mismatches.values()):
        raise ValueError(next(iter(mismatches.values())))


def _other_vocabulary(
    found: Mapping[str, Any],
    path: str,
    prefix: str,
    attribute: str,
    variables: Mapping[str, Mapping[str, Any]],
) -> str | None:
    """Says which table has other keys than the checkpoint has for it.

    Where one has keys and the other ids, rows would be restored, and belong to
    others.
    """
    for table, by_name in variables.items():
        if prefix + key_of(attribute, table, "parameters") not in found:
            continue
        shapes = [
            None
            if vocabulary_state.KEYS not in by_name
            else list(by_name[vocabulary_state.KEYS].shape),
            found.get(prefix + key_of(attribute, table, vocabulary_state.KEYS)),
        ]
        if shapes[0] == shapes[1]:
            continue
        own, other = (
            "ids that are rows"
            if shape is None
            else "an open vocabulary"
            if None in shapes
            else f"room for {math.prod(shape)} keys"
            for shape in shapes
        )
        return (
            f"Table {table!r} with {own} must be restored from one with "
            f"{own}. Received: one with {other} (checkpoint {path!r}). "
            f"tlm.convert_vocabularies({path!r}, target, {{{table!r}: ...}}) "
            "writes a checkpoint that fits."
        )
    return None


def key_of(*path: str) -> str:
    """Returns the checkpoint's name of what these attributes reach."""
    escaped = [step.replace(".", "..").replace("/", ".S") for step in path]
    return "/".join([*escaped, ".ATTRIBUTES", _tf_private.VARIABLE_VALUE_KEY])
