"""Formats an `IdReport` as rows of text, and as one HTML page with plots.

This module imports only the Python standard library. The HTML page does not
load scripts, fonts or other files.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from tf_layoutmap.embedding.inspection import sparse_core_counts, svg_plots

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
       max-width: 76rem; padding: 0 1rem; color: #1c2330; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0 2rem; }
th, td { padding: .3rem .8rem; text-align: right;
         border-bottom: 1px solid #d8dde6; }
th:first-child, td:first-child { text-align: left; }
div { overflow-x: auto; }
td.bad { color: #b3261e; font-weight: 600; }
figure { display: inline-block; margin: 0 1.5rem 1.5rem 0; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
svg text { font: 11px system-ui, sans-serif; fill: #5b6472; }
"""


def feature_rows(report: Any) -> list[list[str]]:
    """Returns a header row, and one row of strings per feature."""
    rows = [
        [
            "feature",
            "table",
            "samples",
            "ids",
            "distinct",
            "ids/sample",
            "longest",
            "empty",
            "padding waste",
            "unique ratio",
            "out of range",
        ]
    ]
    for name, feature in report.features.items():
        outside = f"{feature['num_out_of_range']:,}"
        if feature["num_out_of_range"]:
            outside += (
                f" ({feature['lowest_out_of_range']:,} to "
                f"{feature['highest_out_of_range']:,})"
            )
        rows.append(
            [
                name,
                feature["table"],
                f"{feature['num_samples']:,}",
                f"{feature['num_ids']:,}",
                f"{feature['num_distinct']:,}",
                f"{feature['mean_ids_per_sample']:.2f}",
                f"{feature['max_ids_per_sample']:,}",
                f"{feature['num_empty']:,}",
                f"{feature['padding_waste']:.1%}",
                f"{feature['unique_ratio']:.1%}",
                outside,
            ]
        )
    return rows


def table_rows(report: Any) -> list[list[str]]:
    """Returns a header row, and one row of strings per table."""
    rows = [
        [
            "table",
            "rows",
            "dim",
            "rows seen",
            "lookups",
            "hottest row",
            "hottest 100",
            "memory",
            "slot variables",
        ]
    ]
    for name, table in report.tables.items():
        rows.append(
            [
                name,
                f"{table['num_rows']:,}",
                str(table["dim"]),
                f"{table['num_distinct']:,} keys"
                if "proposal" in table
                else f"{table['num_distinct']:,} ({table['coverage']:.1%})",
                f"{table['num_lookups']:,}",
                f"{table['share_of_hottest'][1]:.1%}",
                f"{table['share_of_hottest'][100]:.1%}",
                _bytes(table["num_bytes"]),
                _bytes(table["num_slot_bytes"]),
            ]
        )
    return rows


