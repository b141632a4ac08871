"""Argument checks that share one message grammar.

Every message reads: what is required, then what came, then where.
"""

import numbers
from collections.abc import Collection
from typing import Any


def message(
    argument: str, requirement: str, value: Any, where: str | None = None
) -> str:
    """Returns the sentence that refuses `value` for `argument`.

    >>> message("num_shards", "at least 1", 0, "table 'ads'")
    "Argument `num_shards` must be at least 1. Received: num_shards=0 \
(table 'ads')."

    Args:
      argument: Name of the argument, as its caller writes it.
      requirement: What it must be, without "must be".
      value: What came.
      where: Feature, sample or table it came with; None when the call says
        enough.
    """
    location = "" if where is None else f" ({where})"
    return (
        f"Argument `{argument}` must be {requirement}. "
        f"Received: {argument}={value!r}{location}."
    )


def check_int(
    argument: str,
    value: Any,
    *,
    lowest: int | None = None,
    highest: int | None = None,
    where: str | None = None,
) -> int:
    """Returns `value` as an `int`, refusing anything that is not whole.

    A bool is refused: `num_shards=True` is a slip, not a number.

    >>> check_int("num_shards", 4, lowest=1)
    4

    Args:
      argument: Name of the argument.
      value: What came; Python and numpy integers are taken.
      lowest: Smallest value allowed; None for no bound.
      highest: Largest value allowed; None for no bound.
      where: As in `message`.

    Raises:
      TypeError: `value` is not an integer.
      ValueError: `value` is outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message(argument, "an integer", value, where))
    number = int(value)
    if lowest is not None and number < lowest:
        raise ValueError(message(argument, f"at least {lowest}", value, where))
    if highest is not None and number > highest:
        raise ValueError(message(argument, f"at most {highest}", value, where))
    return number


def check_one_of(
    argument: str,
    value: Any,
    allowed: Collection[Any],
    *,
    where: str | None = None,
) -> Any:
    """Returns `value` if it is one of `allowed`.

    >>> check_one_of("placement", "div", ("div", "mod"))
    'div'

    Raises:
      ValueError: It is not.
    """
    if value not in allowed:
        raise ValueError(
            message(argument, f"one of {tuple(allowed)}", value, where)
        )
    return value


def check_type(
    argument: str,
    value: Any,
    kind: type | tuple[type, ...],
    description: str,
    *,
    where: str | None = None,
) -> Any:
    """Returns `value` if it is an instance of `kind`.

    >>> check_type("name", "ads", str, "a string")
    'ads'

    Raises:
      TypeError: It is not; the message says `description`.
    """
    if not isinstance(value, kind):
        raise TypeError(message(argument, description, value, where))
    return value
