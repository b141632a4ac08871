"""A user's `tf.function` that DTensor refuses: traced again, computed whole.

`generate` of keras-hub's models is one, and so is the step of a loop of one's
own. DTensor refuses while it compiles, before anything is computed.
"""

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import error_messages
from tf_layoutmap.layout.step import computed_whole_report, retraced_function
from tf_layoutmap.layout.variables.gathered_reads import GatheredReads

# The attribute of a function with the one that is called in its place.
_WHOLE = "_layoutmap_computed_whole"


def call(original: Callable[..., Any], function: Any, *args: Any,
         **kwargs: Any) -> Any:
    """Calls a `tf.function`; computes it whole if DTensor refuses it.

    Args:
      original: `Function.__call__`.
      function: What `tf.function` returned.
      *args: Its arguments.
      **kwargs: Its arguments by name.

    Raises:
      UnsupportedByDTensorError: DTensor cannot even compute it whole, or a
        strict layout map does not want it so.
    """
    if not tf.executing_eagerly() or retraced_function.is_of_a_step(function):
        return original(function, *args, **kwargs)
    whole = getattr(function, _WHOLE, None)
    if whole is not None:
        return whole(original, args, kwargs)
    try:
        return original(function, *args, **kwargs)
    except tf.errors.OpError as error:
        finding = error_messages.finding_of(str(error))
        if finding is None:
            raise
        whole = _Whole(function, finding)
        try:
            outputs = whole(original, args, kwargs)
        except Exception:
            # What it was refused for first is what the user can change.
            raise error_messages.of_function(whole.name, str(error)) from error
    whole.warn()
    setattr(function, _WHOLE, whole)
    return outputs


class _Whole:
    """A function whose copy is traced with all weights gathered."""

    def __init__(self, function: Any, finding: str):
        self.name = getattr(function.python_function, "__name__", "function")
        self.finding = finding
        self.reads = GatheredReads()
        # The trace that was refused stays with the original.
        self._copy = function._clone(None)

    def __call__(self, original: Callable[..., Any], args: Any,
                 kwargs: Any) -> Any:
        args, kwargs = retraced_function.whole_arguments(args, kwargs)
        with self.reads.applied():
            return original(self._copy, *args, **kwargs)

    def warn(self) -> None:
        found = computed_whole_report.all_of(self.reads, self.finding)
        warnings.warn(
            f"DTensor cannot divide what function {self.name!r} computes. "
            f"Every device computes {found}.",
            error_messages.LayoutMapWarning, stacklevel=5)
