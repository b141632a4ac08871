"""Reads the texts of the project: comments, docstrings, messages and pages."""

import ast
import dataclasses
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = (
    "tf_layoutmap",
    "tests",
    "benchmarks",
    "examples",
    "docs",
    "cc",
    "tools",
)
_FILES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


@dataclasses.dataclass(frozen=True)
class Text:
    """A comment, docstring, string or paragraph.

    Attributes:
      path: Path relative to the root of the project.
      line: Number of the first line, starting from 1.
      kind: `"comment"`, `"docstring"`, `"string"` or `"page"`.
      text: The text, without comment markers.
    """

    path: str
    line: int
    kind: str
    text: str


def _of_python(path: str, source: str) -> Iterator[Text]:
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = set()
    for node in nodes:
        if isinstance(
            node,
            ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
        ):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(
                first.value, ast.Constant
            ):
                docstrings.add(first.value)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if node in docstrings else "string"
            if " " in node.value:
                yield Text(path, node.lineno, kind, node.value)
    start, lines, last = 0, [], -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1 or not lines:
            if lines:
                yield Text(path, start, "comment", " ".join(lines))
            start, lines = token.start[0], []
        lines.append(token.string.lstrip("#").strip())
        last = token.start[0]
    if lines:
        yield Text(path, start, "comment", " ".join(lines))


def _of_cpp(path: str, source: str) -> Iterator[Text]:
    start, lines, last = 0, [], -1
    for number, line in enumerate(source.splitlines(), 1):
        found = re.search(r"(?:^|\s)//+ ?(.*)$", line)
        if found:
            if number != last + 1 and lines:
                yield Text(path, start, "comment", " ".join(lines))
                lines = []
            if not lines:
                start = number
            lines.append(found[1])
            last = number
        for string in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
            if " " in string and not found:
                yield Text(path, number, "string", string)
    if lines:
        yield Text(path, start, "comment", " ".join(lines))


def _of_page(path: str, source: str) -> Iterator[Text]:
    start, lines, is_code = 0, [], False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
            line = ""
        elif is_code:
            continue
        if line.strip():
            if not lines:
                start = number
            lines.append(line.strip())
        elif lines:
            yield Text(path, start, "page", " ".join(lines))
            lines = []


_READERS = {
    ".py": _of_python,
    ".cc": _of_cpp,
    ".h": _of_cpp,
    ".md": _of_page,
}


@functools.cache
def all_texts() -> tuple[Text, ...]:
    """Returns all texts, ordered by file and line."""
    paths = [ROOT / name for name in _FILES]
    for folder in _FOLDERS:
        paths += sorted((ROOT / folder).rglob("*"))
    return tuple(
        text
        for path in paths
        if path.suffix in _READERS
        and not {"__pycache__", "_build_info.py"} & set(path.parts)
        for text in _READERS[path.suffix](
            str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        )
    )


def sentences(text: Text) -> list[str]:
    """Returns the sentences of a text that have at least four words.

    Sentences end at a full stop, at the end of a table cell, at an item of a
    list and at the description of an argument. Doctests are not included.
    """
    lines = [
        # The name of an argument, `name: description`, is not part of the
        # sentence.
        re.sub(r"^\s*(?:\w+(?:, \w+)*|\*+\w+): ", " .. ", line)
        if text.kind == "docstring"
        else line
        for line in text.text.split("\n")
        if not re.match(r"\s*(>>>|\.\.\. )", line)
    ]
    plain = re.sub(r"\s+", " ", "\n".join(lines))
    parts = re.split(
        r"(?<=[.!?:])\s+(?=[A-Z`\"'(*-])|\s+\.\.\s+|\s*\|\s*|\s+[*-]\s+", plain
    )
    return [part.strip() for part in parts if len(part.split()) >= 4]
