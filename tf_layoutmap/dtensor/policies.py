"""Says to tf.dtensor how an op is to be divided among devices.

DTensor refuses an op it has no expander for. A policy lends an op the
expander of a stock op that is divided in the same way. It is a claim about
the op, and DTensor believes it: a wrong policy gives wrong numbers, not an
error. TensorFlow exports the functions this needs but does not document them;
where they are missing, `available()` is false and `register_op` raises.
"""

from __future__ import annotations

import threading

from tf_layoutmap import _checks, _ops, _tf_private

# policy -> the stock op whose expander says the same.
_DONORS = {
    "elementwise": "Relu",
    "batch_parallel": "Cholesky",
    "replicated": "DiagPart",
    "local_update": "ResourceApplyAdam",
}
POLICIES = tuple(_DONORS)

_registered: dict[str, str] = {}
_lock = threading.Lock()


def available() -> bool:
    """Whether ops can be registered with the tf.dtensor of this process."""
    return not unavailable_reason()


def unavailable_reason() -> str:
    """Why ops cannot be registered here; empty if they can."""
    return _ops.native.expander_registry_problem()


def can_divide(name: str) -> bool:
    """Whether tf.dtensor has a rule for op `name`, its own or one of ours.

    False where this tf.dtensor cannot be asked.
    """
    return available() and _ops.native.has_expander(name)


def register_op(name: str, policy: str) -> None:
    """Has tf.dtensor divide op `name` by `policy`, for the whole process.

    * `"elementwise"`: all inputs have one shape, or broadcast; each device
      works on its own part.
    * `"batch_parallel"`: the first dimension is divided, the others are
      whole.
    * `"replicated"`: inputs are gathered, each device works on all of it.
    * `"local_update"`: no outputs; each device runs it on what it holds of
      each input, resource handles included.

    >>> import tf_layoutmap as tlm
    >>> tlm.dtensor.register_op("LayoutMap>LookupShard", "batch_parallel")

    Call it before the first mesh, layout map or tensor on a mesh is made:
    that registers ops without a rule to be computed whole, for good.

    Args:
      name: The op's registered name, as `"MyNamespace>MyOp"`.
      policy: One of the above.

    Raises:
      ValueError: If TensorFlow knows no such op, the policy is none of
        these, or the op is registered with another one.
      RuntimeError: If this tf.dtensor cannot be reached, or divides the op by
        a rule of its own.
    """
    _checks.check_one_of("policy", policy, POLICIES)
    if _tf_private.op_def_of(name) is None:
        raise ValueError(
            "Argument `name` must be the name of a registered op; load its "
            f"library first. Received: name={name!r}."
        )
    with _lock:
        known = _registered.get(name)
        if known == policy:
            return
        if known is not None:
            raise ValueError(
                f"Op {name!r} is registered with policy {known!r}, for the "
                f"whole process. Received: policy={policy!r}."
            )
        _ops.native.share_expander(name, _DONORS[policy])
        _registered[name] = policy
