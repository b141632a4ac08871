"""Writes docs/features_by_runtime.md from the declared states."""

import pathlib

from tests.contract.declared import SECTIONS, Section
from tests.contract.states import (
    RUNTIMES,
    Absent,
    Impossible,
    State,
    Works,
)

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "features_by_runtime.md"

# `write` does not change the lines of the page before this line.
MARK = "<!-- `python -m tests.contract` writes the rest of this page. -->\n"


def _word(state: State) -> str:
    if isinstance(state, Works):
        return "works"
    if isinstance(state, Impossible | Absent):
        return "impossible"
    return "not tried"


def _table(name: str, section: Section) -> list[str]:
    reasons: list[str] = []

    def cell(state: State) -> str:
        if not state.reason:
            return _word(state)
        if state.reason not in reasons:
            reasons.append(state.reason)
        return f"{_word(state)} ({reasons.index(state.reason) + 1})"

    lines = [
        f"## {section.title}",
        "",
        section.text,
        "",
        "| feature | "
        + " | ".join(RUNTIMES[one] for one in section.columns)
        + " |",
        "|---" * (len(section.columns) + 1) + "|",
    ]
    for feature in section.rows:
        lines.append(
            f"| {feature} | "
            + " | ".join(
                cell(section.state(feature, runtime))
                for runtime in section.columns
            )
            + " |"
        )
    if reasons:
        lines += [""] + [
            f"{number}. {reason}" for number, reason in enumerate(reasons, 1)
        ]
    return [*lines, ""]


def text() -> str:
    """Returns the generated part of the page."""
    lines: list[str] = []
    for name, section in SECTIONS.items():
        lines += _table(name, section)
    return "\n".join(lines)


def read() -> tuple[str, str]:
    """Returns the written part and the generated part of the page."""
    before, mark, after = PAGE.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE} must have the line {MARK!r}.")
    return before, after.removeprefix("\n")


def write() -> None:
    """Replaces the generated part of the page."""
    before, _ = read()
    PAGE.write_text(f"{before}{MARK}\n{text()}", encoding="utf-8")
