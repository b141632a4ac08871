"""Replaced names of TensorFlow, for checkpoints of variables on a mesh."""

from tf_layoutmap._core.patch_entry import TENSORFLOW, Patch
from tf_layoutmap.layout.mesh import variable

GROUP = "checkpoints"

PATCHES: tuple[Patch, ...] = (
    *(
        Patch(
            GROUP,
            owner,
            name,
            ours,
            "The I/O device that DTensor's documentation recommends "
            "supports only tensors on a mesh.",
            TENSORFLOW,
            "tests/layout/mesh/test_checkpoint_files.py",
        )
        for owner, name, ours in (
            ("_core.tf_private:TrackableSaver", "save", variable.save),
            (
                "_core.tf_private:TrackableSaver",
                "restore",
                variable.restore,
            ),
            (
                "_core.tf_private:DTrackableSaver",
                "restore",
                variable.restore,
            ),
        )
    ),
    Patch(
        GROUP,
        "tensorflow:experimental.dtensor.DVariable",
        "_gather_saveables_for_checkpoint",
        variable.saveables,
        "A checkpoint cannot contain both variables on a mesh and "
        "variables on the host.",
        TENSORFLOW,
        "tests/layout/mesh/test_checkpoint_files.py",
    ),
)
