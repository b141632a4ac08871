"""Which operations DTensor has no rule for are right when computed whole.

Every device then gathers the inputs and computes everything: correct, at the
cost of memory and time. Left out is what is not a function of its inputs.
"""

import re
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.dtensor import policies

# Without state but for their seeds, which our operations on a mesh give them.
# The last one only asks for the device's algorithm.
_RANDOM = frozenset(
    (
        "RandomStandardNormal",
        "TruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "Multinomial",
        "RandomShuffle",
        "ParameterizedTruncatedNormal",
        "StatelessRandomGetAlg",
        "LayoutMap>RandomUniform",
        "LayoutMap>RandomUniformInt",
    )
)
# Of compilers, of the run time, and ours, which have rules of their own.
_OTHERS = re.compile(
    r"_|LayoutMap>|DTensor|TPU|Tpu|Collective|Nccl|Xla(?!Dynamic(Update)?Slice)"
    r"|Risc|Cudnn|Debug|Boosted|Sdca|Placeholder|Batch$|Unbatch|Copy"
)
_CONTROL_FLOW = frozenset(
    (
        "Switch",
        "Merge",
        "Enter",
        "Exit",
        "NextIteration",
        "LoopCond",
        "ControlTrigger",
        "Abort",
        "NoOp",
        "FakeParam",
        "GetDeadline",
        "DeviceIndex",
        "ImmutableConst",
    )
)
# What DTensor has no tensors of.
_TYPES = frozenset(
    dtype.as_datatype_enum for dtype in (tf.string, tf.resource, tf.variant)
)

# Those of one input that work on each element: divided as it is.
_ELEMENTWISE = frozenset(
    (
        "Expint",
        "Dawsn",
        "Spence",
        "FresnelCos",
        "FresnelSin",
        "BesselI0",
        "BesselI0e",
        "BesselI1",
        "BesselI1e",
        "BesselJ0",
        "BesselJ1",
        "BesselK0",
        "BesselK0e",
        "BesselK1",
        "BesselK1e",
        "BesselY0",
        "BesselY1",
    )
)

_enabled: set[str] = set()


def enable_missing_ops() -> tuple[str, ...]:
    """Lets tf.dtensor run the stock ops that it has no rule for.

    They are computed whole: each device gathers the inputs and computes
    everything; a few work on each element and stay divided. It holds for the
    whole process. What makes a mesh, a layout map or a tensor on a mesh with
    this package calls it. Call it yourself for programs that use
    `tf.experimental.dtensor` alone, or again after a library of ops was loaded.

    Left out are ops that keep something (variables, tables, queues), call
    functions, or take strings. Results with a number of rows that is not known
    while a function is traced, as `tf.unique`'s, stop most of DTensor.

    >>> import tf_layoutmap as tlm
    >>> isinstance(tlm.dtensor.enable_missing_ops(), tuple)
    True

    Returns:
      The ops that this call enabled; TensorFlow's own rules stay.

    Raises:
      RuntimeError: This tf.dtensor cannot be reached; see `available`.
    """
    enabled = []
    for op in _tf_private.registered_ops():
        if _is_function_of_inputs(op) and not policies.can_divide(op.name):
            is_divided = op.name in _ELEMENTWISE
            policies.register_op(
                op.name, "elementwise" if is_divided else "replicated"
            )
            enabled.append(op.name)
            if not is_divided:
                _enabled.add(op.name)
    return tuple(enabled)


def is_computed_whole(name: str) -> bool:
    """Whether op `name` is computed whole because DTensor has no rule."""
    return name in _enabled


def _is_function_of_inputs(op: Any) -> bool:
    if op.name in _RANDOM:
        return True
    if op.is_stateful or op.name in _CONTROL_FLOW or _OTHERS.match(op.name):
        return False
    arguments = [*op.input_arg, *op.output_arg]
    return (
        bool(op.output_arg)
        and not any(a.is_ref or a.type in _TYPES for a in arguments)
        and not any("func" in a.type for a in op.attr)
    )
