"""Sphinx extension that warns about pages that load files from other hosts.

All built pages must be readable without a network connection.
"""

import pathlib
import re
from typing import Any

from sphinx.util import logging

LOADED = [
    re.compile(
        r"<(?:script|img|iframe|source|audio|video)\b[^>]*?\bsrc=\"?"
        r"((?:https?:)?//[^\s\">]+)",
        re.I,
    ),
    re.compile(
        r"<link\b(?=[^>]*\brel=\"?(?:stylesheet|icon|preload|preconnect"
        r"|shortcut))[^>]*?\bhref=\"?((?:https?:)?//[^\s\">]+)",
        re.I,
    ),
]
STYLED = [re.compile(r"(?:@import\s+|url\()[\"']?((?:https?:)?//[^\s\"')]+)")]


def foreign_files(folder: pathlib.Path) -> list[tuple[str, str]]:
    """Returns pairs of a file and an external address that the file loads.

    Only pages and style sheets are searched.
    """
    return [
        (str(path.relative_to(folder)), address)
        for suffix, patterns in ((".html", LOADED + STYLED), (".css", STYLED))
        for path in sorted(folder.rglob("*" + suffix))
        for pattern in patterns
        for address in pattern.findall(path.read_text(encoding="utf-8"))
    ]


def check(app: Any, exception: Exception | None) -> None:
    if exception is None:
        for page, address in foreign_files(pathlib.Path(app.outdir)):
            logging.getLogger(__name__).warning(
                "%s must need no network. It would load %s.", page, address
            )


def setup(app: Any) -> dict[str, Any]:
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
