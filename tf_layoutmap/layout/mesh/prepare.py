"""Makes a process ready for a mesh, before DTensor is used."""

import warnings

from tf_layoutmap import _tf_private
from tf_layoutmap._patches import engine
from tf_layoutmap.dtensor import missing_rules, policies
from tf_layoutmap.layout.mesh.layouts import Mesh, claim


def prepare_process(mesh: Mesh | None = None) -> None:
    """Replaces what DTensor needs replaced, the first time it is called.

    Called wherever a mesh, layout map or tensor on a mesh of ours is made:
    the device of DTensor should be made after it.

    Args:
      mesh: The mesh that the program passes to this package: DTensor is
        corrected there. None if it is not known yet.
    """
    if mesh is not None:
        claim(mesh)
    if engine.is_installed("mesh"):
        return
    if _tf_private.has_dtensor_device():
        warnings.warn(
            "DTensor was used in this process before tf_layoutmap, so that its "
            "device keeps errors of operations in queues; an error of a step "
            "can then end the process. Make the tlm.LayoutMap, or call "
            "tlm.layout.to_mesh, before the first operation of "
            "tf.experimental.dtensor.",
            stacklevel=3,
        )
    engine.ensure("mesh")
    engine.ensure("checkpoints")
    engine.ensure("memory")
    if policies.available():
        missing_rules.enable_missing_ops()
