"""Keras models whose weights are placed on a DTensor mesh by name.

Start with `tlm.LayoutMap` and `tlm.layout_map_scope`.
`assignments` selects the layout of each variable. `mesh_step` runs a step on
the mesh. The subpackages are:

* `mesh`: tensors and variables on a mesh.
* `ops`: corrected TensorFlow ops.
* `replication`: the fallback for ops that DTensor cannot shard.
* `processes`: checks that all processes run the same steps.
* `keras3` and `tf_keras`: the integration with both versions of Keras.
"""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "Explanation": "tf_layoutmap.layout.explain:Explanation",
    "LayoutMapWarning": "tf_layoutmap.layout.mesh.errors:LayoutMapWarning",
    "Match": "tf_layoutmap.layout.key_matching:Match",
    "MeasuredLayer": "tf_layoutmap.layout.replication.measured:MeasuredLayer",
    "ReplicatedOp": "tf_layoutmap.layout.replication.report:ReplicatedOp",
    "VariableReport": "tf_layoutmap.layout.explain:VariableReport",
    "default_mesh": "tf_layoutmap.layout.mesh.tracing:default_mesh",
    "self_check": "tf_layoutmap.layout.dtensor_switches:self_check",
    "to_host": "tf_layoutmap.layout.mesh.transfer:to_host",
    "to_mesh": "tf_layoutmap.layout.mesh.transfer:to_mesh",
}

if TYPE_CHECKING:
    from tf_layoutmap.layout.dtensor_switches import self_check
    from tf_layoutmap.layout.explain import Explanation, VariableReport
    from tf_layoutmap.layout.key_matching import Match
    from tf_layoutmap.layout.mesh.errors import LayoutMapWarning
    from tf_layoutmap.layout.mesh.tracing import default_mesh
    from tf_layoutmap.layout.mesh.transfer import to_host, to_mesh
    from tf_layoutmap.layout.replication.measured import MeasuredLayer
    from tf_layoutmap.layout.replication.report import ReplicatedOp
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "Explanation",
    "LayoutMapWarning",
    "Match",
    "MeasuredLayer",
    "ReplicatedOp",
    "VariableReport",
    "default_mesh",
    "self_check",
    "to_host",
    "to_mesh",
]
