"""Explains errors of TensorFlow if a process of the cluster is lost.

Programs also call servers outside of `Run.steps` and `fit`: in `build`, in
`stats`, in methods of vocabularies, in `DeltaWriter.write`, or when they read a
variable. If a process is lost, TensorFlow raises an `UnavailableError` or an
`AbortedError` that often does not name the process. TensorFlow creates the
errors of most eager ops in one Python function, which this module replaces. C++
functions raise the errors of traced functions, and of copies of inputs,
directly, so these functions are also replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import patches
from tf_layoutmap.ps import handled_errors
from tf_layoutmap.ps.waiting import ServerLostError, StepDeadlineError

# Names of threads of TensorFlow's coordinator, which handles these errors.
_COORDINATOR_THREADS = ("WorkerClosureProcessingLoop", "WorkerPreemption")

# Returns an error to raise instead of TensorFlow's error, or None.
Explain = Callable[[tf.errors.OpError], Exception | None]

_explain: Explain | None = None


def explain_with(explain: Explain) -> None:
    """Sets the function that explains errors of calls.

    Args:
      explain: Function of TensorFlow's error. It may restart the program.
    """
    global _explain
    patches.ensure("ps_calls")
    _explain = explain


def error_of(
    kind: type[ServerLostError] | type[StepDeadlineError],
    message: str,
    cause: tf.errors.OpError,
) -> Exception:
    """Returns an error of this package that is also an `UnavailableError`.

    Code that handles the error of TensorFlow therefore handles this error, too.

    Args:
      kind: Class of the error.
      message: Message of the error.
      cause: Error of TensorFlow.
    """
    both = type(
        kind.__name__,
        (tf.errors.UnavailableError, kind),
        {"__doc__": kind.__doc__, "__module__": kind.__module__},
    )
    return both(cause.node_def, cause.op, message)


def status_to_exception(original: Callable[[Any], Any], status: Any) -> Any:
    """Returns the exception for a status of TensorFlow."""
    return _explained(original(status))


def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose errors are raised by C++ code."""
    try:
        return original(*args, **kwargs)
    except handled_errors.LOST as error:
        explained = _explained(error)
        if explained is error:
            raise
        raise explained from None


def _explained(error: Any) -> Any:
    if (
        _explain is None
        or not isinstance(error, handled_errors.LOST)
        or isinstance(error, (ServerLostError, StepDeadlineError))
        or handled_errors.handles_errors()
        or threading.current_thread().name.startswith(_COORDINATOR_THREADS)
    ):
        return error
    # Calls that check the processes can fail in the same way.
    with handled_errors.error_handler():
        return _explain(error) or error
