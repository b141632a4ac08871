"""An `IdReport` as rows of text, and as one HTML page with its plots inside.

Pure: strings out of numbers. The page loads nothing: no script, no font.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
       max-width: 70rem; padding: 0 1rem; color: #1c2330; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0 2rem; }
th, td { padding: .3rem .8rem; text-align: right;
         border-bottom: 1px solid #d8dde6; }
th:first-child, td:first-child { text-align: left; }
td.bad { color: #b3261e; font-weight: 600; }
figure { display: inline-block; margin: 0 1.5rem 1.5rem 0; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
svg text { font: 11px system-ui, sans-serif; fill: #5b6472; }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 220, 48, 28


def feature_rows(report: Any) -> list[list[str]]:
    """Returns a head and one row of text per feature."""
    rows = [["feature", "table", "samples", "ids", "distinct", "ids/sample",
             "longest", "empty", "padding waste", "unique ratio",
             "out of range"]]
    for name, one in report.features.items():
        outside = str(one["num_out_of_range"])
        if one["num_out_of_range"]:
            outside += (f" ({one['lowest_out_of_range']} to "
                        f"{one['highest_out_of_range']})")
        rows.append([
            name, one["table"], f"{one['num_samples']:,}",
            f"{one['num_ids']:,}", f"{one['num_distinct']:,}",
            f"{one['mean_ids_per_sample']:.2f}",
            str(one["max_ids_per_sample"]), f"{one['num_empty']:,}",
            f"{one['padding_waste']:.1%}", f"{one['unique_ratio']:.1%}",
            outside])
    return rows


def table_rows(report: Any) -> list[list[str]]:
    """Returns a head and one row of text per table."""
    rows = [["table", "rows", "dim", "rows seen", "lookups", "hottest row",
             "hottest 100", "memory", "slot variables"]]
    for name, one in report.tables.items():
        rows.append([
            name, f"{one['num_rows']:,}", str(one["dim"]),
            f"{one['num_distinct']:,} ({one['coverage']:.1%})",
            f"{one['num_lookups']:,}", f"{one['share_of_hottest'][1]:.1%}",
            f"{one['share_of_hottest'][100]:.1%}", _bytes(one["num_bytes"]),
            _bytes(one["num_slot_bytes"])])
    return rows


def page(report: Any) -> str:
    """Returns the page."""
    optimizers = list(next(iter(report.tables.values()))[
        "bytes_by_optimizer"])
    memory = [["table", *optimizers]] + [
        [name, *(_bytes(one["bytes_by_optimizer"][optimizer])
                 for optimizer in optimizers)]
        for name, one in report.tables.items()]
    skew = "".join(
        _plot(f"{name}: lookups by rank of the row", one["lookups_by_rank"],
              "rank") for name, one in report.tables.items())
    sizes = "".join(
        _bars(f"{name}: samples by number of ids", one["samples_by_size"])
        for name, one in report.features.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Ids</title><style>{_STYLE}</style></head><body>"
        f"<h1>Ids of {report.num_batches:,} batch"
        f"{'es' * (report.num_batches != 1)}</h1>"
        f"<h2>Features</h2>{_table(feature_rows(report), bad=-1)}{sizes}"
        f"<h2>Tables</h2>{_table(table_rows(report))}{skew}"
        "<h2>Memory with slot variables, by optimizer</h2>"
        f"{_table(memory)}</body></html>\n")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else (
                f"{count:.1f} {unit}")
        count /= 1024
    return f"{count:.1f} TiB"


def _table(rows: Sequence[Sequence[str]], bad: int | None = None) -> str:
    """An HTML table; column `bad` is marked where it is not 0."""
    head = "".join(f"<th>{html.escape(one)}</th>" for one in rows[0])
    body = ""
    for row in rows[1:]:
        marked = None if bad is None or row[bad] == "0" else (
            bad % len(row))
        body += "<tr>" + "".join(
            f"<td{' class=bad' * (i == marked)}>{html.escape(one)}</td>"
            for i, one in enumerate(row)) + "</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _figure(caption: str, marks: str) -> str:
    caption = html.escape(caption)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{caption}">'
        f'<path d="M{_LEFT} 6V{_HEIGHT - _BOTTOM}H{_WIDTH - 6}" fill="none" '
        f'stroke="#8a93a3"/>{marks}</svg></figure>')


def _place(x: float, y: float) -> tuple[float, float]:
    """Where a point of the unit square is drawn."""
    return (_LEFT + x * (_WIDTH - _LEFT - 12),
            _HEIGHT - _BOTTOM - y * (_HEIGHT - _BOTTOM - 12))


def _labels(x_low: str, x_high: str, y_high: str) -> str:
    low, high, top = _place(0, 0), _place(1, 0), _place(0, 1)
    return (f'<text x="{low[0]:.0f}" y="{low[1] + 18:.0f}">{x_low}</text>'
            f'<text x="{high[0]:.0f}" y="{high[1] + 18:.0f}" '
            f'text-anchor="end">{x_high}</text>'
            f'<text x="{top[0] - 6:.0f}" y="{top[1] + 4:.0f}" '
            f'text-anchor="end">{y_high}</text>')


def _plot(caption: str, points: Sequence[tuple[int, int]],
          x_name: str) -> str:
    """A line through points on two logarithmic axes."""
    if not points:
        return ""
    x_high = max(math.log(points[-1][0]), 1e-9)
    y_high = max(math.log(points[0][1]), 1e-9)
    placed = [_place(math.log(x) / x_high, math.log(y) / y_high)
              for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    marks = (f'<polyline points="{line}" fill="none" stroke="#1a66c2" '
             'stroke-width="2"/>')
    if len(points) == 1:
        marks = (f'<circle cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" '
                 'r="3" fill="#1a66c2"/>')
    return _figure(caption, marks + _labels(
        f"{x_name} 1", f"{points[-1][0]:,}", f"{points[0][1]:,}"))


def _bars(caption: str, counts: dict[int, int]) -> str:
    """A bar per size; many sizes are put together, 40 bars at most."""
    if not counts:
        return ""
    per_bar = max(1, math.ceil((max(counts) + 1) / 40))
    bars = [0] * (max(counts) // per_bar + 1)
    for size, count in counts.items():
        bars[size // per_bar] += count
    marks = ""
    for i, count in enumerate(bars):
        left, top = _place(i / len(bars), count / max(bars))
        right, bottom = _place((i + 0.9) / len(bars), 0)
        marks += (f'<rect x="{left:.1f}" y="{top:.1f}" '
                  f'width="{right - left:.1f}" height="{bottom - top:.1f}" '
                  'fill="#1a66c2"/>')
    return _figure(caption, marks + _labels(
        "0 ids", str(max(counts)), f"{max(bars):,}"))
