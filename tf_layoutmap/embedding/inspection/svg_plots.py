"""Creates the plots of an `IdReport` as SVG.

This module imports only the Python standard library.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 240, 64, 46
_BLUE = "#1a66c2"
# Colors of the lines in a plot, in the order of the legend.
_COLORS = ("#1a66c2", "#b3561a", "#3c7d3f", "#7a4ba8", "#8a6d00")

# A label of an axis: its position in [0, 1] and its text.
Tick = tuple[float, str]


def line(
    caption: str, points: Sequence[tuple[int, int]], x_name: str, y_name: str
) -> str:
    """Returns a line plot with two logarithmic axes.

    Args:
      caption: Caption of the plot.
      points: Points with positive coordinates. The x values ascend, and the y
        values descend.
      x_name: Name of the x axis.
      y_name: Name of the y axis.
    """
    if not points:
        return ""
    x_high, y_high = points[-1][0], points[0][1]
    placed = [
        _place(_on_log_axis(x, x_high), _on_log_axis(y, y_high))
        for x, y in points
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    marks = (
        f'<polyline points="{path}" fill="none" stroke="{_BLUE}" '
        'stroke-width="2"/>'
    )
    if len(points) == 1:
        marks = (
            f'<circle cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" '
            f'r="3" fill="{_BLUE}"/>'
        )
    return _figure(
        caption,
        marks,
        (f"{x_name} (log scale)", log_ticks(x_high)),
        (f"{y_name} (log scale)", log_ticks(y_high)),
    )


def bars(caption: str, counts: dict[int, int], x_name: str, y_name: str) -> str:
    """Returns a bar plot of counts by size, with at most 40 bars.

    If there are more than 40 sizes, each bar represents several sizes.

    Args:
      caption: Caption of the plot.
      counts: Count of each size.
      x_name: Name of the x axis, for the sizes.
      y_name: Name of the y axis, for the counts.
    """
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
        marks += (
            f'<rect x="{left:.1f}" y="{top:.1f}" '
            f'width="{right - left:.1f}" height="{bottom - top:.1f}" '
            f'fill="{_BLUE}"/>'
        )
    # If each bar represents one size, a label is below the middle of a bar.
    # Otherwise, a label is below the left edge of a bar.
    shift = 0.45 if per_bar == 1 else 0
    x_ticks = [
        ((size / per_bar + shift) / len(heights), f"{size:,}")
        for size in _round_numbers(max(counts))
    ]
    y_ticks = [
        (count / max(heights), _short(count))
        for count in _round_numbers(max(heights))
    ]
    return _figure(caption, marks, (x_name, x_ticks), (y_name, y_ticks))


def curves(
    caption: str,
    lines: Mapping[str, Sequence[tuple[int, float]]],
    x_name: str,
    y_name: str,
    marked: tuple[int, float] | None,
) -> str:
    """Returns a plot of several lines with a logarithmic x axis.

    Args:
      caption: Caption of the plot.
      lines: Points of each line, by the name of the line. The x values are
        positive, and the y values are in [0, 1].
      x_name: Name of the x axis.
      y_name: Name of the y axis.
      marked: Point that a circle marks, or None.
    """
    ends = [points[-1] for points in lines.values() if points]
    if not ends:
        return ""
    x_high = max(number for number, _ in ends)

    def place(point: tuple[int, float]) -> tuple[float, float]:
        return _place(_on_log_axis(point[0], x_high), point[1])

    marks, left = "", float(_LEFT)
    for color, (name, points) in zip(_COLORS, lines.items()):
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
        x, y = place(points[-1])
        marks += (
            f'<polyline points="{path}" fill="none" stroke="{color}" '
            f'stroke-width="2"/><circle cx="{x:.1f}" cy="{y:.1f}" r="3" '
            f'fill="{color}"/><circle cx="{left + 4:.0f}" '
            f'cy="{_HEIGHT + 10}" r="4" fill="{color}"/>'
            f'<text x="{left + 12:.0f}" y="{_HEIGHT + 14}">'
            f"{html.escape(name)}</text>"
        )
        left += 24 + 7 * len(name)
    if marked is not None:
        x, y = place(marked)
        marks += (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" '
            'stroke="#1c2330" stroke-width="1.5"/>'
        )
    return _figure(
        caption,
        marks,
        (f"{x_name} (log scale)", log_ticks(x_high)),
        (y_name, [(share / 4, f"{share / 4:.0%}") for share in range(5)]),
        height=_HEIGHT + 24,
    )


def log_ticks(high: int) -> list[Tick]:
    """Returns the labels of a logarithmic axis from 1 to `high`.

    >>> log_ticks(100)
    [(0.0, '1'), (0.5, '10'), (1.0, '100')]
    >>> [label for _, label in log_ticks(20)]
    ['1', '2', '5', '10', '20']
    >>> [label for _, label in log_ticks(62_401_000)]
    ['1', '100', '10k', '1M']
    """
    num_powers = math.floor(math.log10(high)) + 1
    if num_powers <= 2:
        numbers = [
            factor * 10**power
            for power in range(num_powers)
            for factor in (1, 2, 5)
            if factor * 10**power <= high
        ]
    else:
        step = math.ceil(num_powers / 5)
        numbers = [10**power for power in range(0, num_powers, step)]
    return [(_on_log_axis(number, high), _short(number)) for number in numbers]


def _on_log_axis(number: float, high: float) -> float:
    """Returns the position of a number on a logarithmic axis up to `high`."""
    return math.log(number) / max(math.log(high), 1e-9)


def _round_numbers(high: int) -> list[int]:
    """Returns the numbers for the labels of a linear axis up to `high`."""
    step = 1
    while high // step > 5:
        # The distance between labels is one of 1, 2, 5, 10, 20, ...
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return list(range(0, high + 1, step))


def _short(number: int) -> str:
    """Formats a round number with few characters.

    >>> _short(500), _short(25_000), _short(1_000_000)
    ('500', '25k', '1M')
    """
    for letter, unit in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= unit:
            return f"{number / unit:g}{letter}"
    return str(number)


def _place(x: float, y: float) -> tuple[float, float]:
    """Converts a point in the unit square to SVG coordinates."""
    return (
        _LEFT + x * (_WIDTH - _LEFT - 12),
        _HEIGHT - _BOTTOM - y * (_HEIGHT - _BOTTOM - 12),
    )


def _figure(
    caption: str,
    marks: str,
    x_axis: tuple[str, Sequence[Tick]],
    y_axis: tuple[str, Sequence[Tick]],
    height: int = _HEIGHT,
) -> str:
    """Returns a plot with two axes. Each axis has a name and labels."""
    caption = html.escape(caption)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{caption}">{_x_axis(*x_axis)}{_y_axis(*y_axis)}'
        f'<path d="M{_LEFT} 6V{_HEIGHT - _BOTTOM}H{_WIDTH - 6}" fill="none" '
        f'stroke="#8a93a3"/>{marks}</svg></figure>'
    )


def _x_axis(name: str, ticks: Sequence[Tick]) -> str:
    labels = ""
    for at, label in ticks:
        x, y = _place(at, 0)
        labels += (
            f'<path d="M{x:.1f} {y:.0f}v4" stroke="#8a93a3"/>'
            f'<text x="{x:.1f}" y="{y + 17:.0f}" '
            f'text-anchor="middle">{label}</text>'
        )
    x, y = _place(0.5, 0)
    return (
        f'{labels}<text x="{x:.0f}" y="{y + 36:.0f}" '
        f'text-anchor="middle">{html.escape(name)}</text>'
    )


def _y_axis(name: str, ticks: Sequence[Tick]) -> str:
    labels = ""
    for at, label in ticks:
        x, y = _place(0, at)
        labels += (
            f'<path d="M{x:.0f} {y:.1f}H{_WIDTH - 6}" '
            f'stroke="#e3e7ee"/><text x="{x - 6:.0f}" y="{y + 4:.1f}" '
            f'text-anchor="end">{label}</text>'
        )
    _, y = _place(0, 0.5)
    return (
        f'{labels}<text transform="translate(12 {y:.0f}) rotate(-90)" '
        f'text-anchor="middle">{html.escape(name)}</text>'
    )
