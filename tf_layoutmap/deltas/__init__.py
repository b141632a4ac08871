"""Delta checkpoints: files with the table rows that changed since a checkpoint.

Start with `DeltaWriter`, which writes deltas while a program trains. `apply`
writes a full checkpoint from a checkpoint and its deltas. `merge` and `prune`
replace several deltas by one delta. `ServedModel` and `update_export` apply
deltas to an exported model, in a running process and on disk.

Most modules write deltas: `base.py` reads the checkpoint on which the deltas
are based, and `delta_files.py` writes the files of a delta. The package
`served` reads deltas. It requires only TensorFlow and NumPy, and a serving
process can use a copy of its folder.
"""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "Delta": "tf_layoutmap.deltas.served.chain:Delta",
    "DeltaWriter": "tf_layoutmap.deltas.writer:DeltaWriter",
    "Meta": "tf_layoutmap.deltas.served.chain:Meta",
    "ServedModel": "tf_layoutmap.deltas.served.served_model:ServedModel",
    "apply": "tf_layoutmap.deltas.applying:apply",
    "merge": "tf_layoutmap.deltas.merging:merge",
    "prune": "tf_layoutmap.deltas.merging:prune",
    "update_export": "tf_layoutmap.deltas.served.on_disk:update_export",
}

if TYPE_CHECKING:
    from tf_layoutmap.deltas.applying import apply
    from tf_layoutmap.deltas.merging import merge, prune
    from tf_layoutmap.deltas.served.chain import Delta, Meta
    from tf_layoutmap.deltas.served.on_disk import update_export
    from tf_layoutmap.deltas.served.served_model import ServedModel
    from tf_layoutmap.deltas.writer import DeltaWriter
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "Delta",
    "DeltaWriter",
    "Meta",
    "ServedModel",
    "apply",
    "merge",
    "prune",
    "update_export",
]
