"""Ops of ours, and yours, on tensors that tf.dtensor has divided."""

from typing import TYPE_CHECKING

from tf_layoutmap import _lazy

_HOMES = {
    name: f"tf_layoutmap.dtensor.policies:{name}"
    for name in ("POLICIES", "available", "register_op", "unavailable_reason")
}
_HOMES["enable_missing_ops"] = (
    "tf_layoutmap.dtensor.missing_rules:enable_missing_ops"
)

if TYPE_CHECKING:
    from tf_layoutmap.dtensor.missing_rules import enable_missing_ops
    from tf_layoutmap.dtensor.policies import (
        POLICIES,
        available,
        register_op,
        unavailable_reason,
    )
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "POLICIES",
    "available",
    "register_op",
    "unavailable_reason",
    "enable_missing_ops",
]
