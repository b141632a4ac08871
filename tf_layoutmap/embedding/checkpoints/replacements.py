"""Replaced names of TensorFlow, for checkpoints with stacked tables."""

from tf_layoutmap._core.patch_entry import TENSORFLOW, Patch
from tf_layoutmap.embedding.checkpoints import restoring

GROUP = "table_restores"

PATCHES: tuple[Patch, ...] = (
    Patch(
        GROUP,
        "_core.tf_private:checkpoint_restore",
        "_maybe_get_adapter",
        restoring.restore_tables,
        "An object cannot read several variables from one saved variable, as "
        "for tables that are stacked for SparseCores.",
        TENSORFLOW,
        "tests/emulation/test_programs.py",
    ),
)