def split_columns(
    rows: Sequence[Sequence[str]], width: int
) -> list[list[list[str]]]:
    """Splits the columns of a table into tables that fit a terminal.

    >>> split_columns([["name", "ids", "rows"], ["a", "1", "2"]], 17)
    [[['name', 'ids'], ['a', '1']], [['name', 'rows'], ['a', '2']]]

    Args:
      rows: A header row, and rows of strings. The first column contains the
        names of the rows.
      width: Number of characters per line. The width of a column is the width
        of its text plus 3 characters. The width of a table is the width of its
        columns plus 1 character.

    Returns:
      One or more tables, which all start with the first column. The first
      column has at most a third of the line width, so the caller must wrap
      longer names.
    """
    sizes = [max(map(len, column)) + 3 for column in zip(*rows)]
    first = min(sizes[0], max(width // 3, 10)) + 1
    parts: list[list[int]] = [[]]
    for column, size in enumerate(sizes[1:], 1):
        used = first + sum(sizes[other] for other in parts[-1])
        if parts[-1] and used + size > width:
            parts.append([])
        parts[-1].append(column)
    return [
        [[row[0], *(row[column] for column in part)] for row in rows]
        for part in parts
    ]


def page(report: Any) -> str:
    """Returns the report as an HTML page."""
    optimizers = list(next(iter(report.tables.values()))["bytes_by_optimizer"])
    memory = [["table", *optimizers]] + [
        [
            name,
            *(
                _bytes(table["bytes_by_optimizer"][optimizer])
                for optimizer in optimizers
            ),
        ]
        for name, table in report.tables.items()
    ]
    skew = "".join(
        svg_plots.line(
            f"{name}: lookups by rank of the row",
            table["lookups_by_rank"],
            "rank of the row",
            "lookups",
        )
        for name, table in report.tables.items()
    )
    sizes = "".join(
        svg_plots.bars(
            f"{name}: samples by number of ids",
            feature["samples_by_size"],
            "ids in a sample",
            "samples",
        )
        for name, feature in report.features.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Ids</title><style>{_STYLE}</style></head><body>"
        f"<h1>Ids of {report.num_batches:,} batch"
        f"{'es' * (report.num_batches != 1)}</h1>"
        f"<h2>Features</h2>{_table(feature_rows(report), bad=-1)}{sizes}"
        f"<h2>Tables</h2>{_table(table_rows(report))}{skew}"
        f"{_open_tables(report)}{_sparse_cores(report)}"
        "<h2>Memory with slot variables, by optimizer</h2>"
        f"{_table(memory)}</body></html>\n"
    )


def proposal_rows(report: Any) -> list[list[str]]:
    """Returns a header row, and one row per table that has a proposal."""
    rows = [
        [
            "table",
            "capacity",
            "min_count",
            "keys with a row",
            "lookups served",
            "at most",
            "keys in all",
        ]
    ]
    for name, table in report.tables.items():
        proposal = table.get("proposal")
        if proposal is not None:
            rows.append(
                [
                    name,
                    f"{proposal['capacity']:,}",
                    str(proposal["min_count"]),
                    f"{proposal['num_keys']:,}",
                    f"{proposal['hit_rate']:.1%}",
                    f"{proposal['max_hit_rate']:.1%}",
                    f"{table['num_distinct']:,}",
                ]
            )
    return rows


def _open_tables(report: Any) -> str:
    """Returns the HTML section with proposals, or an empty string."""
    rows = proposal_rows(report)
    if len(rows) == 1:
        return ""
    plots = ""
    for name, table in report.tables.items():
        proposal = table.get("proposal")
        if proposal is None:
            continue
        plots += svg_plots.curves(
            f"{name}: share of lookups served, by rows",
            {
                f"from {count}": points
                for count, points in table["hit_rate_by_rows"].items()
            },
            "rows",
            "lookups served",
            (proposal["num_keys"], proposal["hit_rate"]),
        )
    return (
        "<h2>Open vocabularies</h2><p>A lookup is served if it finds a row "
        "that an earlier batch has assigned to its key. Each line is for one "
        "min_count: a key gets a row at its first, second, ... occurrence. "
        "The keys with the most served lookups keep the rows. The circle is "
        f"the proposal.</p>{_table(rows)}{plots}"
    )


def sparse_core_rows(report: Any) -> list[list[str]]:
    """Returns a header row, and one row per stacked table and core count."""
    rows = [
        [
            "stacked table",
            "SparseCores",
            "chips",
            "ids (99% of batches)",
            "ids (all batches)",
            "unique ids (99%)",
            "unique ids (all)",
            "ids/chip/sample (all)",
        ]
    ]
    for num_cores, cores in report.sparse_cores.items():
        for name, stack in cores["stacks"].items():
            if not stack["max_ids"]:
                continue
            limits = [
                sparse_core_counts.limit_of(stack[kind], confidence)
                for kind, confidence in (
                    ("max_ids", 0.99),
                    ("max_ids", 1),
                    ("max_unique_ids", 0.99),
                    ("max_unique_ids", 1),
                    ("ids_per_chip_per_sample", 1),
                )
            ]
            rows.append(
                [
                    name,
                    f"{num_cores:,}",
                    f"{cores['num_chips']:,}",
                    *(f"{limit:,}" for limit in limits),
                ]
            )
    return rows


def _sparse_cores(report: Any) -> str:
    """Returns the HTML section about SparseCores, or an empty string."""
    rows = sparse_core_rows(report)
    if len(rows) == 1:
        return ""
    plots = "".join(
        svg_plots.curves(
            f"{name}, {num_cores} SparseCores: batches that exceed a limit",
            {
                label: sparse_core_counts.overflow_curve(stack[kind])
                for label, kind in (
                    ("ids", "max_ids"),
                    ("unique ids", "max_unique_ids"),
                )
            },
            "limit",
            "batches that exceed it",
            None,
        )
        for num_cores, cores in report.sparse_cores.items()
        for name, stack in cores["stacks"].items()
    )
    return (
        "<h2>SparseCores</h2><p>Numbers of ids that one SparseCore sends to "
        "one SparseCore in a step. A step of TPUEmbeddingV2 fails if a number "
        "exceeds max_ids_per_table or max_unique_ids_per_table, whose default "
        "is 256.</p>"
        f"{_table(rows)}{plots}"
    )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return (
                f"{count:.0f} {unit}"
                if unit == "B"
                else (f"{count:.1f} {unit}")
            )
        count /= 1024
    return f"{count:.1f} TiB"


def _table(rows: Sequence[Sequence[str]], bad: int | None = None) -> str:
    """Returns an HTML table. Nonzero values of column `bad` are marked."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = ""
    for row in rows[1:]:
        marked = None if bad is None or row[bad] == "0" else (bad % len(row))
        body += (
            "<tr>"
            + "".join(
                f"<td{' class=bad' * (i == marked)}>{html.escape(cell)}</td>"
                for i, cell in enumerate(row)
            )
            + "</tr>"
        )
    return f"<div><table><tr>{head}</tr>{body}</table></div>"
