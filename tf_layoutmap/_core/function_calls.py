"""Calls functions with ragged tensors in less time than TensorFlow.

A call of a `tf.function` selects a trace by the types of the arguments. For
each `tf.RaggedTensor`, TensorFlow creates, hashes and compares type specs in
Python, which can take longer than the lookup of the ids. This module identifies
the arguments of a call by the dtypes and sizes of their tensors, and records
which trace TensorFlow has selected for them. A later call with the same dtypes
and sizes passes the tensors to this trace directly.

A recorded trace is used only if TensorFlow would select the same trace. The key
therefore also contains TensorFlow's context of the call, such as the strategy,
and the number of traces, because TensorFlow can prefer a later trace.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import function_traces, tf_private
from tf_layoutmap._core.patch_entry import TENSORFLOW, Patch

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
    # TensorFlow's options of all calls; None before the first call.
    options = (
        function._no_variable_creation_config
        if function._created_variables
        else function._variable_creation_config
    )
    arguments: list[Any] = []
    tensors: list[tf.Tensor] = []
    if not (
        options is not None
        and tf.executing_eagerly()
        and _read(args, arguments, tensors)
        and _read(kwargs, arguments, tensors)
        and tensors
    ):
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
        # The replacement in `function_traces` selects other traces.
        tf_private.tracing_compilation._maybe_define_function,
        tf_private.function_context.make_function_context(options.scope_type),
        function_traces.true_decisions(options),
        len(options.function_cache),
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        "function_calls",
        "_core.tf_private:Function",
        "_call",
        call,
        "A call of a `tf.function` takes 45 us longer for each ragged tensor "
        "in its arguments, in addition to the time of its operations.",
        TENSORFLOW,
        "tests/test_function_calls.py",
    ),
)
