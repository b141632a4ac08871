"""`apply_deltas`: a whole checkpoint from a base and what changed since."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tf_layoutmap._core import checks
from tf_layoutmap.embedding import checkpointing
from tf_layoutmap.embedding.deltas import base as base_file
from tf_layoutmap.embedding.deltas import chain
from tf_layoutmap.vocabulary import checkpoint_files


def apply_deltas(
    base: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
) -> str:
    """Writes the checkpoint that a base and its deltas make up.

    It holds to the bit what a checkpoint would have held when the last delta
    was written: rows, slot variables, and of open vocabularies the keys and
    who was admitted and evicted. All else is as in the base. All deltas are
    read and checked before anything is written, and one variable at a time
    is in memory.

    Args:
      base: Prefix of the checkpoint that `tlm.DeltaWriter` was given.
      directory: Where it wrote.
      target: Prefix of the new checkpoint. None: `full-{sequence number}` in
        `directory`. A checkpoint there is replaced at the end: also of a
        process that is killed, the old or the new one is left.

    Returns:
      `target`, which `tf.train.Checkpoint.restore` takes.

    Raises:
      ValueError: If a delta is missing, comes twice, is of another base, or
        was cut or altered; it says which, and nothing is written. Or if
        `target` is `base` or a delta, maybe by a link.
      OSError: If it cannot be written, or is being written by another
        process; a checkpoint that was there before is as it was.
    """
    base, directory = checkpoint_files.prefix_of(base), os.fspath(directory)
    deltas = chain.read(directory, base)
    target = checkpoint_files.prefix_of(
        os.path.join(directory, f"full-{chain.name_of(len(deltas))}")
        if target is None
        else target
    )
    if checkpoint_files.is_same_checkpoint(base, target):
        raise ValueError(
            checks.message("target", "another prefix than `base`", target)
        )
    for delta in deltas:
        if checkpoint_files.is_same_checkpoint(delta.tensors, target):
            raise ValueError(
                checks.message(
                    "target",
                    "another prefix than that of a delta",
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
    reader = base_file.reader_of(base)
    tables = {}
    if deltas:
        meta = deltas[0].meta
        for table, of_table in meta.tables.items():
            prefix, saved_as = meta.in_base(table)
            for name in of_table["variables"]:
                tables[
                    prefix
                    + checkpointing.key_of(base_file.ATTRIBUTE, saved_as, name)
                ] = table, name
    for key in sorted(reader.get_variable_to_shape_map()):
        yield (
            key,
            (
                base_file.read(reader, key, deltas, *tables[key])
                if key in tables
                else base_file.read_tensor(reader, key)
            ),
        )
