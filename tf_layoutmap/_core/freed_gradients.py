"""Frees gradients of `tf.custom_gradient` together with their graphs.

TensorFlow holds each gradient of `tf.custom_gradient` until the process ends.
The gradient refers to its graph, and the graph refers to all variables that it
reads. The training step of every Keras model contains such a gradient, because
sums over replicas use `tf.custom_gradient`. Without this module, the memory of
these models and their tables would never be freed.

This module changes only graphs that use variables of this package. In other
graphs, the gradients stay registered, because a copy of a graph
(`import_graph_def`, `prune`, frozen functions) looks up a gradient by its name.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import patches, tf_private
from tf_layoutmap._core.patch_entry import TENSORFLOW, Patch

# Attribute that marks the handle of a variable of this package.
_OURS = "_layoutmap_frees_gradients"

# Maps the name of each registered gradient to its graph. An entry is removed
# when its gradient is moved to the graph.
_kept: "dict[str, weakref.ref[Any]]" = {}


def free_with(handles: Iterable[Any]) -> None:
    """Marks variables or engines, so functions that use them can be freed.

    Args:
      handles: Resource tensors. Symbolic tensors are ignored.
    """
    patches.ensure("memory")
    for handle in handles:
        if isinstance(handle, tf.Tensor) and not tf.is_symbolic_tensor(handle):
            setattr(handle, _OURS, True)


def free_with_variables(variables: Iterable[Any]) -> None:
    """Calls `free_with` for variables and parts of distributed variables."""
    patches.ensure("memory")
    if not tf.executing_eagerly():
        # Captures that are symbolic tensors are ignored, because the variables
        # were created and marked outside the traced function.
        return
    for variable in variables:
        parts = getattr(variable, "values", (variable,))
        free_with(part.handle for part in parts if hasattr(part, "handle"))


def record(
    original: Callable[..., Any], f: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Applies `tf.custom_gradient(f)` in a graph, and records its gradient."""
    results = original(f, args, kwargs)
    for result in tf.nest.flatten(results, expand_composites=True):
        if not tf.is_symbolic_tensor(result):
            continue
        name = tf_private.gradient_name_of(result.op)
        if name is not None:
            if _before_collection not in gc.callbacks:
                gc.callbacks.append(_before_collection)
            _kept[name] = weakref.ref(result.graph)
            # One operation creates all results that have a gradient.
            break
    return results


def _before_collection(phase: str, info: dict[str, int]) -> None:
    """Moves registered gradients to the graphs that contain them.

    Python's garbage collector calls this function before it frees graphs. At
    this time, tracing of these graphs is complete, so the variables that a
    graph uses are known.
    """
    if phase == "start" and info["generation"] == 2:
        for name, reference in list(_kept.items()):
            graph = reference()
            if graph is None:
                del _kept[name]
            elif _is_ours(graph):
                del _kept[name]
                tf_private.leave_gradient_to_graph(name, graph)


def _is_ours(graph: Any) -> bool:
    return any(
        hasattr(tensor, _OURS) for tensor in tf_private.tensors_used_by(graph)
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        "memory",
        "_core.tf_private:custom_gradient",
        "_graph_mode_decorator",
        record,
        "After a model was trained with `fit`, the model and its "
        "variables are never freed.",
        TENSORFLOW,
        "tests/freed/test_gradients.py",
    ),
)
