"""Traces a function separately for each decision of the code that it calls.

Some layers run different ops depending on the context of their call. For
example, a lookup is a training step if a tape records it, and a symbolic call
of Keras returns only the shape of its result. In a `tf.function`, the trace
decides: a function that was first called without a tape would never train a
table, and a function that was first called by Keras' symbolic call would return
zeros in all later calls. These layers call `is_recorded` or `depends_on` to
decide. A function whose trace contains such a decision is traced again if a
call would decide differently. The same applies to the functions that call this
function.

TensorFlow selects the trace of a call by the types of the arguments and by a
context. `define_function` adds the decisions that are true to this context.
"""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap._core.patch_entry import TENSORFLOW, Patch

# Attribute of graphs and of the captures of functions: maps the keys of the
# decisions on which traces depend to functions that decide.
_DECISIONS = "_layoutmap_decisions"

# Keys of the decisions that are true.
_True = frozenset[Hashable]


class _Context(threading.local):
    # Value for the next call of `function_context` in this thread.
    true: _True = frozenset()
    # Whether `get_concrete_function` is running in this thread.
    is_concrete: bool = False


_context = _Context()


@dataclasses.dataclass(frozen=True)
class _IsRecorded:
    """Decides whether a tape records a weight."""

    weight: Any
    resumes: bool

    def __call__(self) -> bool:
        weight = self.weight()
        return weight is not None and _is_recorded(weight, self.resumes)


def is_recorded(*weights: Any, resumes: bool) -> bool:
    """Returns whether a tape records a weight; traces depend on the result.

    Args:
      *weights: Variables: a mark weight, or the shards of a table.
      resumes: Whether a tape counts that `tf.recompute_grad` has stopped. This
        function first runs its argument without a tape. With `resumes`, the
        first run and the run for the gradients look up the same rows.
    """
    _add_to_graphs(
        {
            id(weight): _IsRecorded(weakref.ref(weight), resumes)
            for weight in weights
        }
    )
    # No weight is skipped, because each of them must be accessed.
    return any([_is_recorded(weight, resumes) for weight in weights])


def depends_on(decide: Callable[[], bool]) -> bool:
    """Returns `decide()`; traces depend on the result.

    Args:
      decide: Function of a module, which depends on the context of a call.
    """
    _add_to_graphs({decide: decide})
    return decide()


def in_concrete_function() -> bool:
    """Returns whether `get_concrete_function` traces the caller.

    A concrete function has only one trace, which can be created before a tape
    records its calls. Traces depend on the result.
    """
    return depends_on(_traces_concrete_function)


def _traces_concrete_function() -> bool:
    return _context.is_concrete


def get_concrete_function(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Returns the concrete function; `in_concrete_function` is True inside."""
    outer, _context.is_concrete = _context.is_concrete, True
    try:
        return original(*args, **kwargs)
    finally:
        _context.is_concrete = outer


def _is_recorded(weight: Any, resumes: bool) -> bool:
    with tf_private.resumed_tapes() if resumes else contextlib.nullcontext():
        # `tf.recompute_grad` computes gradients only for the variables that the
        # first run accessed.
        if weight.trainable:
            tf_private.tape_variable_accessed(weight)
        if not tf_private.could_possibly_record():
            return False
        # A variable of several replicas has no handle in each context.
        watched = (
            weight.handle
            if isinstance(weight, tf_private.BaseResourceVariable)
            else tf.convert_to_tensor(weight)
        )
        if not tf_private.should_record_backprop([watched]):
            return False
        # The function that is being traced lists the weight, so that tapes
        # outside of the function compute its gradient. A trace without a tape
        # does not list it, so that exported models do not contain it.
        tf_private.variable_accessed(weight)
        return True


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
    known = _known_decisions(options)
    cache = options.function_cache
    num_traces = 0 if cache is None else len(cache)
    true = _context.true = _true(known)
    try:
        function = original(args, kwargs, options)
    finally:
        _context.true = frozenset()
    decisions = getattr(function.graph, _DECISIONS, None)
    if not decisions:
        return function
    _add_to_graphs(decisions)
    if all(known.get(key) == decide for key, decide in decisions.items()):
        return function
    known.update(decisions)
    if cache is None:
        return function
    context = tf_private.function_context.make_function_context(
        options.scope_type
    )
    if len(cache) == num_traces:
        # The function was traced before this function replaced TensorFlow's.
        cache.delete(function.function_type, _with_decisions(context, true))
        return define_function(original, args, kwargs, options)
    # The trace was added before its decisions were known.
    now = _true(known)
    if now != true:
        cache.delete(function.function_type, _with_decisions(context, true))
        cache.add(function, _with_decisions(context, now))
    return function


def function_context(
    original: Callable[..., Any], scope_type: Any = None
) -> Any:
    """Returns TensorFlow's context of a call, with the true decisions."""
    true, _context.true = _context.true, frozenset()
    return _with_decisions(original(scope_type), true)


def _with_decisions(context: Any, true: _True) -> Any:
    if not true:
        return context
    return context._replace(context=(context.context, true))


def true_decisions(options: Any) -> _True:
    """Returns the keys of the decisions of a function that are true now.

    Args:
      options: TensorFlow's options of the function.
    """
    return _true(_known_decisions(options))


def _known_decisions(options: Any) -> dict[Hashable, Any]:
    """Returns the decisions on which the traces of a function depend."""
    # `get_concrete_function` copies the options; all copies have these objects.
    holder = options.function_captures or options
    return vars(holder).setdefault(_DECISIONS, {})


def _true(decisions: dict[Hashable, Any]) -> _True:
    """Returns the keys of the decisions that are true now."""
    return frozenset(key for key, decide in decisions.items() if decide())


def _add_to_graphs(decisions: dict[Hashable, Any]) -> None:
    """Adds decisions to the function that is traced, and to outer functions."""
    graph: Any = tf.compat.v1.get_default_graph()
    while isinstance(graph, tf_private.FuncGraph):
        if not hasattr(graph, _DECISIONS):
            setattr(graph, _DECISIONS, {})
        getattr(graph, _DECISIONS).update(decisions)
        graph = graph.outer_graph


PATCHES: tuple[Patch, ...] = tuple(
    Patch(
        "function_traces",
        f"_core.tf_private:{module}",
        name,
        ours,
        "A `tf.function` that was first called without a tape, or by a "
        "symbolic call of Keras, does not train tables.",
        TENSORFLOW,
        "tests/test_function_traces.py",
    )
    for module, name, ours in (
        ("tracing_compilation", "_maybe_define_function", define_function),
        ("function_context", "make_function_context", function_context),
        ("Function", "get_concrete_function", get_concrete_function),
    )
)
