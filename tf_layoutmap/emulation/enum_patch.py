"""Lets TensorFlow's TPU optimizers write their config with any protobuf.

They assign a bool to the enum `low_dimensional_packing_status`. protobuf 7.34
and later refuse that with a `TypeError`, so that no stock `TPUEmbedding` can
be built. Both values of the bool are numbers of the enum with the same
meaning, so an int does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tf_layoutmap._patches import emulation_rows, engine


class _WithEnum:
    """An optimizer whose packing status is an int; all else is its own."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self.low_dimensional_packing_status = int(
            optimizer.low_dimensional_packing_status
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def write(original: Callable[..., Any], optimizer: Any, parameters: Any) -> Any:
    """Writes the config of an optimizer, which is not changed."""
    return original(_WithEnum(optimizer), parameters)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Lets the optimizers of TensorFlow write inside a `with` block."""
    engine.install(emulation_rows.ENUM)
    try:
        yield
    finally:
        engine.uninstall(emulation_rows.ENUM)
