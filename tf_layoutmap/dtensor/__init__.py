"""Ops of ours, and yours, on tensors that tf.dtensor has divided."""

from tf_layoutmap.dtensor.policies import (
    POLICIES,
    available,
    enable_missing_ops,
    register_op,
    unavailable_reason,
)

__all__ = ["POLICIES", "available", "enable_missing_ops", "register_op",
           "unavailable_reason"]
