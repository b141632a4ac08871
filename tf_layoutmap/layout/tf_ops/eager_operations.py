"""Eager operations on a mesh that DTensor refuses to divide: run whole."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import error_messages, pinning
from tf_layoutmap.layout.mesh.thread_value import ThreadValue

_is_strict = ThreadValue(False)
# What gathers inputs. Its own inputs cannot be gathered first.
_GATHERING = frozenset(("Relayout", "RelayoutLike", "CopyToMesh"))
# Of which this process has been told.
_told: set[str] = set()


def strictly(is_strict: bool) -> AbstractContextManager[None]:
    """While open, this thread runs such operations only if not `is_strict`."""
    return _is_strict.set_to(is_strict)


def may_run_whole(message: str) -> bool:
    """Whether an operation that failed so can be run on whole inputs."""
    return not _is_strict.get() and (
        error_messages.finding_of(message) is not None)


def whole_inputs(message: str, operation: str,
                 inputs: Sequence[Any]) -> list[Any] | None:
    """Returns the inputs of an operation, gathered on every device.

    Args:
      message: Of its error.
      operation: Its type.
      inputs: Eager tensors.

    Returns:
      None if DTensor did not refuse to divide it, or nothing is divided.
    """
    if operation in _GATHERING or not may_run_whole(message) or (
            _tf_private.op_def_of(operation) is None):
        return None
    whole = [pinning.whole(x, None) for x in inputs]
    if all(after is x for after, x in zip(whole, inputs)):
        return None
    if operation not in _told:
        _told.add(operation)
        warnings.warn(
            f"DTensor cannot divide an eager {operation} operation "
            f"({error_messages.finding_of(message)}). Every device runs such "
            "operations on all of their inputs.",
            error_messages.LayoutMapWarning, stacklevel=4)
    return whole
