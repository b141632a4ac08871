"""The layouts of `keras.distribution`, on TensorFlow's DTensor."""

from tf_layoutmap import _lazy

_HOMES = {
    "DataParallel": "tf_layoutmap.distribution.parallel:DataParallel",
    "DeviceMesh": "tf_layoutmap.layout.device_mesh:DeviceMesh",
    "LayoutMap": "tf_layoutmap.distribution.layout_map:LayoutMap",
    "ModelParallel": "tf_layoutmap.distribution.parallel:ModelParallel",
    "TensorLayout": "tf_layoutmap.layout.tensor_layout:TensorLayout",
    "distribute_tensor":
        "tf_layoutmap.distribution.distribute_tensor:distribute_tensor",
    "list_devices": "tf_layoutmap.layout.device_mesh:list_devices",
}
__getattr__, __dir__ = _lazy.exports(__name__, _HOMES)
__all__ = list(_HOMES)
