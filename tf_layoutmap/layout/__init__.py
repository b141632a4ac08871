"""Keras models whose weights lie on a mesh as their names ask for."""

from tf_layoutmap import _lazy

_HOMES = {
    "DeviceMesh": "tf_layoutmap.layout.device_mesh:DeviceMesh",
    "LayoutMap": "tf_layoutmap.layout.layout_map:LayoutMap",
    "TensorLayout": "tf_layoutmap.layout.tensor_layout:TensorLayout",
    "default_mesh": "tf_layoutmap.layout.host_values:default_mesh",
    "self_check": "tf_layoutmap.layout.switches:self_check",
    "to_host": "tf_layoutmap.layout.host_values:to_host",
    "to_mesh": "tf_layoutmap.layout.host_values:to_mesh",
    "visualize_layout": "tf_layoutmap.layout.drawing:visualize_layout",
}
__getattr__, __dir__ = _lazy.exports(__name__, _HOMES)
__all__ = list(_HOMES)
