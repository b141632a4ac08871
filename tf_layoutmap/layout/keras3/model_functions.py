"""`tf.function` of a method of a model on a mesh: run for that mesh.

`generate` of keras-hub's models is one. It would be traced as for one device,
without what is corrected for a mesh.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.keras3.context import context_of_model
from tf_layoutmap.layout.mesh import batches, error_messages, trace_context
from tf_layoutmap.layout.step.retraced_function import RetracedFunction

# The attribute of a function of TensorFlow's with the one that is run for it.
_RETRACED = "_retraced_for_mesh"


def call(original: Callable[..., Any], function: Any, *args: Any,
         **kwargs: Any) -> Any:
    """Calls a `tf.function`; on its mesh if it is a method of a model there.

    Results are replicated, so that they can be read like any tensor.

    Args:
      original: `Function.__call__`.
      function: What `tf.function` returned.
      *args: Its arguments.
      **kwargs: Its arguments by name.
    """
    model = getattr(function.python_function, "__self__", None)
    if not isinstance(model, keras.Model) or not tf.executing_eagerly() or (
            trace_context.traced_for_mesh()):
        return original(function, *args, **kwargs)
    context = context_of_model(model)
    if context is None:
        return original(function, *args, **kwargs)
    retraced = getattr(function, _RETRACED, None)
    if retraced is None:
        retraced = _retraced_copy(function, model, context)
        setattr(function, _RETRACED, retraced)
    with trace_context.default_mesh(context.mesh, context.batch_dim), (
            error_messages.explained(
                model, retraced.kind, lambda: retraced.graph(*args, **kwargs))):
        outputs = retraced(*args, **kwargs)
    return keras.tree.map_structure(batches.readable, outputs)


def _retraced_copy(function: Any, model: Any, context: Any) -> RetracedFunction:
    method = function.python_function

    def make() -> Any:
        return tf.function(
            lambda *args, **kwargs: method(*args, **kwargs),
            autograph=_tf_private.converts_control_flow(function))

    return RetracedFunction(make, model, method.__name__, context)
