"""The API of `keras.distribution`, implemented on TensorFlow's DTensor.

Start with `DeviceMesh`, `LayoutMap` and `ModelParallel`.
"""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "DataParallel": "tf_layoutmap.distribution.parallel:DataParallel",
    "DeviceMesh": "tf_layoutmap.distribution.layout_map:DeviceMesh",
    "Distribution": "tf_layoutmap.distribution.parallel:Distribution",
    "LayoutMap": "tf_layoutmap.distribution.layout_map:LayoutMap",
    "ModelParallel": "tf_layoutmap.distribution.parallel:ModelParallel",
    "TensorLayout": "tf_layoutmap.distribution.layout_map:TensorLayout",
    "disable": "tf_layoutmap.distribution.keras_backend:disable",
    "distribute_tensor": "tf_layoutmap.distribution.layout_map:distribute_tensor",
    "distribution": "tf_layoutmap.distribution.parallel:distribution",
    "enable": "tf_layoutmap.distribution.keras_backend:enable",
    "enabled": "tf_layoutmap.distribution.keras_backend:enabled",
    "get_device_count": "tf_layoutmap.distribution.processes:get_device_count",
    "initialize": "tf_layoutmap.distribution.processes:initialize",
    "list_devices": "tf_layoutmap.layout.mesh.device_mesh:list_devices",
    "set_distribution": "tf_layoutmap.distribution.parallel:set_distribution",
    "set_process_checks": "tf_layoutmap.layout.processes.checks:set_process_checks",
}

if TYPE_CHECKING:
    from tf_layoutmap.distribution.keras_backend import disable, enable, enabled
    from tf_layoutmap.distribution.layout_map import (
        DeviceMesh,
        LayoutMap,
        TensorLayout,
        distribute_tensor,
    )
    from tf_layoutmap.distribution.parallel import (
        DataParallel,
        Distribution,
        ModelParallel,
        distribution,
        set_distribution,
    )
    from tf_layoutmap.distribution.processes import get_device_count, initialize
    from tf_layoutmap.layout.mesh.device_mesh import list_devices
    from tf_layoutmap.layout.processes.checks import set_process_checks
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "Distribution",
    "LayoutMap",
    "ModelParallel",
    "TensorLayout",
    "disable",
    "distribute_tensor",
    "distribution",
    "enable",
    "enabled",
    "get_device_count",
    "initialize",
    "list_devices",
    "set_distribution",
    "set_process_checks",
]
