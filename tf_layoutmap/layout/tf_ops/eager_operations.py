"""Eager operations on a mesh that DTensor refuses to divide: run whole."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import error_messages, pinning
from tf_layoutmap.layout.mesh.thread_value import ThreadValue

dtensor = tf.experimental.dtensor

_is_strict = ThreadValue(False)
# Of which this process has been told.
_told: set[str] = set()

# They say where a tensor is to be, so that whole inputs do not help.
_OF_DTENSOR = frozenset(
    ("Relayout", "RelayoutLike", "CopyToMesh", "CopyToMeshGrad")
)
# A variable or an iterator stays where its parts are.
_NEVER_GATHERED = frozenset((tf.resource, tf.variant))


def strictly(is_strict: bool) -> AbstractContextManager[None]:
    """While open, this thread runs such operations only if not `is_strict`."""
    return _is_strict.set_to(is_strict)


def may_run_whole(
    message: str, operation: str | bytes, inputs: Sequence[Any]
) -> bool:
    """Whether an operation that failed so can be run on whole inputs.

    Args:
      message: Of its error.
      operation: Its type.
      inputs: What it was given; other values than tensors do not count.

    Returns:
      False if DTensor did not refuse to divide it, if nothing is divided, or
      if an input cannot be gathered.
    """
    operation = tf.compat.as_str(operation)
    if (
        _is_strict.get()
        or operation in _OF_DTENSOR
        or _tf_private.has_output_layout()
        or error_messages.finding_of(message) is None
        or _tf_private.op_def_of(operation) is None
    ):
        return False
    divided = [
        x
        for x in inputs
        if pinning.on_mesh(x)
        and not dtensor.fetch_layout(x).is_fully_replicated()
    ]
    return bool(divided) and not any(
        x.dtype in _NEVER_GATHERED for x in divided
    )


def whole_inputs(
    message: str, operation: str, inputs: Sequence[Any]
) -> list[Any] | None:
    """Returns the inputs of an operation, gathered on every device.

    Args:
      message: Of its error.
      operation: Its type.
      inputs: Eager tensors.

    Returns:
      None unless `may_run_whole`.
    """
    if not may_run_whole(message, operation, inputs):
        return None
    whole = [pinning.whole(x, None) for x in inputs]
    if operation not in _told:
        _told.add(operation)
        warnings.warn(
            f"DTensor cannot divide an eager {operation} operation "
            f"({error_messages.finding_of(message)}). Every device runs such "
            "operations on all of their inputs.",
            error_messages.LayoutMapWarning,
            stacklevel=4,
        )
    return whole
