"""Whether the traced step of Keras 3 applies accumulated gradients.

If an optimizer accumulates gradients, Keras decides in each step by a `tf.cond`
whether to apply them. Under a ParameterServerStrategy, TensorFlow does not
support variable updates in such a condition. On servers, the condition is
therefore outside of the step, the step is traced twice, and each trace is fixed
to one of the two cases.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_of_thread = threading.local()


@contextlib.contextmanager
def fixed(applies: bool | None) -> Iterator[None]:
    """Fixes whether steps that are traced in the context apply gradients.

    Args:
      applies: Whether a step applies the accumulated gradients. None if the
        optimizer does not accumulate gradients.
    """
    before = fixed_value()
    _of_thread.applies = applies
    try:
        yield
    finally:
        _of_thread.applies = before


def fixed_value() -> bool | None:
    """Returns the value of the innermost context of `fixed`, or None."""
    return getattr(_of_thread, "applies", None)
