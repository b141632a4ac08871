"""Replacements for Keras constructors that attach objects to the open scope."""

from collections.abc import Callable
from typing import Any

import keras

from tf_layoutmap.layout.keras3.context import (
    active_context,
    context_of_new_variable,
)
from tf_layoutmap.layout.keras3.variable import MeshVariable


def init_variable(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> None:
    """Initializes a variable as a `MeshVariable` under a layout map scope."""
    # `__new__` is not replaced: after a class has had its own `__new__`, Python
    # does not restore the original behavior when that `__new__` is deleted.
    if type(variable) is keras.Variable:
        context, owner, is_state = context_of_new_variable()
        if context is not None:
            variable.__class__ = MeshVariable
            variable._mesh_context = context
            variable._mesh_owner = owner
            variable._mesh_is_state = is_state
            variable.__init__(*args, **kwargs)
            return
    original(variable, *args, **kwargs)


def new_layer(
    original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any
) -> Any:
    """Creates a layer that belongs to the open scope."""
    layer = original(cls, *args, **kwargs)
    context = active_context()
    if context is not None:
        context.add_layer(layer)
    return layer
