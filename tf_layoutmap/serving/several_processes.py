"""Exports of tables whose rows are in several processes.

All processes call `tlm.export` together. The first process writes the
SavedModel. The other processes send their rows, and write the remaining
variables of the model to a temporary folder, because reading some variables of
a strategy is also a call that all processes must make.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.deltas.writer import DeltaWriter
from tf_layoutmap.embedding import processes
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase
from tf_layoutmap.serving.stored_variable import Blocks


def processes_of(
    tables: Sequence[TableToExport], delta_writer: DeltaWriter | None
) -> processes.Processes | None:
    """Returns the processes that export together, or None.

    Args:
      tables: The tables to export.
      delta_writer: The argument `delta_writer` of `tlm.export`.
    """
    if delta_writer is not None and delta_writer._processes is not None:
        return delta_writer._processes
    for owner in (table.owner for table in tables):
        if isinstance(owner, EmbeddingBase) and LayerAccess(owner).is_sharded:
            return processes.of_strategy(owner._state.replicas.strategy)
    return None


class SharedBlocks:
    """Blocks of rows that all processes read in the same order."""

    def __init__(self, blocks: Sequence[Blocks]):
        """Stores the blocks of each variable."""
        self._stream = _joined(blocks)

    def of_next_variable(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yields the blocks of the next variable."""
        for block in self._stream:
            if block is None:
                return
            yield block

    def read_rest(self) -> None:
        """Reads all remaining blocks, because other processes read them.

        If a block has raised an error, no block remains: the same block has
        raised the error in the other processes, too.
        """
        for _ in self._stream:
            pass


def _joined(
    blocks: Sequence[Blocks],
) -> Iterator[np.ndarray[Any, Any] | None]:
    """Yields the blocks of all variables, and None after each variable."""
    for blocks_of_variable in blocks:
        yield from blocks_of_variable()
        yield None


def write(
    group: processes.Processes,
    save: Callable[[Sequence[Blocks]], int],
    module: tf.Module,
    signatures: Any,
    blocks: Sequence[Blocks],
) -> int:
    """Writes a SavedModel together with the other processes.

    Args:
      group: The processes.
      save: Function that writes the SavedModel from blocks of its variables,
        and returns its size in bytes. Only the first process calls it.
      module: Module with the variables and functions.
      signatures: Same as for `tf.saved_model.save`.
      blocks: Blocks of each variable.

    Returns:
      Size of the SavedModel in bytes.

    Raises:
      OSError: If the SavedModel cannot be written. All processes raise an
        error.
    """
    shared = SharedBlocks(blocks)
    num_bytes, error = 0, None
    try:
        if group.is_first:
            num_bytes = save([shared.of_next_variable for _ in blocks])
        else:
            with tempfile.TemporaryDirectory() as folder:
                tf.saved_model.save(module, folder, signatures=signatures)
    except Exception as caught:
        error = caught
    try:
        shared.read_rest()
    except Exception as caught:
        error = error or caught
    failures = group.gather_texts(processes.describe_error(error))
    processes.raise_errors("tlm.export", error, failures, OSError)
    return int(group.gather_texts(str(num_bytes))[0])
