"""Sphinx extension that converts Markdown docstrings to reStructuredText.

Docstrings of this package are Markdown, as in TensorFlow, but Sphinx's autodoc
extension reads reStructuredText. The extension converts the two constructs
that differ: code in single backticks, and fenced code blocks.
"""

import re
from typing import Any

FENCE = re.compile(r"^( *)```(\w*)$")
# Code in single backticks. Double backticks are already valid
# reStructuredText.
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
    # In reStructuredText, a letter must not follow a literal directly. An
    # escaped space separates the letter from the literal and is not visible on
    # the page.
    behind = code.string[code.end() : code.end() + 1]
    return f"``{code[1]}``" + ("\\ " if behind.isalnum() else "")


def join_code(lines: list[str]) -> list[str]:
    """Joins two lines if inline code begins on one and ends on the next."""
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
        # Without an empty first line, Napoleon would parse the text before a
        # colon in the first line as a type.
        lines.insert(0, "")


def setup(app: Any) -> dict[str, Any]:
    # A lower number than Napoleon's priority (500), so that Napoleon receives
    # the converted docstring.
    app.connect("autodoc-process-docstring", convert, priority=400)
    return {"parallel_read_safe": True}
