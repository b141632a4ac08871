"""Descriptions of the current process, for example for a bug report."""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "AppliedPatch": "tf_layoutmap._core.patches:AppliedPatch",
    "describe": "tf_layoutmap.process_report:describe",
    "patches": "tf_layoutmap._core.patches:patches",
}

if TYPE_CHECKING:
    from tf_layoutmap._core.patches import AppliedPatch, patches
    from tf_layoutmap.process_report import describe
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "AppliedPatch",
    "describe",
    "patches",
]
