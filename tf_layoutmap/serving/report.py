"""What `export` returns: the bytes and the errors of each table."""

# DOC-MERGE: What looks rows up in place of a table, while a model is traced.
from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class TableReport:
    """How one table was exported.

    Attributes:
      name: Of the table.
      num_rows: Its rows.
      dim: Its columns.
      rows: How they are stored: `"float32"`, `"float16"`, `"bfloat16"`,
        `"int8"` or `"int4"`.
      num_bytes: Of the rows as they are stored.
      float32_bytes: Of the same rows in float32.
      largest_error: The largest difference between a value and what a lookup
        of the exported model gives for it.
      mean_error: The mean of these differences.
    """

    name: str
    num_rows: int
    dim: int
    rows: str
    num_bytes: int
    float32_bytes: int
    largest_error: float
    mean_error: float


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
      path: Folder of the SavedModel.
      tables: A `TableReport` each.
      num_variables: Variables that hold the tables, each of which one gather
        reads.
      num_bytes: Of all files of the SavedModel.
      metrics_before: What `dataset` gave with the model, by name; None
        without a dataset.
      metrics_after: What it gave with the exported model.
    """

    path: str
    tables: tuple[TableReport, ...]
    num_variables: int
    num_bytes: int
    metrics_before: dict[str, float] | None = None
    metrics_after: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, fit for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        import rich.console

        out = io.StringIO()
        rich.console.Console(file=out, width=100).print(self.__rich__())
        return out.getvalue().rstrip()

    def __rich__(self) -> Any:
        import rich.console
        import rich.table

        table = rich.table.Table(
            title=f"Exported to {self.path}", title_justify="left"
        )
        table.add_column("table", overflow="fold")
        for column in (
            "shape",
            "rows",
            "bytes",
            "of float32",
            "largest error",
            "mean error",
        ):
            table.add_column(column, justify="right")
        for one in self.tables:
            table.add_row(
                one.name,
                f"{one.num_rows:,} x {one.dim}",
                one.rows,
                f"{one.num_bytes:,}",
                f"{one.num_bytes / one.float32_bytes:.2f}",
                f"{one.largest_error:.3g}",
                f"{one.mean_error:.3g}",
            )
        lines = [
            f"{self.num_bytes:,} bytes in all files. Tables: "
            f"{len(self.tables)}, in variables: {self.num_variables}."
        ]
        if self.metrics_before is not None:
            after = self.metrics_after or {}
            lines += [
                f"{name}: {value:.6g} before, {after[name]:.6g} after."
                for name, value in self.metrics_before.items()
            ]
        return rich.console.Group(table, *lines)


# A table's owner, and what its lookup is replaced by.
Placeholder = tuple[object, Callable[..., Any]]

_traced = threading.local()


@contextlib.contextmanager
def placeholders_in_place(stand_ins: Sequence[Placeholder]) -> Generator[None]:
    """Lets `of` return these in this thread, until the block ends.

    >>> table = object()
    >>> with in_place([(table, str)]):
    ...     of(table)
    <class 'str'>
    >>> of(table) is None
    True
    """
    before: Sequence[Placeholder] = getattr(_traced, "stand_ins", ())
    _traced.stand_ins = stand_ins
    try:
        yield
    finally:
        _traced.stand_ins = before


def placeholder_of(owner: object) -> Callable[..., Any] | None:
    """Returns what stands in for the lookup of `owner`; None for nothing."""
    for known, stand_in in getattr(_traced, "stand_ins", ()):
        if known is owner:
            return stand_in
    return None
