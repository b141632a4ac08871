"""Rows of a table as bytes, and back: arithmetic on numpy arrays.

A packed row is one run of bytes, so that a lookup reads one place in memory:

    codes, one byte each (int8) or two in a byte (int4) | scale | lowest

Scale and lowest value are float32, and `lowest + code * scale` is the value,
within half a step: the row's span divided by its highest code, plus 2e-38,
because TensorFlow computes with zero instead of numbers below 1.2e-38.
In int4 a byte holds a column of the first half of the row in its low bits and
one of the second half in its high bits, so that unpacking moves no columns.
"""

# DOC-MERGE: Rows of ids out of a stored table: gathered first, unpacked after.
#
# TensorFlow's own operations only. `packing` has the same in numpy.
#
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

# What rows can be stored as.
KINDS = ("float32", "float16", "int8", "int4")

# Scale and lowest value.
_FACTS_BYTES = 8
# TensorFlow's threads compute with zero instead of anything smaller.
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How the rows of a table are stored.

    Attributes:
      kind: One of `KINDS`; or `"bfloat16"`, for a table that has such rows.
      dim: Columns of the table.
    """

    kind: str
    dim: int

    @property
    def is_packed(self) -> bool:
        """Whether rows are bytes with a scale."""
        return self.kind in ("int8", "int4")

    @property
    def dtype(self) -> str:
        """Name of the type of what is stored.

        TensorFlow reads no parts of float16 from a file, but of int16.
        """
        if self.is_packed:
            return "uint8"
        return "int16" if self.kind == "float16" else self.kind

    @property
    def num_codes(self) -> int:
        """Bytes of the codes of a packed row."""
        return self.dim if self.kind == "int8" else (self.dim + 1) // 2

    @property
    def highest_code(self) -> int:
        """The code of the largest value of a packed row."""
        return 255 if self.kind == "int8" else 15

    @property
    def width(self) -> int:
        """Elements of a stored row."""
        return self.num_codes + _FACTS_BYTES if self.is_packed else self.dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.width * {"uint8": 1, "float32": 4}.get(self.dtype, 2)


def choose(kind: str, dtype: str, dim: int) -> RowFormat:
    """Returns how the rows of a table are to be stored.

    Rows that would get bigger stay as they are: scale and lowest value take
    eight bytes, as much as two columns.

    >>> choose("int8", "float32", 64).kind, choose("int8", "float32", 2).kind
    ('int8', 'float32')
    >>> choose("float32", "bfloat16", 64).kind
    'bfloat16'

    Args:
      kind: What was asked for, one of `KINDS`.
      dtype: What the table holds: `"float32"`, `"bfloat16"` or `"float16"`.
      dim: Columns of the table.
    """
    as_it_is, asked_for = RowFormat(dtype, dim), RowFormat(kind, dim)
    return asked_for if asked_for.row_bytes < as_it_is.row_bytes else as_it_is


class UnfitRowError(ValueError):
    """A row that a format does not hold.

    Attributes:
      row: Which row of those that were packed.
      reason: What is wrong, the end of a sentence about the row.
    """

    def __init__(self, row: int, reason: str):
        super().__init__(f"Row {row} {reason}.")
        self.row = row
        self.reason = reason


def pack(rows: np.ndarray[Any, Any], form: RowFormat) -> np.ndarray[Any, Any]:
    """Returns rows as they are stored.

    Args:
      rows: `[num_rows, dim]`, in the type that the table holds.
      form: How to store them.

    Returns:
      `[num_rows, form.width]`.

    Raises:
      UnfitRowError: A row is not finite and the format is packed, or a finite
        value is not finite in 16 bits.
    """
    if form.kind == str(rows.dtype):
        return rows.view(np.int16) if form.kind == "float16" else rows
    rows = rows.astype(np.float32, copy=False)
    if form.is_packed:
        return _pack(rows, form)
    with np.errstate(over="ignore"):
        stored = rows.astype(np.float16)
    _refuse(
        np.isfinite(rows) & ~np.isfinite(stored),
        rows,
        "is beyond what float16 holds, 65504",
    )
    return stored.view(np.int16)


def unpack(
    stored: np.ndarray[Any, Any], form: RowFormat
) -> np.ndarray[Any, Any]:
    """Returns the float32 rows that a lookup of stored rows gives."""
    if form.kind == "float16":
        stored = stored.view(np.float16)
    if not form.is_packed:
        return stored.astype(np.float32)
    codes = stored[:, : form.num_codes]
    if form.kind == "int4":
        codes = np.concatenate([codes & 15, codes >> 4], axis=1)[:, : form.dim]
    facts = np.ascontiguousarray(stored[:, form.num_codes :]).view("<f4")
    return codes.astype(np.float32) * facts[:, :1] + facts[:, 1:]


def _pack(rows: np.ndarray[Any, Any], form: RowFormat) -> np.ndarray[Any, Any]:
    _refuse(~np.isfinite(rows), rows, "is not finite")
    lowest, highest = rows.min(axis=1), rows.max(axis=1)
    # float64, because the difference of two floats may be no float.
    span = highest.astype(np.float64) - lowest
    _refuse(
        span[:, np.newaxis] > np.finfo(np.float32).max,
        rows,
        "is further from the least of its row than float32 can say",
    )
    scale = (span / form.highest_code).astype(np.float32)
    scale[(scale < _SMALLEST_SCALE) & (span > 0.0)] = _SMALLEST_SCALE
    divisor = np.where(scale == 0.0, np.float32(1.0), scale)[:, np.newaxis]
    codes = np.rint((rows - lowest[:, np.newaxis]) / divisor)
    codes = np.minimum(codes, form.highest_code).astype(np.uint8)
    codes[scale == 0.0] = 0
    stored = np.empty([len(rows), form.width], np.uint8)
    if form.kind == "int8":
        stored[:, : form.num_codes] = codes
    else:
        stored[:, : form.num_codes] = codes[:, : form.num_codes]
        second = codes[:, form.num_codes :] << 4
        stored[:, : second.shape[1]] |= second
    facts = np.stack([scale, lowest], axis=1).astype("<f4")
    stored[:, form.num_codes :] = facts.view(np.uint8)
    return stored


def _refuse(
    is_bad: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], what: str
) -> None:
    """Raises an UnfitRowError for the first row with a bad value."""
    bad_rows = is_bad.any(axis=1)
    if not bad_rows.any():
        return
    row = int(np.argmax(bad_rows))
    # Where a whole row is bad, its largest value is.
    values = np.where(is_bad[row], np.abs(rows[row]), -1.0)
    column = int(np.argmax(np.where(np.isnan(values), np.inf, values)))
    raise UnfitRowError(
        row, f"holds {rows[row, column]} in column {column}, which {what}"
    )
