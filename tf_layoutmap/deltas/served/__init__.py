"""Applies deltas to served models; requires only TensorFlow and NumPy.

A serving process without tf_layoutmap can use a copy of this folder under any
name. The modules of the folder therefore import each other by relative imports,
and import no other module of tf_layoutmap.

`served_model.py` defines `ServedModel`, which applies deltas in a running
process. `on_disk.py` defines `update_export`, which applies deltas to a
SavedModel on disk. `chain.py` reads and checks deltas, `export_state.py` reads
and writes the file that describes the tables of a SavedModel, `changes.py`
converts deltas to the rows that the SavedModel stores, and `packing.py` packs
rows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .on_disk import update_export
    from .served_model import ServedModel

__all__ = ["ServedModel", "update_export"]

_MODULES = {"ServedModel": ".served_model", "update_export": ".on_disk"}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use.

    `chain.py` and `packing.py` can therefore be imported without TensorFlow.
    """
    if name not in _MODULES:
        raise AttributeError(
            f"Module {__name__!r} has no attribute {name!r}. Its public names "
            f"are: {', '.join(__all__)}."
        )
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
