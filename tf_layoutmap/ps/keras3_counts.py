"""Variables of Keras 3 that several workers add to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap import _keras_private, _strategies


def assign_add(original: Callable[..., Any], variable: Any, value: Any) -> Any:
    """Adds in one operation of the server that has the variable.

    Keras reads and then writes: what another worker adds in between is lost.
    """
    return _assign("assign_add", original, variable, value)


def assign_sub(original: Callable[..., Any], variable: Any, value: Any) -> Any:
    """Subtracts in one operation; see `assign_add`."""
    return _assign("assign_sub", original, variable, value)


def _assign(
    name: str, original: Callable[..., Any], variable: Any, value: Any
) -> Any:
    stored = _on_server(variable)
    if stored is None:
        return original(variable, value)
    return getattr(stored, name)(tf.cast(value, stored.dtype))


def _on_server(variable: Any) -> tf.Variable | None:
    """What holds the value; None where Keras is asked as everywhere."""
    if not _strategies.on_servers() or _keras_private.in_stateless_scope():
        return None
    # In a scope of another dtype it is a tensor.
    stored = variable.value
    return stored if isinstance(stored, tf.Variable) else None
