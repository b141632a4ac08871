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

For each argument, TensorFlow creates, hashes and compares type specs in Python,
which can take longer than the lookup of its ids: a lookup removes this code
from the caches of the processor, so that the next call loads it from memory.
`call` identifies the arguments by the dtypes and sizes of their tensors, and
records which trace TensorFlow has selected for them. A later call with the same
dtypes, sizes and context passes its tensors to this trace directly. The number
of traces is a part of the context, because TensorFlow can prefer a later trace.
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

# Attribute of the options of a function: maps the keys of calls to traces.
_TRACES = "_layoutmap_traces_of_calls"
# If batch sizes vary, a function has many keys. The oldest keys are removed.
_MAX_KEYS = 64
# The trace of a call that has not been recorded.
_UNKNOWN = object()
# Types of arguments that a trace contains as constants.
_CONSTANTS = frozenset({bool, int, str, type(None)})
# The type specs of these tensors contain more than a dtype and a shape.
_WITH_HANDLE_DATA = frozenset(
    dtype.as_datatype_enum for dtype in (tf.resource, tf.variant)
)

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


def _read(value: Any, key: list[Any], tensors: list[tf.Tensor]) -> bool:
    """Appends the parts of a nested structure of arguments.

    Args:
      value: The structure.
      key: List to which the structure is appended, and all that the specs of
        its leaves contain.
      tensors: List to which the tensors are appended, in the order in which a
        trace receives them.

    Returns:
      Whether all parts of the structure are supported.
    """
    kind = type(value)
    if kind is tf_private.EagerTensorClass:
        dtype = value._datatype_enum()
        key.append((dtype, value._shape_tuple()))
        tensors.append(value)
        return dtype not in _WITH_HANDLE_DATA
    if kind is tf.RaggedTensor:
        ids, splits = value.values, value.row_splits
        if (
            type(ids) is not tf_private.EagerTensorClass
            or type(splits) is not tf_private.EagerTensorClass
            or value.uniform_row_length is not None
            or ids._rank() != 1
        ):
            return False
        # The spec does not contain the number of ids.
        dtype = ids._datatype_enum()
        key.append(
            (kind, dtype, splits._datatype_enum(), splits._shape_tuple())
        )
        tensors += (ids, splits)
        return dtype not in _WITH_HANDLE_DATA
    if kind is list or kind is tuple:
        key.append((kind, len(value)))
    elif kind is dict:
        if any(type(name) is not str for name in value):
            return False
        names = sorted(value)
        key.append((kind, *names))
        value = [value[name] for name in names]
    else:
        key.append((kind, value))
        return kind in _CONSTANTS
    for part in value:
        if not _read(part, key, tensors):
            return False
    return True


def call(
    original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function, and traces it if necessary.

    Args:
      original: The replaced method of TensorFlow.
      function: The `tf.function`.
      *args: Positional arguments of the call.
      **kwargs: Keyword arguments of the call.
    """
    arguments: list[Any] = []
    tensors: list[tf.Tensor] = []
    if not (
        tf.executing_eagerly()
        and _read(args, arguments, tensors)
        and _read(kwargs, arguments, tensors)
        and tensors
    ):
        return original(function, *args, **kwargs)
    # TensorFlow's options of all later calls.
    options = (
        function._no_variable_creation_config
        if function._created_variables
        else function._variable_creation_config
    )
    if options is None:
        return original(function, *args, **kwargs)
    traces = vars(options).get(_TRACES)
    if traces is None:
        traces = vars(options).setdefault(_TRACES, {})
    context = _context_of(options)
    key = (tuple(arguments), context)
    trace = traces.get(key, _UNKNOWN)
    if trace is _UNKNOWN:
        result = original(function, *args, **kwargs)
        # A new trace can change the context of later calls.
        if context == _context_of(options):
            traces[key] = _trace_of(function, options, args, kwargs, tensors)
            if len(traces) > _MAX_KEYS:
                traces.pop(next(iter(traces)), None)
        return result
    if trace is None:
        return original(function, *args, **kwargs)
    return trace._call_flat(tensors, captured_inputs=trace.captured_inputs)


def _trace_of(
    function: Any,
    options: Any,
    args: Any,
    kwargs: Any,
    tensors: list[tf.Tensor],
) -> Any:
    """Returns the trace that TensorFlow selects for a call.

    The result is None if the arguments and the context do not determine the
    trace, or if the trace does not receive `tensors` in this order, for example
    because TensorFlow converts other arguments to tensors.
    """
    captures = options.function_captures
    if captures is not None and captures.capture_types:
        return None
    bound = tf_private.function_type_utils.canonicalize_function_inputs(
        args,
        kwargs,
        function.function_type,
        function._default_values,
        function._is_pure,
    )
    trace = tf_private.tracing_compilation.trace_function(
        bound.args, bound.kwargs, options
    )
    received = trace.function_type.unpack_inputs(
        trace.function_type.bind(*bound.args, **bound.kwargs)
    )
    is_same = [*map(id, received)] == [*map(id, tensors)]
    return trace if is_same else None


def _context_of(options: Any) -> tuple[Any, ...]:
    """Returns all that selects the trace of a call besides the arguments."""
    return (
        # `define_function` selects other traces than TensorFlow.
        tf_private.tracing_compilation._maybe_define_function,
        tf_private.function_context.make_function_context(options.scope_type),
        _true(_known_decisions(options)),
        len(options.function_cache),
    )


PATCHES: tuple[Patch, ...] = (
    *(
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
    ),
    Patch(
        "function_calls",
        "_core.tf_private:Function",
        "_call",
        call,
        "Between two lookups, the call of a `tf.function` takes up to 1 ms "
        "longer for a dense tensor, and 2 to 6 ms for ragged tensors.",
        TENSORFLOW,
        "tests/test_function_calls.py",
    ),
)
