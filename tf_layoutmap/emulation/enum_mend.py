"""Lets TensorFlow's TPU optimizers write their config with any protobuf.

They assign a bool to the enum `low_dimensional_packing_status`. protobuf 7.34
and later refuse that with a `TypeError`, so that no stock `TPUEmbedding` can
be built. Both values of the bool are numbers of the enum with the same
meaning, so an int does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tf_layoutmap import _tf_private

_WRITER = "_set_optimization_parameters"


class _WithEnum:
    """An optimizer whose packing status is an int; all else is its own."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self.low_dimensional_packing_status = int(
            optimizer.low_dimensional_packing_status)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _Mend:
    """Whoever is the first wraps the writer, the last one unwraps it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._original: Any = None

    def add_user(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users > 1:
                return
            original = getattr(_tf_private.TPUOptimizer, _WRITER)
            self._original = original

            def write(optimizer, parameters):
                return original(_WithEnum(optimizer), parameters)

            setattr(_tf_private.TPUOptimizer, _WRITER, write)

    def remove_user(self) -> None:
        with self._lock:
            if not self._num_users:
                raise RuntimeError(
                    "`uninstall` must follow an `install` of its own.")
            self._num_users -= 1
            if not self._num_users:
                setattr(_tf_private.TPUOptimizer, _WRITER, self._original)
                self._original = None


_mend = _Mend()


def install() -> None:
    """Mends the optimizers of TensorFlow until as many calls of `uninstall`.

    The optimizer objects are not changed, nor is what they write.
    """
    _mend.add_user()


def uninstall() -> None:
    """Takes one `install` back.

    Raises:
      RuntimeError: If there is none left.
    """
    _mend.remove_user()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Mends the optimizers of TensorFlow inside a `with` block."""
    install()
    try:
        yield
    finally:
        uninstall()
