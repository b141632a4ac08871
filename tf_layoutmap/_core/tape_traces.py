"""Traces a function separately for each set of weights that tapes record.

The lookup of a mark weight's layer is a training step if a tape records it. In
a `tf.function`, the trace decides: a function that was first called without a
tape would never train the layer, and a function that was first called under a
tape would add keys during evaluation. The layer therefore calls `is_recorded`
to decide. A function whose trace contains such a decision is traced again if a
call would decide differently. The same applies to the functions that call this
function.

TensorFlow selects the trace of a call by the types of the arguments and by a
context. `define_function` adds the recorded weights to this context.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private

# Attribute of graphs and of the options of functions: the weights on which the
# traces depend. Maps the id of a weight to a weak reference, and to the argument
# `resumes` of `is_recorded`.
_WEIGHTS = "_layoutmap_weights"

# Ids of the weights that tapes record.
_Recorded = frozenset[int]


class _Context(threading.local):
    # Value for the next call of `function_context` in this thread.
    recorded: _Recorded = frozenset()


_context = _Context()


def is_recorded(*weights: Any, resumes: bool) -> bool:
    """Returns whether a tape records a weight; traces depend on the result.

    Args:
      *weights: Variables: a mark weight, or the shards of a table.
      resumes: Whether a tape counts that `tf.recompute_grad` has stopped. This
        function first runs its argument without a tape. With `resumes`, the
        first run and the run for the gradients look up the same rows.
    """
    _add_to_graphs({id(one): (weakref.ref(one), resumes) for one in weights})
    # No weight is skipped, because each of them must be accessed.
    return any([_is_recorded(one, resumes) for one in weights])


def _is_recorded(weight: Any, resumes: bool) -> bool:
    with tf_private.resumed_tapes() if resumes else contextlib.nullcontext():
        # `tf.recompute_grad` computes gradients only for the variables that the
        # first run accessed.
        tf_private.variable_accessed(weight)
        if not tf_private.could_possibly_record():
            return False
        # A variable of several replicas has no handle in each context.
        watched = (
            weight.handle
            if isinstance(weight, tf_private.BaseResourceVariable)
            else tf.convert_to_tensor(weight)
        )
        return tf_private.should_record_backprop([watched])


def define_function(
    original: Callable[..., Any], args: Any, kwargs: Any, options: Any
) -> Any:
    """Returns the concrete function of a call, and traces it if necessary.

    Args:
      original: The replaced function of TensorFlow.
      args: Positional arguments of the call.
      kwargs: Keyword arguments of the call.
      options: TensorFlow's options of the function, which all its calls share.
    """
    known: dict[int, Any] = vars(options).setdefault(_WEIGHTS, {})
    recorded = _recorded(known)
    _context.recorded = recorded
    try:
        function = original(args, kwargs, options)
    finally:
        _context.recorded = frozenset()
    weights = getattr(function.graph, _WEIGHTS, None)
    if not weights:
        return function
    _add_to_graphs(weights)
    if all(known.get(key) == weight for key, weight in weights.items()):
        return function
    known.update(weights)
    # The trace was added before its weights were known.
    now = _recorded(known)
    cache = options.function_cache
    if now != recorded and cache is not None:
        context = tf_private.function_context.make_function_context(
            options.scope_type
        )
        cache.delete(function.function_type, _with_weights(context, recorded))
        cache.add(function, _with_weights(context, now))
    return function


def function_context(
    original: Callable[..., Any], scope_type: Any = None
) -> Any:
    """Returns TensorFlow's context of a call, with the recorded weights."""
    recorded, _context.recorded = _context.recorded, frozenset()
    return _with_weights(original(scope_type), recorded)


def _with_weights(context: Any, recorded: _Recorded) -> Any:
    if not recorded:
        return context
    return context._replace(context=(context.context, recorded))


def _recorded(weights: dict[int, Any]) -> _Recorded:
    """Returns the ids of the weights that tapes record now."""
    if not weights:
        return frozenset()
    return frozenset(
        key
        for key, (reference, resumes) in weights.items()
        if (weight := reference()) is not None
        and _is_recorded(weight, resumes)
    )


def _add_to_graphs(weights: dict[int, Any]) -> None:
    """Adds weights to the function that is traced, and to outer functions."""
    graph: Any = tf.compat.v1.get_default_graph()
    while isinstance(graph, tf_private.FuncGraph):
        if not hasattr(graph, _WEIGHTS):
            setattr(graph, _WEIGHTS, {})
        getattr(graph, _WEIGHTS).update(weights)
        graph = graph.outer_graph
