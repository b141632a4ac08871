"""Tables as blocks of a variable, packed, and the error that packing makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tf_layoutmap.serving.report import TableReport
from tf_layoutmap.serving.tables import packing
from tf_layoutmap.serving.tables.packing import RowFormat
from tf_layoutmap.serving.tables.sources import Source


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
