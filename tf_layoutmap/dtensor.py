"""Registers ops with DTensor, so that DTensor can shard or replicate them."""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    name: f"tf_layoutmap._core.dtensor_ops:{name}"
    for name in (
        "POLICIES",
        "available",
        "register_op",
        "unavailable_reason",
        "enable_missing_ops",
    )
}

if TYPE_CHECKING:
    from tf_layoutmap._core.dtensor_ops import (
        POLICIES,
        available,
        enable_missing_ops,
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
