"""Draws line charts with logarithmic axes, in SVG."""

import dataclasses
import html
import math
from collections.abc import Sequence

# Lines of the same color belong together, such as one number of threads.
COLORS = (
    "#2b6cb0",
    "#c05621",
    "#2f7d4f",
    "#7a3e9d",
    "#4a5568",
    "#b7791f",
    "#c53030",
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 440, 330, 66, 46, 44, 14


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
      name: Name in the legend.
      points: Positions and values, which are positive.
      color: Index of the color in `COLORS`.
      is_dashed: Whether the line is dashed, like lines of a limit.
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: int
    is_dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart with logarithmic axes.

    Attributes:
      title: Title above the chart, which also names the unit of the values.
      label: Label of the horizontal axis.
      lines: Lines of the chart, with at least one point in total.
    """

    title: str
    label: str
    lines: Sequence[Line]


def svg(charts: Sequence[Chart], title: str) -> str:
    """Returns an SVG image of charts side by side.

    Args:
      charts: The charts, from left to right.
      title: Title of the image.
    """
    legend = max(len(chart.lines) for chart in charts)
    height = _HEIGHT + 26 + 16 * legend
    parts = [
        f'<g transform="translate({i * _WIDTH}, 26)">{_chart(chart)}</g>'
        for i, chart in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" '
        f'width="{_WIDTH * len(charts)}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>'
        + _text(12, 20, title, weight="bold")
        + "".join(parts)
        + "</svg>\n"
    )


class _Axis:
    """Maps values to pixels on a logarithmic axis.

    The axis ends at powers of two if the values span less than a factor of 30,
    and at powers of ten otherwise.
    """

    def __init__(self, values: Sequence[float], first: float, last: float):
        low, high = min(values), max(values)
        self._base = 2 if high < 30 * low else 10
        self._low = math.floor(math.log(low, self._base) + 1e-9)
        self._high = math.ceil(math.log(high, self._base) - 1e-9)
        self._high = max(self._high, self._low + 1)
        self._first, self._last = first, last

    def pixel(self, value: float) -> float:
        """Returns the position of a value."""
        share = (math.log(value, self._base) - self._low) / (
            self._high - self._low
        )
        return self._first + share * (self._last - self._first)

    def ticks(self) -> list[float]:
        """Returns the values that have a label."""
        return [
            float(self._base) ** power
            for power in range(self._low, self._high + 1)
        ]


def _chart(chart: Chart) -> str:
    points = [point for line in chart.lines for point in line.points]
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    across = _Axis([x for x, _ in points], _LEFT, right)
    up = _Axis([y for _, y in points], bottom, _TOP)
    parts = [_text(_LEFT, _TOP - 14, chart.title)]
    for value in across.ticks():
        x = across.pixel(value)
        parts.append(_rule(x, _TOP, x, bottom))
        parts.append(_text(x, bottom + 16, _short(value), anchor="middle"))
    for value in up.ticks():
        y = up.pixel(value)
        parts.append(_rule(_LEFT, y, right, y))
        parts.append(_text(_LEFT - 6, y + 4, _short(value), anchor="end"))
    parts.append(
        _text((_LEFT + right) / 2, bottom + 34, chart.label, anchor="middle")
    )
    for i, line in enumerate(chart.lines):
        parts.append(_line(line, across, up, bottom + 56 + 16 * i))
    return "".join(parts)


def _line(line: Line, across: _Axis, up: _Axis, legend: float) -> str:
    style = f'stroke="{COLORS[line.color]}" stroke-width="2" fill="none"'
    if line.is_dashed:
        style += ' stroke-dasharray="5 3"'
    pixels = [(across.pixel(x), up.pixel(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLORS[line.color]}"/>'
        for x, y in pixels
        if not line.is_dashed
    )
    return (
        f'<polyline points="{path}" {style}/>{dots}'
        f'<line x1="{_LEFT}" y1="{legend:.1f}" x2="{_LEFT + 26}" '
        f'y2="{legend:.1f}" {style}/>'
        + _text(_LEFT + 34, legend + 4, line.name)
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        'stroke="#e2e8f0"/>'
    )


def _short(value: float) -> str:
    """Returns a value with a unit prefix, such as 100k.

    >>> [_short(one) for one in (0.01, 2.0, 1e5, 1e8)]
    ['0.01', '2', '100k', '100M']
    """
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{prefix}"
    return f"{value:g}"


def _text(
    x: float, y: float, text: str, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{html.escape(text)}</text>'
    )
