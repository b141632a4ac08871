"""TensorFlow's TPU embedding without a TPU: `tlm.emulation.enable()`."""

from tf_layoutmap import _lazy

_HOMES = {
    "enable": "tf_layoutmap.emulation.switch:enable",
    "disable": "tf_layoutmap.emulation.switch:disable",
    "enabled": "tf_layoutmap.emulation.switch:enabled",
    "initialize_tpu_system":
        "tf_layoutmap.emulation.switch:initialize_tpu_system",
    "reset": "tf_layoutmap.emulation.switch:reset",
    "report": "tf_layoutmap.emulation.switch:report",
    "EmulatedTPUStrategy":
        "tf_layoutmap.emulation.strategy:EmulatedTPUStrategy",
}
__getattr__, __dir__ = _lazy.exports(__name__, _HOMES)
__all__ = list(_HOMES)
