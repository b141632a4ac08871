"""`apply`: writes a full checkpoint from a base and its deltas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tf_layoutmap._core import checks
from tf_layoutmap.deltas import base as base_file
from tf_layoutmap.deltas import weights
from tf_layoutmap.deltas.served import chain
from tf_layoutmap.vocabulary import checkpoint_files


def apply(
    base: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
) -> str:
    """Writes the full checkpoint that results from a base and its deltas.

    The tables in the new checkpoint are bitwise identical to the tables in a
    checkpoint that is saved when the last delta is written. The tables include
    rows, slot variables, and the keys of open vocabularies after all admissions
    and evictions. The same applies to the weights that the deltas contain: the
    variables of the models, of `root`, and of their optimizers that the base
    contains. All other variables are copied from the base. The function
    reads and checks all deltas before it writes a file. The function holds only
    one variable at a time in memory.

    Args:
      base: Prefix of the checkpoint that was passed to
        `tlm.deltas.DeltaWriter`.
      directory: Directory of the deltas.
      target: Prefix of the new checkpoint. By default `full-{sequence number}`
        in `directory`. If a checkpoint with this prefix exists, the function
        replaces it after the new checkpoint is complete. If the process is
        killed, a complete checkpoint still exists: the old one or the new one.

    Returns:
      The prefix `target`, which a program can pass to
      `tf.train.Checkpoint.restore`.

    Raises:
      ValueError: If a delta is missing, occurs twice, has another base, or is
        truncated or modified. The function also raises this error if `target`
        is `base` or a delta, directly or through a link. The message names the
        delta, and no file is written.
      OSError: If `target` cannot be written, or another process is writing
        `target`. After this error, an existing checkpoint is unchanged.
    """
    base, directory = checkpoint_files.prefix_of(base), os.fspath(directory)
    deltas = chain.read_deltas(directory, base)
    target = checkpoint_files.prefix_of(
        os.path.join(
            directory,
            f"full-{chain.directory_name(chain.last_sequence(deltas))}",
        )
        if target is None
        else target
    )
    if checkpoint_files.is_same_checkpoint(base, target):
        raise ValueError(
            checks.message(
                "target", "a prefix that differs from `base`", target
            )
        )
    for delta in deltas:
        if checkpoint_files.is_same_checkpoint(delta.tensors, target):
            raise ValueError(
                checks.message(
                    "target",
                    "a prefix that differs from all deltas",
                    target,
                    delta.path,
                )
            )
    checkpoint_files.write_checkpoint(target, _tensors(base, deltas))
    return target


def _tensors(
    base: str,
    deltas: list[chain.Delta],
) -> Iterator[tuple[str, Any]]:
    """Yields the key and the value of each tensor in the full checkpoint."""
    reader = base_file.open_checkpoint(base)
    tables = {}
    if deltas:
        meta = deltas[0].meta
        for table, of_table in meta.tables.items():
            prefix, saved_as = meta.in_base(table)
            for name in of_table["variables"]:
                tables[
                    prefix
                    + checkpoint_files.key_of(
                        base_file.ATTRIBUTE, saved_as, name
                    )
                ] = table, name
    labels = {
        described["key"]: label
        for delta in deltas
        for label, described in delta.meta.weights.items()
    }
    for key in sorted(reader.get_variable_to_shape_map()):
        yield (
            key,
            (
                base_file.read_variable(reader, key, deltas, *tables[key])
                if key in tables
                else _read_weight(reader, key, deltas, labels.get(key))
            ),
        )


def _read_weight(
    reader: Any, key: str, deltas: list[chain.Delta], label: str | None
) -> Any:
    """Returns the value of a variable that is not in a table."""
    value = None if label is None else weights.read_changed(label, deltas)
    return base_file.read_tensor(reader, key) if value is None else value
