"""Emulation of TensorFlow's TPU embedding on CPUs: `tlm.emulation.enable()`."""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "enable": "tf_layoutmap.emulation.switch:enable",
    "disable": "tf_layoutmap.emulation.switch:disable",
    "enabled": "tf_layoutmap.emulation.switch:enabled",
    "initialize_tpu_system": "tf_layoutmap.emulation.switch:initialize_tpu_system",
    "reset": "tf_layoutmap.emulation.switch:reset",
    "report": "tf_layoutmap.emulation.switch:report",
    "EmulatedTPUStrategy": "tf_layoutmap.emulation.strategy:EmulatedTPUStrategy",
}

if TYPE_CHECKING:
    from tf_layoutmap.emulation.strategy import EmulatedTPUStrategy
    from tf_layoutmap.emulation.switch import (
        disable,
        enable,
        enabled,
        initialize_tpu_system,
        report,
        reset,
    )
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "enable",
    "disable",
    "enabled",
    "initialize_tpu_system",
    "reset",
    "report",
    "EmulatedTPUStrategy",
]
