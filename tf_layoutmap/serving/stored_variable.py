"""A variable that only an exported graph has, written in blocks of rows.

It has no memory here. TensorFlow writes the SavedModel without its value, and
`write` adds that: each block becomes a file of its own, a slice of the tensor,
and the checkpoint's index names them all. Whoever reads the SavedModel sees
one variable.
"""

# DOC-MERGE: Tables as blocks of a variable, packed, and the error that packing makes.
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import files, tf_private
from tf_layoutmap.serving import packing
from tf_layoutmap.serving.packing import RowFormat
from tf_layoutmap.serving.report import TableReport
from tf_layoutmap.serving.sources import Source

# Yields neighbouring rows, from the first on.
Blocks = Callable[[], Iterator["np.ndarray[Any, Any]"]]


class StoredVariable(tf_private.Trackable):
    """Stands for a variable `[num_rows, form.width]` of an exported graph."""

    def __init__(self, name: str, num_rows: int, form: RowFormat):
        """Takes what the variable is to be.

        Args:
          name: Of the variable.
          num_rows: Its rows.
          form: How they are stored.
        """
        self.name = name
        self.shape = tf.TensorShape([num_rows, form.width])
        self.form = form
        # TensorFlow says it when it writes the checkpoint.
        self._key = ""
        with tf.init_scope(), tf.device("CPU:0"):
            self._exported = tf_private.UninitializedVariable(
                shape=self.shape, dtype=form.dtype, name=name, trainable=False
            )

    @property
    def in_graph(self) -> Any:
        """What functions that are to be exported read."""
        return self._exported

    def write(self, prefix: str, blocks: Blocks) -> None:
        """Adds the rows to the checkpoint that was written last.

        Args:
          prefix: Of the checkpoint, which knows the variable and has no value
            of it.
          blocks: Gives `[rows of the block, form.width]` each.

        Raises:
          OSError: If they cannot be written.
        """
        parts = [f"{prefix}-others"]
        with files.os_errors(prefix):
            _rename(prefix, parts[0])
        start = 0
        for block in blocks():
            parts.append(f"{prefix}-{len(parts)}")
            spec = tf.Variable.SaveSliceInfo(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
                full_name=self.name,
                full_shape=self.shape.as_list(),
                var_offset=[start, 0],
                var_shape=list(block.shape),
            ).spec
            with files.os_errors(prefix):
                tf.raw_ops.SaveV2(
                    prefix=parts[-1],
                    tensor_names=[self._key],
                    shape_and_slices=[spec],
                    tensors=[block],
                )
            start += len(block)
        assert start == self.shape[0], (start, self.shape)
        with files.os_errors(prefix):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=parts,
                destination_prefix=prefix,
                delete_old_dirs=False,
            )

    # What TensorFlow asks of a variable that it exports.

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
    """A variable that the object graph names and nothing is written of."""

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


def _rename(prefix: str, to: str) -> None:
    for path in tf.io.gfile.glob(f"{prefix}.*"):
        tf.io.gfile.rename(path, to + path[len(prefix) :])


class MeasuredBlocks:
    """Yields the stored rows of some tables, and then knows their errors."""

    def __init__(self, sources: Sequence[Source], form: RowFormat):
        """Takes tables that share a variable.

        Args:
          sources: In the order of their rows.
          form: How rows are stored.
        """
        self._sources = sources
        self._form = form
        self._errors: list[tuple[float, float]] = []

    def __call__(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yields `[rows of the block, form.width]`, from the first row on.

        Raises:
          ValueError: If a row cannot be stored so; it names table and row.
        """
        self._errors = []
        for source in self._sources:
            largest, total, start = 0.0, 0.0, 0
            for rows in source.blocks():
                try:
                    stored = packing.pack(rows, self._form)
                except packing.UnfitRowError as error:
                    raise ValueError(
                        f"Table {source.name!r} cannot be stored as "
                        f"{self._form.kind}: row {start + error.row} "
                        f'{error.reason}. Use rows="float32" for it.',
                    ) from error
                if str(rows.dtype) != self._form.kind:
                    errors = _errors(rows, stored, self._form)
                    largest = max(largest, float(errors.max(initial=0.0)))
                    total += float(errors.sum(dtype=np.float64))
                start += len(rows)
                yield stored
            self._errors.append((largest, total / (start * source.dim)))

    def reports(self) -> list[TableReport]:
        """Returns a report on each table, when all blocks were read."""
        return [
            TableReport(
                name=source.name,
                num_rows=source.num_rows,
                dim=source.dim,
                rows=self._form.kind,
                num_bytes=source.num_rows * self._form.row_bytes,
                float32_bytes=source.num_rows * source.dim * 4,
                largest_error=largest,
                mean_error=mean,
            )
            for source, (largest, mean) in zip(self._sources, self._errors)
        ]


def _errors(
    rows: np.ndarray[Any, Any], stored: np.ndarray[Any, Any], form: RowFormat
) -> np.ndarray[Any, Any]:
    """Absolute differences; 0 where a value is not finite, and stays so."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(
            packing.unpack(stored, form) - rows.astype(np.float32, copy=False)
        )
    return np.where(np.isfinite(rows.astype(np.float32)), errors, 0.0)
