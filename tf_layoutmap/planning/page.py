"""Formats a plan as rows of text, and as one HTML page.

The page shows devices as boxes with the items that they store, the memory
compared with the budget, the predicted time of a step by part, and a table of
the choices with reasons. It does not load scripts, fonts or other files.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tf_layoutmap.planning import explanations
from tf_layoutmap.planning.explanations import format_bytes, format_time
from tf_layoutmap.planning.problem import devices_of

# Colors of the parts of a bar, in the order of the legend.
_COLORS = (
    "#1a66c2",
    "#b3561a",
    "#3c7d3f",
    "#7a4ba8",
    "#8a6d00",
    "#a8326b",
    "#3d6b73",
)
# Number of items that a box lists by name.
_ITEMS_IN_BOX = 8

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
       max-width: 76rem; padding: 0 1rem; color: #1c2330; background: #fff;
       overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 1rem 0 2rem; }
th, td { padding: .3rem .8rem; text-align: right; vertical-align: top;
         border-bottom: 1px solid #d8dde6; overflow-wrap: normal; }
th:first-child, td:first-child, .choice, .reason { text-align: left; }
td.item { min-width: 9rem; overflow-wrap: anywhere; }
td.reason { min-width: 22rem; }
.wide { overflow-x: auto; }
.devices { display: grid; gap: 1rem; margin: 1rem 0 2rem;
           grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
.device { border: 1px solid #b9c1ce; border-radius: 6px; padding: .8rem; }
.device h3 { margin: 0 0 .5rem; font-size: 1rem; }
.device p { margin: .5rem 0 .15rem; font-size: .85rem; color: #3c4554; }
.device ul { margin: .6rem 0 0; padding-left: 1.1rem; font-size: .85rem; }
.slowest { border-color: #b3561a; border-width: 2px; }
.bar { display: flex; height: 14px; background: #e9edf3; border-radius: 3px;
       overflow: hidden; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; }
.legend i { display: inline-block; width: .8em; height: .8em;
            border-radius: 2px; margin-right: .35em; }
@media (min-width: 40.01rem) {
  td.memory, td.time { white-space: nowrap; }
}
@media (max-width: 40rem) {
  body { margin: 1rem auto; }
  h1 { font-size: 1.4rem; }
  table.choices, table.choices tbody, table.choices tr { display: block; }
  table.choices tr:first-child { display: none; }
  table.choices tr { border: 1px solid #b9c1ce; border-radius: 6px;
                     margin-bottom: .8rem; padding: .5rem .7rem; }
  table.choices td { display: flex; justify-content: space-between;
                     gap: 1rem; border: 0; padding: .15rem 0;
                     min-width: 0; overflow-wrap: anywhere;
                     text-align: right; }
  table.choices td::before { content: attr(data-name); color: #5b6472;
                             flex: none; }
  table.choices td.reason { display: block; text-align: left; }
  table.choices td.reason::before { display: block; }
}
"""


def title(plan: Any) -> str:
    """Returns the heading of a plan."""
    count = len(plan.solution.problem.items)
    return (
        f"Plan of {count:,} item{'s' * (count != 1)} for {plan.target}: "
        f"{format_time(plan.step_seconds)} per step"
    )


def device_rows(plan: Any) -> list[list[str]]:
    """Returns a header row, and one row of strings per group of devices.

    Devices that store the same items are one group.
    """
    parts = _part_names(plan.solution.seconds())
    # Without `memory`, the budgets are the memory of the plan itself.
    is_limited = plan.solution.problem.is_limited
    names = ["budget", "used"] if is_limited else []
    rows = [["device", "items", "memory", *names, "step", *parts]]
    for devices in _groups(plan):
        first = devices[0]
        used = plan.solution.total_memory[first]
        budget = plan.solution.problem.budgets[first]
        seconds = plan.solution.seconds()[first]
        share = f"{used / budget:.1%}" if budget else "-"
        limits = [format_bytes(budget), share] if is_limited else []
        rows.append(
            [
                _name(plan, devices),
                f"{len(_stored(plan, first)):,}",
                format_bytes(used),
                *limits,
                format_time(math.fsum(seconds.values())),
                *(format_time(seconds.get(part, 0.0)) for part in parts),
            ]
        )
    return rows


def choice_rows(plan: Any) -> list[list[str]]:
    """Returns a header row, and one row of strings per item."""
    rows = [["item", "shape", "choice", "memory", "time", "runner-up"]]
    for item in plan.solution.problem.items:
        choice = plan.solution.choice_of(item)
        others = explanations.alternatives_of(plan.solution, item)
        rows.append(
            [
                item.name,
                _shapes(item),
                choice.name,
                format_bytes(sum(choice.memory.values())),
                format_time(math.fsum(choice.seconds.values())),
                _runner_up(others[0]) if others else "-",
            ]
        )
    return rows


def page(plan: Any) -> str:
    """Returns the plan as an HTML page."""
    seconds, memory = plan.solution.seconds(), plan.solution.memory()
    heading = html.escape(title(plan))
    times = _colors(_part_names(seconds))
    sizes = _colors(_part_names(memory))
    boxes = "".join(_box(plan, group, sizes, times) for group in _groups(plan))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in plan.notes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{heading}</h1><h2>Devices</h2>"
        f"{_legend('Memory', sizes)}{_legend('Time of a step', times)}"
        f'<div class="devices">{boxes}</div>'
        f"<h2>Choices</h2>{_choices(plan)}"
        + (f"<h2>Assumptions</h2><ul>{notes}</ul>" if notes else "")
        + "</body></html>\n"
    )


