"""Handles of variables on a mesh: one compilation serves many.

DTensor compiles each operation once, with its attributes. TensorFlow makes the
name of a variable an attribute of the operation that makes its handle, for
messages, so a model of many weights was compiled weight by weight.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import trace_context

# What messages of TensorFlow's own operations call a variable on a mesh.
NAME = "variable_on_a_mesh"


def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes a handle; on a mesh without the name that only messages have."""
    if (
        "debug_name" in kwargs
        and tf.executing_eagerly()
        and (trace_context.mesh_of_operation() is not None)
    ):
        kwargs["debug_name"] = NAME
    return original(*args, **kwargs)
