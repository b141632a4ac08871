"""Patches of `keras.Variable` of Keras 3 for parameter servers.

Keras 3 reads a variable, computes the new value and writes this value. If two
workers run these operations at the same time, one of the two updates is lost.
The replacements of `assign_add` and `assign_sub` are single operations on the
server that holds the variable. `assign` also becomes a single operation if the
variable belongs to a metric, because metrics of Keras 3 call
`variable.assign(variable + value)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import keras_private, strategies
from tf_layoutmap.ps import processes


def assign_add(original: Callable[..., Any], variable: Any, value: Any) -> Any:
    """Adds a value with one operation."""
    stored = _server_variable(variable)
    if stored is None:
        return original(variable, value)
    return stored.assign_add(tf.cast(value, stored.dtype))


def assign_sub(original: Callable[..., Any], variable: Any, value: Any) -> Any:
    """Subtracts a value with one operation."""
    stored = _server_variable(variable)
    if stored is None:
        return original(variable, value)
    return stored.assign_sub(tf.cast(value, stored.dtype))


def assign(original: Callable[..., Any], variable: Any, value: Any) -> Any:
    """Assigns a value, or adds the difference if the value is a sum.

    If the variable belongs to a metric, and the function that is being traced
    has computed `value` as the variable plus other values, only the other
    values are added. Updates of several workers are therefore all counted.

    Raises:
      ValueError: If there are several workers, and `value` depends on the
        variable of a metric in another way.
    """
    stored = _server_variable(variable)
    if stored is None or not _is_traced_metric(variable, value):
        return original(variable, value)
    terms = _terms_added(value, stored.handle)
    if terms is None:
        if processes.count_workers() > 1 and _depends(value, stored.handle):
            raise ValueError(
                "If several workers update a metric of Keras 3, its variables "
                "must be updated by `variable.assign_add(...)` or "
                "`variable.assign(variable + ...)`, because other updates of "
                "two workers at the same time would be lost. Received: a value "
                f"that was computed by {value.op.type!r} (variable "
                f"{variable.path!r})."
            )
        return original(variable, value)
    for term in terms:
        stored.assign_add(
            tf.broadcast_to(tf.cast(term, stored.dtype), stored.shape)
        )
    return value


def _server_variable(variable: Any) -> tf.Variable | None:
    """Returns the variable on a server. None: Keras' own method is used."""
    if not strategies.on_servers() or keras_private.in_stateless_scope():
        return None
    # `value` is a tensor, and not a variable, in an autocast scope of another
    # dtype.
    stored = variable.value
    return stored if isinstance(stored, tf.Variable) else None


def _is_traced_metric(variable: Any, value: Any) -> bool:
    """Returns whether a metric's variable is assigned a symbolic value."""
    # Only metrics create variables with this aggregation.
    return (
        variable.aggregation == "sum"
        and tf.is_tensor(value)
        and tf.is_symbolic_tensor(value)
        and value.dtype == variable.dtype
        and value.shape.is_compatible_with(variable.shape)
    )


def _terms_added(value: tf.Tensor, handle: Any) -> list[tf.Tensor] | None:
    """Returns the values that were added to a variable to compute `value`.

    The sum of the variable and the returned values, in this order, is bitwise
    identical to `value`.

    Args:
      value: Symbolic tensor.
      handle: Handle of the variable.

    Returns:
      The added values. None if `value` is not a sum of the variable and of
      values that are independent of the variable.
    """
    op = value.op
    if op.type == "ReadVariableOp" and _is_handle(op.inputs[0], handle):
        return []
    if op.type == "Identity":
        return _terms_added(op.inputs[0], handle)
    if op.type not in ("Add", "AddV2", "Sub"):
        return None
    first, second = op.inputs
    pairs = [(first, second)]
    if op.type != "Sub":
        pairs.append((second, first))
    for total, term in pairs:
        terms = _terms_added(total, handle)
        if terms is not None and not _depends(term, handle):
            return [*terms, -term if op.type == "Sub" else term]
    return None


def _depends(value: tf.Tensor, handle: Any) -> bool:
    """Returns whether a symbolic tensor is computed from a variable."""
    return any(_is_handle(ancestor, handle) for ancestor in _ancestors(value))


def _ancestors(value: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields a symbolic tensor, and all tensors that it is computed from."""
    seen: set[int] = set()
    remaining = [value]
    while remaining:
        tensor = remaining.pop()
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
            remaining.extend(tensor.op.inputs)


def _is_handle(tensor: tf.Tensor, handle: Any) -> bool:
    """Returns whether a tensor of a traced function is the captured handle."""
    if tensor.dtype != tf.resource:
        return False
    captures: Any = getattr(tensor.graph, "captures", ())
    return any(inner is tensor and outer is handle for outer, inner in captures)
