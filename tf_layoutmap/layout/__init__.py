"""Keras models whose weights lie on a mesh as their names ask for."""

from tf_layoutmap import _lazy

_HOMES = {
    "DeviceMesh": "tf_layoutmap.layout.mesh.device_mesh:DeviceMesh",
    "LayoutMap": "tf_layoutmap.layout.layout_map:LayoutMap",
    "TensorLayout": "tf_layoutmap.layout.mesh.tensor_layout:TensorLayout",
    "default_mesh": "tf_layoutmap.layout.mesh.trace_context:default_mesh",
    "self_check": "tf_layoutmap.layout.dtensor_switches:self_check",
    "to_host": "tf_layoutmap.layout.mesh.transfer:to_host",
    "to_mesh": "tf_layoutmap.layout.mesh.transfer:to_mesh",
    "visualize_layout": "tf_layoutmap.layout.visualize:visualize_layout",
}
__getattr__, __dir__ = _lazy.exports(__name__, _HOMES)
__all__ = list(_HOMES)
