"""What looks rows up in place of a table, while a model is traced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

# A table's owner, and what its lookup is replaced by.
StandIn = tuple[object, Callable[..., Any]]

_traced = threading.local()


@contextlib.contextmanager
def in_place(stand_ins: Sequence[StandIn]) -> Generator[None]:
    """Lets `of` return these in this thread, until the block ends.

    >>> table = object()
    >>> with in_place([(table, str)]):
    ...     of(table)
    <class 'str'>
    >>> of(table) is None
    True
    """
    before: Sequence[StandIn] = getattr(_traced, "stand_ins", ())
    _traced.stand_ins = stand_ins
    try:
        yield
    finally:
        _traced.stand_ins = before


def of(owner: object) -> Callable[..., Any] | None:
    """Returns what stands in for the lookup of `owner`; None for nothing."""
    for known, stand_in in getattr(_traced, "stand_ins", ()):
        if known is owner:
            return stand_in
    return None
