"""Plots of an `IdReport` as SVG. Pure: strings out of numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 220, 60, 28
_BLUE = "#1a66c2"
# Of several lines, whose names stand below in the same order.
_COLOURS = ("#1a66c2", "#b3561a", "#3c7d3f", "#7a4ba8", "#8a6d00")


def _figure(caption: str, marks: str, height: int = _HEIGHT) -> str:
    caption = html.escape(caption)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg width="{_WIDTH}" height="{height}" role="img" '
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


def line(caption: str, points: Sequence[tuple[int, int]],
         x_name: str) -> str:
    """A line through points on two logarithmic axes."""
    if not points:
        return ""
    x_high = max(math.log(points[-1][0]), 1e-9)
    y_high = max(math.log(points[0][1]), 1e-9)
    placed = [_place(math.log(x) / x_high, math.log(y) / y_high)
              for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    marks = (f'<polyline points="{path}" fill="none" stroke="{_BLUE}" '
             'stroke-width="2"/>')
    if len(points) == 1:
        marks = (f'<circle cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" '
                 f'r="3" fill="{_BLUE}"/>')
    return _figure(caption, marks + _labels(
        f"{x_name} 1", f"{points[-1][0]:,}", f"{points[0][1]:,}"))


def bars(caption: str, counts: dict[int, int]) -> str:
    """A bar per size; many sizes are put together, 40 bars at most."""
    if not counts:
        return ""
    per_bar = max(1, math.ceil((max(counts) + 1) / 40))
    heights = [0] * (max(counts) // per_bar + 1)
    for size, count in counts.items():
        heights[size // per_bar] += count
    marks = ""
    for i, count in enumerate(heights):
        left, top = _place(i / len(heights), count / max(heights))
        right, bottom = _place((i + 0.9) / len(heights), 0)
        marks += (f'<rect x="{left:.1f}" y="{top:.1f}" '
                  f'width="{right - left:.1f}" height="{bottom - top:.1f}" '
                  f'fill="{_BLUE}"/>')
    return _figure(caption, marks + _labels(
        "0 ids", str(max(counts)), f"{max(heights):,}"))


def curves(caption: str, lines: Mapping[str, Sequence[tuple[int, float]]],
           x_name: str, marked: tuple[int, float] | None) -> str:
    """Lines of shares against numbers on a logarithmic axis.

    Args:
      caption: Of the plot.
      lines: By name, points of a positive number and a share of 1.
      x_name: What the numbers count.
      marked: A point with a circle around it, or None.
    """
    ends = [points[-1] for points in lines.values() if points]
    if not ends:
        return ""
    x_high = max(math.log(max(number for number, _ in ends)), 1e-9)
    y_high = max(max(share for _, share in ends), 1e-9)

    def place(point: tuple[int, float]) -> tuple[float, float]:
        return _place(math.log(point[0]) / x_high, point[1] / y_high)

    marks, left = "", float(_LEFT)
    for colour, (name, points) in zip(_COLOURS, lines.items()):
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
        x, y = place(points[-1])
        marks += (f'<polyline points="{path}" fill="none" stroke="{colour}" '
                  f'stroke-width="2"/><circle cx="{x:.1f}" cy="{y:.1f}" r="3" '
                  f'fill="{colour}"/><circle cx="{left + 4:.0f}" '
                  f'cy="{_HEIGHT + 10}" r="4" fill="{colour}"/>'
                  f'<text x="{left + 12:.0f}" y="{_HEIGHT + 14}">'
                  f"{html.escape(name)}</text>")
        left += 24 + 7 * len(name)
    if marked is not None:
        x, y = place(marked)
        marks += (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" '
                  'stroke="#1c2330" stroke-width="1.5"/>')
    labels = _labels(f"1 {x_name}", f"{max(n for n, _ in ends):,}",
                     f"{y_high:.0%}")
    return _figure(caption, marks + labels, height=_HEIGHT + 24)