def _box(
    plan: Any,
    devices: Sequence[int],
    sizes: Mapping[str, str],
    times: Mapping[str, str],
) -> str:
    """Returns the box of a group of devices."""
    first = devices[0]
    used = plan.solution.total_memory[first]
    budget = plan.solution.problem.budgets[first]
    seconds = plan.solution.total_seconds[first]
    stored = _stored(plan, first)
    lines = [
        f"<li>{html.escape(name)}: {format_bytes(size)}</li>"
        for name, size in stored[:_ITEMS_IN_BOX]
    ]
    rest = stored[_ITEMS_IN_BOX:]
    if rest:
        lines.append(
            f"<li>{len(rest):,} more: "
            f"{format_bytes(sum(size for _, size in rest))}</li>"
        )
    limit = f" of {format_bytes(budget)}" * plan.solution.problem.is_limited
    is_slowest = seconds == plan.step_seconds and len(_groups(plan)) > 1
    return (
        f'<div class="device{" slowest" * is_slowest}">'
        f"<h3>{html.escape(_name(plan, devices))}</h3>"
        f"<p>{format_bytes(used)}{limit}</p>"
        f"{_bar(plan.solution.memory()[first], budget, sizes)}"
        f"<p>{format_time(seconds)} per step"
        f"{' (slowest)' * is_slowest}</p>"
        f"{_bar(plan.solution.seconds()[first], plan.step_seconds, times)}"
        f"<ul>{''.join(lines)}</ul></div>"
    )


def _bar(
    values: Mapping[str, float], full: float, colors: Mapping[str, str]
) -> str:
    """Returns a bar whose full width represents `full`."""
    parts = "".join(
        f'<span title="{html.escape(part)}" style="width:'
        f'{100 * values.get(part, 0) / full:.2f}%;background:{color}"></span>'
        for part, color in colors.items()
        if full and values.get(part)
    )
    return f'<div class="bar">{parts}</div>'


def _legend(name: str, colors: Mapping[str, str]) -> str:
    parts = "".join(
        f'<span><i style="background:{color}"></i>{html.escape(part)}</span>'
        for part, color in colors.items()
    )
    return f'<div class="legend"><b>{html.escape(name)}:</b>{parts}</div>'


def _choices(plan: Any) -> str:
    names, *rows = choice_rows(plan)
    names = [*names[:-1], "reason"]
    head = "".join(
        f'<th class="{name}">{html.escape(name)}</th>' for name in names
    )
    body = ""
    for row, item in zip(rows, plan.solution.problem.items):
        cells = [*row[:-1], explanations.reason(plan.solution, item)]
        # The dimensions of a shape stay on one line.
        cells[1] = cells[1].replace(" x ", "\xa0x\xa0")
        body += "<tr>" + "".join(
            f'<td class="{name}" data-name="{name}">{html.escape(cell)}</td>'
            for name, cell in zip(names, cells)
        )
        body += "</tr>"
    return (
        f'<div class="wide"><table class="choices"><tr>{head}</tr>{body}'
        "</table></div>"
    )


def _runner_up(other: explanations.Alternative) -> str:
    if other.refused is not None:
        return f"{other.name}: not possible"
    if other.missing_bytes:
        word = "missing" if other.is_limited else "more"
        return f"{other.name}: {format_bytes(other.missing_bytes)} {word}"
    return f"{other.name}: {format_time(other.step_seconds)} per step"


def _shapes(item: Any) -> str:
    shapes = [
        " x ".join(f"{size:,}" for size in shape) or "scalar"
        for shape in item.weights.values()
    ]
    return ", ".join(shapes[:2]) + f", {len(shapes) - 2} more" * (
        len(shapes) > 2
    )


def _stored(plan: Any, device: int) -> list[tuple[str, int]]:
    """Returns the items on a device and their bytes, the largest first."""
    solution = plan.solution
    items: list[tuple[str, int]] = []
    for item in solution.problem.items:
        choice = solution.choice_of(item)
        if device in devices_of(choice, solution.problem):
            items.append((item.name, sum(choice.memory.values())))
    return sorted(items, key=lambda entry: -entry[1])


def _groups(plan: Any) -> list[list[int]]:
    """Returns the devices in groups that store the same items."""
    solution = plan.solution
    stored: list[list[str]] = [[] for _ in solution.problem.devices]
    for item in solution.problem.items:
        for device in devices_of(solution.choice_of(item), solution.problem):
            stored[device].append(item.name)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for device, names in enumerate(stored):
        key = (solution.problem.budgets[device], *names)
        groups.setdefault(key, []).append(device)
    return list(groups.values())


def _name(plan: Any, devices: Sequence[int]) -> str:
    names = [plan.solution.problem.devices[device] for device in devices]
    if len(names) == 1:
        return names[0]
    if len(names) == len(plan.solution.problem.devices):
        nouns = {"servers": "servers", "workers": "processes"}
        noun = nouns.get(plan.target.kind, "devices")
        return f"each of the {len(names)} {noun}"
    return f"each of {', '.join(names[:3])}" + ", ..." * (len(names) > 3)


def _part_names(devices: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the parts that are not 0 on all devices, in their first order."""
    return list(
        dict.fromkeys(
            part for parts in devices for part, value in parts.items() if value
        )
    )


def _colors(parts: Sequence[str]) -> dict[str, str]:
    return {
        part: _COLORS[index % len(_COLORS)] for index, part in enumerate(parts)
    }
