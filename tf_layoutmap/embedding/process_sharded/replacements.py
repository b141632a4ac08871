"""Replaced names of TensorFlow, for tables that are sharded over processes."""

from tf_layoutmap._core.patch_entry import TENSORFLOW, Patch
from tf_layoutmap.embedding.process_sharded import saving

GROUP = "sharded_tables"

PATCHES: tuple[Patch, ...] = (
    Patch(
        GROUP,
        "_core.tf_private:TrackableSaver",
        "save",
        saving.save,
        "TensorFlow gathers all tables in memory before it writes the "
        "first table.",
        TENSORFLOW,
        "tests/embedding/process_sharded/test_process_sharded.py",
    ),
)
