"""Formats of stored rows, and functions that pack rows with numpy.

A packed row is a contiguous sequence of bytes, so a lookup reads from only one
memory location. A row consists of these parts:

    codes, one byte each (int8) or two in a byte (int4) | scale | lowest

The scale and the lowest value are float32. A code is unpacked to the value
`lowest + code * scale`, with an error of at most half a step plus 2e-38. A step
is the highest value of the row minus the lowest value, divided by the highest
code. The error bound includes 2e-38, because TensorFlow replaces numbers below
1.2e-38 by zero.

In int4, the low bits of each byte contain a column of the first half of the
row. The high bits contain a column of the second half. Therefore, unpacking
does not have to reorder columns.

`row_gathers.gather_unpacked` unpacks rows with TensorFlow's operations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

# Storage types of rows.
KINDS = ("float32", "float16", "int8", "int4")

# Size of the scale and the lowest value of a row, in bytes.
_FACTS_BYTES = 8
# The threads of TensorFlow replace smaller positive numbers by zero.
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Format of the stored rows of a table.

    Attributes:
      kind: One of `KINDS`, or `"bfloat16"` for a table in bfloat16.
      dim: Number of columns of the table.
    """

    kind: str
    dim: int

    @property
    def is_packed(self) -> bool:
        """Whether rows consist of codes, a scale and a lowest value."""
        return self.kind in ("int8", "int4")

    @property
    def dtype(self) -> str:
        """Name of the dtype of the stored elements.

        TensorFlow cannot read slices of float16 tensors from a file, so float16
        rows are stored as int16.
        """
        if self.is_packed:
            return "uint8"
        return "int16" if self.kind == "float16" else self.kind

    @property
    def num_codes(self) -> int:
        """Number of bytes for the codes of a packed row."""
        return self.dim if self.kind == "int8" else (self.dim + 1) // 2

    @property
    def highest_code(self) -> int:
        """The code of the largest value of a packed row."""
        return 255 if self.kind == "int8" else 15

    @property
    def width(self) -> int:
        """Number of elements of a stored row."""
        return self.num_codes + _FACTS_BYTES if self.is_packed else self.dim

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a stored row."""
        return self.width * {"uint8": 1, "float32": 4}.get(self.dtype, 2)


def choose(kind: str, dtype: str, dim: int) -> RowFormat:
    """Returns the format in which the rows of a table are stored.

    If packing would make the rows larger, they are not packed. The scale and
    the lowest value require eight bytes, as much as two float32 columns.

    >>> choose("int8", "float32", 64).kind, choose("int8", "float32", 2).kind
    ('int8', 'float32')
    >>> choose("float32", "bfloat16", 64).kind
    'bfloat16'

    Args:
      kind: The requested storage type, one of `KINDS`.
      dtype: Dtype of the table: `"float32"`, `"bfloat16"` or `"float16"`.
      dim: Number of columns of the table.
    """
    unpacked, requested = RowFormat(dtype, dim), RowFormat(kind, dim)
    return requested if requested.row_bytes < unpacked.row_bytes else unpacked


class UnfitRowError(ValueError):
    """Error for a row with a value that a format cannot represent.

    Attributes:
      row: Index of the row in the array that is packed.
      reason: The reason, as the predicate of a sentence about the row.
    """

    def __init__(self, row: int, reason: str):
        super().__init__(f"Row {row} {reason}.")
        self.row = row
        self.reason = reason


def pack(rows: np.ndarray[Any, Any], form: RowFormat) -> np.ndarray[Any, Any]:
    """Converts rows to the stored format.

    Args:
      rows: `[num_rows, dim]`, in the dtype of the table.
      form: Format of the stored rows.

    Returns:
      `[num_rows, form.width]`.

    Raises:
      UnfitRowError: If a row is not finite and the format is packed, or a
        finite value exceeds the range of float16.
    """
    if form.kind == str(rows.dtype):
        return rows.view(np.int16) if form.kind == "float16" else rows
    rows = rows.astype(np.float32, copy=False)
    if form.is_packed:
        return _pack(rows, form)
    with np.errstate(over="ignore"):
        stored = rows.astype(np.float16)
    _check_rows(
        np.isfinite(rows) & ~np.isfinite(stored),
        rows,
        "exceeds the largest float16 number, 65504",
    )
    return stored.view(np.int16)


def unpack(
    stored: np.ndarray[Any, Any], form: RowFormat
) -> np.ndarray[Any, Any]:
    """Converts stored rows to float32 rows, in the same way as a lookup."""
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
    _check_rows(~np.isfinite(rows), rows, "is not finite")
    lowest, highest = rows.min(axis=1), rows.max(axis=1)
    # The span is computed in float64, because the difference of two float32
    # numbers can overflow.
    span = highest.astype(np.float64) - lowest
    _check_rows(
        span[:, np.newaxis] > np.finfo(np.float32).max,
        rows,
        "differs from the lowest value of its row by more than float32 holds",
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


def _check_rows(
    is_bad: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], problem: str
) -> None:
    """Raises an `UnfitRowError` for the first row with a bad value."""
    bad_rows = is_bad.any(axis=1)
    if not bad_rows.any():
        return
    row = int(np.argmax(bad_rows))
    # The error message contains the invalid value with the largest magnitude.
    values = np.where(is_bad[row], np.abs(rows[row]), -1.0)
    column = int(np.argmax(np.where(np.isnan(values), np.inf, values)))
    raise UnfitRowError(
        row, f"holds {rows[row, column]} in column {column}, which {problem}"
    )
