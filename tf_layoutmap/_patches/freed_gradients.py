"""Gradients of `tf.custom_gradient`, freed with graphs that use our variables.

TensorFlow keeps such a gradient for as long as the process lives; with it the
graph, and the memory of all variables that this reads. The training step of
every Keras model has one, as sums over replicas are made with it: no such model
would ever be freed, nor its tables.

Only graphs that use variables of ours are changed. In other graphs the gradient
stays, as copies of a graph find it by its name: those of `import_graph_def`,
`prune`, frozen functions.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap._patches import engine

# The attribute of a handle by which it is found to be ours.
_OURS = "_layoutmap_frees_gradients"

# The registered gradients of all graphs, by name, until the graph is ours.
_kept: "dict[str, weakref.ref[Any]]" = {}


def free_with(handles: Iterable[Any]) -> None:
    """Lets functions be freed that use these variables or engines of ours.

    Args:
      handles: Resource tensors; symbolic ones are left out.
    """
    engine.ensure("memory")
    for handle in handles:
        if isinstance(handle, tf.Tensor) and not tf.is_symbolic_tensor(handle):
            setattr(handle, _OURS, True)


def free_with_variables(variables: Iterable[Any]) -> None:
    """Like `free_with`, for variables, those of strategies among them."""
    engine.ensure("memory")
    if not tf.executing_eagerly():
        # They were made, and recorded, outside of what is traced.
        return
    for variable in variables:
        parts = getattr(variable, "values", (variable,))
        free_with(part.handle for part in parts if hasattr(part, "handle"))


def record(
    original: Callable[..., Any], f: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """What `tf.custom_gradient(f)` does while a graph is traced."""
    results = original(f, args, kwargs)
    for one in tf.nest.flatten(results, expand_composites=True):
        if not tf.is_symbolic_tensor(one):
            continue
        name = tf_private.gradient_name_of(one.op)
        if name is not None:
            if _before_collection not in gc.callbacks:
                gc.callbacks.append(_before_collection)
            _kept[name] = weakref.ref(one.graph)
            # All that have gradients are results of one operation.
            break
    return results


def _before_collection(phase: str, info: dict[str, int]) -> None:
    """Is called by Python's garbage collector, which frees graphs.

    What a graph uses is known only when it is traced to its end. Nothing is
    freed before.
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
