"""How an operation that DTensor gets wrong is corrected, for every caller.

Where a function is traced for a mesh of this package, and eagerly where a
tensor is on one, the corrected operation is called; everywhere else the
original, as it came. So it is in `dtensor.call_with_layout`, which gives every
eager result one layout.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import own_trace, pinning, trace_context
from tf_layoutmap.layout.mesh.layouts import is_own

dtensor = tf.experimental.dtensor


def correct(
    original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `original`, and on a mesh `ours(mesh, ...)`.

    Args:
      original: An operation of TensorFlow's Python.
      ours: Takes the `dtensor.Mesh` that is traced for (None eagerly), and the
        arguments of `original`.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            # Tensors on a mesh know theirs.
            mesh = None
            applies = any(map(_on_mesh, (*args, *kwargs.values()))) and (
                not _tf_private.has_output_layout()
            )
        else:
            mesh = trace_context.mesh_of_operation()
            applies = mesh is not None and not own_trace.is_whole()
        if not applies:
            return original(*args, **kwargs)
        return ours(mesh, *args, **kwargs)

    return wrapper


def _on_mesh(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_on_mesh, value))
    if isinstance(value, tf.Tensor):
        return pinning.on_own_mesh(value)
    layout: Any = getattr(value, "layout", None)
    return isinstance(layout, dtensor.Layout) and is_own(layout.mesh)
