"""SavedModels with compact tables, and lookups in tables of other programs.

Start with `tlm.export`, which `export.py` defines. It returns an
`ExportReport`.
"""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "ExportReport": "tf_layoutmap.serving.report:ExportReport",
    "TableReport": "tf_layoutmap.serving.report:TableReport",
    "serving_embedding_lookup": "tf_layoutmap.embedding.serving:serving_embedding_lookup",
}

if TYPE_CHECKING:
    from tf_layoutmap.embedding.serving import serving_embedding_lookup
    from tf_layoutmap.serving.report import ExportReport, TableReport
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "ExportReport",
    "TableReport",
    "serving_embedding_lookup",
]
