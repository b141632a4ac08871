"""Docstrings are Markdown, as in TensorFlow; autodoc reads reStructuredText.

What the two write differently is little: code in single backticks, and blocks
of code between fences.
"""

import re
from typing import Any

FENCE = re.compile(r"^( *)```(\w*)$")
# Code that is not a literal of reStructuredText already.
CODE = re.compile(r"(?<![`:\\])`([^`\n]+)`(?!`)")


def to_rst(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring as reStructuredText."""
    result = []
    inside = False
    for line in join_code(lines):
        fence = FENCE.match(line)
        if fence and not inside:
            language = fence[2] or "text"
            result += ["", f"{fence[1]}.. code-block:: {language}", ""]
            inside = True
        elif fence:
            result.append("")
            inside = False
        elif inside:
            result.append("    " + line if line.strip() else "")
        else:
            result.append(CODE.sub(literal, line))
    return result


def literal(code: re.Match[str]) -> str:
    # An "s" right behind a literal has to be parted from it, invisibly.
    behind = code.string[code.end() : code.end() + 1]
    return f"``{code[1]}``" + ("\\ " if behind.isalnum() else "")


def join_code(lines: list[str]) -> list[str]:
    """Brings code that is broken over two lines onto the first of them."""
    joined: list[str] = []
    for line in lines:
        before = joined[-1] if joined else ""
        if (
            before.count("`") % 2
            and line.strip()
            and "`" in line
            and not FENCE.match(before)
        ):
            joined[-1] = f"{before} {line.strip()}"
        else:
            joined.append(line)
    return joined


def convert(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = to_rst(lines)
    if what in ("property", "attribute", "data"):
        # Napoleon would take what is before a colon on the first line for a
        # type.
        lines.insert(0, "")


def setup(app: Any) -> dict[str, Any]:
    # Before napoleon (500), so that its sections are read as what they become.
    app.connect("autodoc-process-docstring", convert, priority=400)
    return {"parallel_read_safe": True}
