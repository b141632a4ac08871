"""`StoredVariable`, a variable that is exported in blocks of rows.

The exporting process does not allocate memory for the variable. First,
TensorFlow writes the SavedModel without the value of the variable. Then
`StoredVariable.write` adds the value. Each block of rows becomes a separate
file that contains a slice of the tensor, and the index of the checkpoint lists
all files. A program that loads the SavedModel gets a single variable.

`MeasuredBlocks` packs the rows of tables, and measures how much packing changes
the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import files, slice_specs, tf_private
from tf_layoutmap.deltas.served import packing
from tf_layoutmap.deltas.served.packing import RowFormat
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.serving import sources
from tf_layoutmap.serving.report import TableReport

# A function that yields consecutive rows, starting with the first row.
Blocks = Callable[[], Iterator["np.ndarray[Any, Any]"]]


class StoredVariable(tf_private.Trackable):
    """A variable `[num_rows, form.width]` that only exported graphs have."""

    def __init__(self, name: str, num_rows: int, form: RowFormat):
        """Creates the variable without a value.

        Args:
          name: Name of the variable.
          num_rows: Number of rows.
          form: Format of the stored rows.
        """
        self.name = name
        self.num_rows = num_rows
        self.shape = tf.TensorShape([num_rows, form.width])
        self.form = form
        # The checkpoint key, which is set when TensorFlow writes the
        # checkpoint.
        self._key = ""
        self._block_starts: list[int] = []
        with tf.init_scope(), tf.device("CPU:0"):
            self._exported = tf_private.UninitializedVariable(
                shape=self.shape, dtype=form.dtype, name=name, trainable=False
            )

    @property
    def in_graph(self) -> Any:
        """The variable that exported functions read."""
        return self._exported

    @property
    def key(self) -> str:
        """Key in the checkpoint that TensorFlow has written."""
        return self._key

    @property
    def block_starts(self) -> tuple[int, ...]:
        """First row of each block, after `write`."""
        return tuple(self._block_starts)

    def write(self, prefix: str, blocks: Blocks) -> None:
        """Adds the rows to a checkpoint that TensorFlow has written.

        Args:
          prefix: Prefix of the checkpoint. The checkpoint contains the name of
            the variable, but not its value.
          blocks: Function that yields blocks `[rows of the block, form.width]`.

        Raises:
          OSError: If the rows cannot be written.
        """
        others = f"{prefix}-others"
        with files.os_errors(prefix):
            _rename(prefix, others)
        merge_parts([others, *self.write_parts(prefix, blocks)], prefix)

    def write_parts(self, prefix: str, blocks: Blocks) -> list[str]:
        """Writes each block of rows as a checkpoint that contains a slice.

        Args:
          prefix: The prefixes of the checkpoints are `prefix` with a number.
          blocks: Function that yields blocks `[rows of the block, form.width]`.

        Returns:
          The prefixes of the checkpoints.

        Raises:
          OSError: If the rows cannot be written.
        """
        parts: list[str] = []
        start = 0
        self._block_starts = []
        for block in blocks():
            self._block_starts.append(start)
            parts.append(f"{prefix}-{len(parts) + 1}")
            spec = slice_specs.of_rows(self.shape.as_list(), start, len(block))
            with files.os_errors(prefix):
                tf.raw_ops.SaveV2(
                    prefix=parts[-1],
                    tensor_names=[self._key],
                    shape_and_slices=[spec],
                    tensors=[block],
                )
            start += len(block)
        assert start == self.shape[0], (start, self.shape)
        return parts

    # TensorFlow uses the following methods and properties when it exports a
    # variable.

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def without_value(name: str = self.name) -> _Unwritten:
            self._key = name
            return _Unwritten(self, name)

        return {tf_private.VARIABLE_VALUE_KEY: without_value}

    def _export_to_saved_model_graph(
        self,
        object_map: Any,
        tensor_map: Any,
        options: Any,
        **kwargs: Any,
    ) -> Any:
        handles = self._exported._export_to_saved_model_graph(
            object_map, tensor_map, options, **kwargs
        )
        object_map[self] = object_map[self._exported]
        return handles

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        self._exported._write_object_proto(proto, options)

    @property
    def handle(self) -> tf.Tensor:
        return self._exported.handle

    @property
    def dtype(self) -> tf.DType:
        return self._exported.dtype

    @property
    def device(self) -> str:
        return self._exported.device

    @property
    def _shared_name(self) -> str:
        return self.name

    @property
    def _should_act_as_resource_variable(self) -> bool:
        return True


class _Unwritten(tf_private.SaveableObject):
    """Saveable that adds a variable to the object graph without its value."""

    def __init__(self, variable: StoredVariable, key: str):
        super().__init__(
            None,
            [
                tf_private.SaveSpec(
                    lambda: None, "", key, variable.dtype, variable.device
                )
            ],
            key,
        )


def merge_parts(parts: Sequence[str], prefix: str) -> None:
    """Merges checkpoints, whose data files are moved.

    Args:
      parts: Prefixes of the checkpoints.
      prefix: Prefix of the merged checkpoint.

    Raises:
      OSError: If the merged checkpoint cannot be written.
    """
    with files.os_errors(prefix):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts,
            destination_prefix=prefix,
            delete_old_dirs=False,
        )


def _rename(prefix: str, to: str) -> None:
    for path in files.with_prefix(f"{prefix}."):
        tf.io.gfile.rename(path, to + path[len(prefix) :])


class MeasuredBlocks:
    """Packs the rows of tables that share a variable; measures errors."""

    def __init__(self, tables: Sequence[TableToExport], form: RowFormat):
        """Stores the tables.

        Args:
          tables: Tables, in the order of their rows in the variable.
          form: Format of the stored rows.
        """
        self._tables = tables
        self._form = form
        self._errors: list[tuple[float, float]] = []

    def __call__(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yields all rows in order: blocks `[rows of the block, form.width]`.

        Raises:
          ValueError: If the format cannot represent a row. The error message
            contains the table and the row.
        """
        self._errors = []
        for table in self._tables:
            largest, total, start = 0.0, 0.0, 0
            for rows in sources.blocks_of(table):
                try:
                    stored = packing.pack(rows, self._form)
                except packing.UnfitRowError as error:
                    raise ValueError(
                        f"Table {table.name!r} cannot be stored as "
                        f"{self._form.kind}: row {start + error.row} "
                        f'{error.reason}. Use row_format="float32" for it.',
                    ) from error
                if str(rows.dtype) != self._form.kind:
                    errors = _errors(rows, stored, self._form)
                    largest = max(largest, float(errors.max(initial=0.0)))
                    total += float(errors.sum(dtype=np.float64))
                start += len(rows)
                yield stored
            self._errors.append((largest, total / (start * table.dim)))

    def reports(self) -> list[TableReport]:
        """Returns a report on each table, after all blocks have been read."""
        return [
            TableReport(
                name=table.name,
                num_rows=table.num_rows,
                dim=table.dim,
                row_format=self._form.kind,
                num_bytes=table.num_rows * self._form.row_bytes,
                float32_bytes=table.num_rows * table.dim * 4,
                largest_error=largest,
                mean_error=mean,
            )
            for table, (largest, mean) in zip(self._tables, self._errors)
        ]


def _errors(
    rows: np.ndarray[Any, Any], stored: np.ndarray[Any, Any], form: RowFormat
) -> np.ndarray[Any, Any]:
    """Returns absolute errors; 0 for values that are not finite."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(
            packing.unpack(stored, form) - rows.astype(np.float32, copy=False)
        )
    return np.where(np.isfinite(rows.astype(np.float32)), errors, 0.0)
