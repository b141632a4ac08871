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

# Types of arguments that a trace contains as constants.
_CONSTANTS = frozenset({bool, int, str, type(None)})
# The type specs of these tensors contain more than a dtype and a shape.
_WITH_HANDLE_DATA = frozenset(
    dtype.as_datatype_enum for dtype in (tf.resource, tf.variant)
)


class _Arguments:
    """Arguments of a call.

    Attributes:
      tensors: All tensors, in the order in which a trace receives them.
      num_ragged: Number of ragged tensors.
    """

    def __init__(self) -> None:
        self.tensors: list[tf.Tensor] = []
        self.num_ragged = 0
        self._key: list[Any] = []

    @property
    def key(self) -> tuple[Any, ...]:
        """Structure of the arguments, and all that their specs contain."""
        return tuple(self._key)

    def add(self, value: Any) -> bool:
        """Adds a nested structure; returns False if a leaf is not supported."""
        kind = type(value)
        if kind is tf.RaggedTensor:
            return self._add_ragged(value)
        if kind is tf_private.EagerTensorClass:
            dtype = value._datatype_enum()
            self._key.append((dtype, value._shape_tuple()))
            self.tensors.append(value)
            return dtype not in _WITH_HANDLE_DATA
        if kind is list or kind is tuple:
            self._key.append((kind, len(value)))
            return all(map(self.add, value))
        if kind is dict:
            if any(type(name) is not str for name in value):
                return False
            names = sorted(value)
            self._key.append((kind, *names))
            return all(self.add(value[name]) for name in names)
        self._key.append((kind, value))
        return kind in _CONSTANTS

    def _add_ragged(self, value: tf.RaggedTensor) -> bool:
        ids, splits = value.values, value.row_splits
        if (
            type(ids) is not tf_private.EagerTensorClass
            or type(splits) is not tf_private.EagerTensorClass
            or value.uniform_row_length is not None
            or ids._rank() != 1
        ):
            return False
        # The specs do not contain the number of ids.
        self._key.append(
            (
                tf.RaggedTensor,
                ids._datatype_enum(),
                splits._datatype_enum(),
                splits._shape_tuple(),
            )
        )
        self.tensors += (ids, splits)
        self.num_ragged += 1
        return True


def call_function(
    original: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    tracing_options: Any = None,
) -> Any:
    """Calls a function, and traces it if necessary.

    Args:
      original: The replaced function of TensorFlow.
      args: Positional arguments of the call.
      kwargs: Keyword arguments of the call.
      tracing_options: TensorFlow's options of the function, which all its calls
        share.
    """
    arguments = _Arguments()
    if not (
        tf.executing_eagerly()
        and _has_traces(tracing_options)
        and arguments.add(tuple(args or ()))
        and arguments.add(kwargs or {})
        and arguments.num_ragged
    ):
        return original(args, kwargs, tracing_options)
    traces: dict[Any, Any] = vars(tracing_options).setdefault(_TRACES, {})
    key = arguments.key
    function = traces.get((key, _context_of(tracing_options)))
    if function is not None:
        tensors = arguments.tensors
    else:
        function = tf_private.tracing_compilation.trace_function(
            args, kwargs, tracing_options
        )
        bound = function.function_type.bind(*(args or ()), **(kwargs or {}))
        tensors = function.function_type.unpack_inputs(bound)
        if [*map(id, tensors)] == [*map(id, arguments.tensors)]:
            # Tracing can add decisions and a trace.
            traces[key, _context_of(tracing_options)] = function
            if len(traces) > _MAX_KEYS:
                traces.pop(next(iter(traces)), None)
    return function._call_flat(
        tensors, captured_inputs=function.captured_inputs
    )


def _has_traces(options: Any) -> bool:
    """Returns whether the arguments and the context determine the trace."""
    if options is None or options.function_cache is None:
        return False
    captures = options.function_captures
    return captures is None or not captures.capture_types


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
        "_core.tf_private:tracing_compilation",
        "call_function",
        call_function,
        "A call of a `tf.function` takes 45 us longer for each ragged tensor "
        "in its arguments, in addition to the time of its operations.",
        TENSORFLOW,
        "tests/test_function_calls.py",
    ),
)
