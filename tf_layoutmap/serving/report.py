"""The report that `export` returns: the bytes and errors of each table."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_layoutmap._core import user_warnings


@dataclasses.dataclass(frozen=True)
class TableReport:
    """Report on one exported table.

    Attributes:
      name: Name of the table.
      num_rows: Number of rows.
      dim: Number of columns.
      row_format: Storage type of the rows: `"float32"`, `"float16"`,
        `"bfloat16"`, `"int8"` or `"int4"`.
      num_bytes: Size of the stored rows in bytes.
      float32_bytes: Size that the rows would have in float32, in bytes.
      largest_error: The largest absolute difference between a value and the
        result of its lookup in the exported model.
      mean_error: The mean of these differences.
    """

    name: str
    num_rows: int
    dim: int
    row_format: str
    num_bytes: int
    float32_bytes: int
    largest_error: float
    mean_error: float


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """Report on an exported model, which `tlm.export` returns.

    The report can be printed with `print`, and in color with `rich.print`.

    Attributes:
      path: Folder of the SavedModel.
      tables: One `TableReport` per table.
      num_variables: Number of variables that hold the tables. A lookup runs one
        gather per variable.
      num_bytes: Size of all files of the SavedModel.
      metrics_before: Metrics of the model on `dataset`, by name; None without
        a dataset.
      metrics_after: Metrics of the exported model on `dataset`.
    """

    path: str
    tables: tuple[TableReport, ...]
    num_variables: int
    num_bytes: int
    metrics_before: dict[str, float] | None = None
    metrics_after: dict[str, float] | None = None

    def as_dict(self) -> dict[str, object]:
        """Returns the report as a dict that JSON supports."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return user_warnings.printed(self.__rich__(), width=100).rstrip()

    def __rich__(self) -> Any:
        import rich.console
        import rich.table

        table = rich.table.Table(
            title=f"Exported to {self.path}", title_justify="left"
        )
        table.add_column("table", overflow="fold")
        for column in (
            "shape",
            "row format",
            "bytes",
            "of float32",
            "largest error",
            "mean error",
        ):
            table.add_column(column, justify="right")
        for report in self.tables:
            table.add_row(
                report.name,
                f"{report.num_rows:,} x {report.dim}",
                report.row_format,
                f"{report.num_bytes:,}",
                f"{report.num_bytes / report.float32_bytes:.2f}",
                f"{report.largest_error:.3g}",
                f"{report.mean_error:.3g}",
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
