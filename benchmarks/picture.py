"""Draws a bar chart of milliseconds, with the hardware limit as a line."""

import html
from collections.abc import Mapping
from typing import Any

# Colors of the bars of a workload, from left to right. The roof is not a bar
# but a line across all bars.
_COLORS = {
    "packed": "#2b6cb0",
    "tlm": "#63b3ed",
    "fbgemm": "#c05621",
    "bag": "#dd8c2f",
    "tf": "#a0aec0",
}
_WIDTH, _BAR, _GAP, _LEFT, _SCALE = 900, 16, 26, 210, 560


def svg(figures: Mapping[str, Any], title: str) -> str:
    """Returns an SVG image of the results of `embedding_step.report`.

    Args:
      figures: Medians and quartiles in milliseconds, by workload.
      title: Title of the image.
    """
    parts, y = [], 56
    for verb, shown in (("lookup", "lookup"), ("train", "training step")):
        parts.append(_text(12, y, shown, weight="bold"))
        y += 12
        for name, figure in figures.items():
            milliseconds = figure["milliseconds"]
            bars = [
                (contestant, milliseconds[f"{contestant}.{verb}"])
                for contestant in _COLORS
                if f"{contestant}.{verb}" in milliseconds
            ]
            roof = milliseconds[f"roof.{verb}"]["median"]
            # Each workload has its own scale, because the chart compares ratios
            # within a workload.
            scale = _SCALE / max(bar["quartiles"][1] for _, bar in bars)
            parts.append(_text(24, y + _BAR, name))
            top = y
            for contestant, bar in bars:
                parts.append(_bar(y, bar, scale, _COLORS[contestant]))
                parts.append(
                    _text(
                        _LEFT + bar["quartiles"][1] * scale + 8,
                        y + 12,
                        f"{contestant} {bar['median']:.1f} ms",
                    )
                )
                y += _BAR + 2
            parts.append(
                f'<line x1="{_LEFT + roof * scale:.1f}" y1="{top - 3}" '
                f'x2="{_LEFT + roof * scale:.1f}" y2="{y}" stroke="#c53030" '
                'stroke-width="2" stroke-dasharray="4 2"/>'
            )
            y += _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{y}" font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>'
        + _text(12, 20, title)
        + _text(
            12,
            36,
            "Medians; thin lines are quartiles, the dashed "
            "line is the machine's roof. Shorter is better.",
        )
        + "".join(parts)
        + "</svg>\n"
    )


def _bar(y: float, bar: Mapping[str, Any], scale: float, color: str) -> str:
    low, high = (_LEFT + quartile * scale for quartile in bar["quartiles"])
    return (
        f'<rect x="{_LEFT}" y="{y}" width="{bar["median"] * scale:.1f}" '
        f'height="{_BAR}" fill="{color}"/>'
        f'<line x1="{low:.1f}" y1="{y + _BAR / 2}" x2="{high:.1f}" '
        f'y2="{y + _BAR / 2}" stroke="black"/>'
    )


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )
