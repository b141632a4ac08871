"""Frees gradients of `tf.custom_gradient` together with their graphs.

TensorFlow keeps such a gradient until the process ends. It therefore also keeps
the graph of the gradient and the memory of all variables that the graph reads.
The training step of every Keras model has such a gradient because sums over
replicas use `tf.custom_gradient`. Without this module, these models and their
tables would never be freed.

Only graphs that use variables of this package are changed. In other graphs the
gradient stays registered because copies of a graph (`import_graph_def`,
`prune`, frozen functions) look it up by its name.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap._patches import engine

# Attribute that marks the handle of a variable of this package.
_OURS = "_layoutmap_frees_gradients"

# The graph of each registered gradient, by the gradient's name. An entry is
# removed when its gradient is moved to the graph.
_kept: "dict[str, weakref.ref[Any]]" = {}


def free_with(handles: Iterable[Any]) -> None:
    """Allows functions that use these variables or engines to be freed.

    Args:
      handles: Resource tensors. Symbolic tensors are ignored.
    """
    engine.ensure("memory")
    for handle in handles:
        if isinstance(handle, tf.Tensor) and not tf.is_symbolic_tensor(handle):
            setattr(handle, _OURS, True)


def free_with_variables(variables: Iterable[Any]) -> None:
    """Calls `free_with` for variables, including variables of strategies."""
    engine.ensure("memory")
    if not tf.executing_eagerly():
        # The variables were created and marked outside the traced function.
        return
    for variable in variables:
        parts = getattr(variable, "values", (variable,))
        free_with(part.handle for part in parts if hasattr(part, "handle"))


def record(
    original: Callable[..., Any], f: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Applies `tf.custom_gradient(f)` in a graph and records the gradient."""
    results = original(f, args, kwargs)
    for one in tf.nest.flatten(results, expand_composites=True):
        if not tf.is_symbolic_tensor(one):
            continue
        name = tf_private.gradient_name_of(one.op)
        if name is not None:
            if _before_collection not in gc.callbacks:
                gc.callbacks.append(_before_collection)
            _kept[name] = weakref.ref(one.graph)
            # All results with a gradient come from one operation.
            break
    return results


def _before_collection(phase: str, info: dict[str, int]) -> None:
    """Moves gradients to their graphs. Called by Python's garbage collector.

    The variables that a graph uses are known only after tracing has ended, and
    the garbage collector frees a graph only after that.
    """
    if phase == "start" and info["generation"] == 2:
        for name, found in list(_kept.items()):
            graph = found()
            if graph is None:
                del _kept[name]
            elif _is_ours(graph):
                del _kept[name]
                tf_private.leave_gradient_to_graph(name, graph)


def _is_ours(graph: Any) -> bool:
    return any(
        hasattr(tensor, _OURS) for tensor in tf_private.tensors_used_by(graph)
    )
