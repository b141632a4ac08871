"""Replacements of lookups while `export` traces a model."""

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

# The owner of a table, and the function that replaces its lookup.
Placeholder = tuple[object, Callable[..., Any]]

_traced = threading.local()


@contextlib.contextmanager
def placeholders_in_place(stand_ins: Sequence[Placeholder]) -> Generator[None]:
    """Sets the results of `placeholder_of` inside the context.

    The placeholders have an effect only in the current thread.

    >>> table = object()
    >>> with placeholders_in_place([(table, str)]):
    ...     placeholder_of(table)
    <class 'str'>
    >>> placeholder_of(table) is None
    True
    """
    before: Sequence[Placeholder] = getattr(_traced, "stand_ins", ())
    _traced.stand_ins = stand_ins
    try:
        yield
    finally:
        _traced.stand_ins = before


def placeholder_of(owner: object) -> Callable[..., Any] | None:
    """Returns the replacement of the lookup of `owner`, or None."""
    for known, stand_in in getattr(_traced, "stand_ins", ()):
        if known is owner:
            return stand_in
    return None
