"""Ops of ours, and yours, on tensors that tf.dtensor has divided."""

from tf_layoutmap import _lazy

_HOMES = {
    name: f"tf_layoutmap.dtensor.policies:{name}"
    for name in ("POLICIES", "available", "enable_missing_ops", "register_op",
                 "unavailable_reason")}
__getattr__, __dir__ = _lazy.exports(__name__, _HOMES)
__all__ = list(_HOMES)
