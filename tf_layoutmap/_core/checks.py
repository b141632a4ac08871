"""Argument checks whose error messages have the same format.

Each message contains the requirement, the received value and the location.
"""

import numbers
from collections.abc import Collection
from typing import Any


def message(
    argument: str, requirement: str, value: Any, where: str | None = None
) -> str:
    """Returns the error message for an invalid value of an argument.

    >>> message("num_shards", "at least 1", 0, "table 'ads'")
    "Argument `num_shards` must be at least 1. Received: num_shards=0 \
(table 'ads')."

    Args:
      argument: Name of the argument.
      requirement: Requirement for the value, without "must be".
      value: Received value.
      where: Feature, sample or table to which the value belongs. None if the
        arguments of the call are sufficient to find the value.
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
    """Returns `value` as an `int`; raises an error if it is not an integer.

    A bool also raises an error, because `num_shards=True` is a mistake.

    >>> check_int("num_shards", 4, lowest=1)
    4

    Args:
      argument: Name of the argument.
      value: Received value; Python and numpy integers are accepted.
      lowest: Smallest allowed value; None for no bound.
      highest: Largest allowed value; None for no bound.
      where: As in `message`.

    Raises:
      TypeError: If `value` is not an integer.
      ValueError: If `value` is outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message(argument, "an integer", value, where))
    number = int(value)
    if lowest is not None and number < lowest:
        raise ValueError(message(argument, f"at least {lowest}", value, where))
    if highest is not None and number > highest:
        raise ValueError(message(argument, f"at most {highest}", value, where))
    return number


def check_partitioner(partitioner: Any, where: str | None = None) -> Any:
    """Returns a partitioner; raises an error if it is a class, or not callable.

    >>> check_partitioner(int, "table 'ads'")
    Traceback (most recent call last):
    TypeError: Argument `partitioner` must be an object, such as \
FixedShardsPartitioner(2), not a class. Received: partitioner=<class 'int'> \
(table 'ads').

    Args:
      partitioner: Received value.
      where: As in `message`.

    Raises:
      TypeError: If `partitioner` is a class or is not callable.
    """
    if isinstance(partitioner, type):
        requirement = (
            "an object, such as FixedShardsPartitioner(2), not a class"
        )
        raise TypeError(message("partitioner", requirement, partitioner, where))
    if not callable(partitioner):
        raise TypeError(message("partitioner", "callable", partitioner, where))
    return partitioner


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
      ValueError: If `value` is not in `allowed`.
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
      TypeError: If `value` is not an instance of `kind`. The message contains
        `description`.
    """
    if not isinstance(value, kind):
        raise TypeError(message(argument, description, value, where))
    return value


def own_h5_dataset(group: Any, key: str) -> Any:
    """Returns a dataset whose values are in the file of the group.

    Some patch versions of Keras have a function with these checks, but others
    read values from any file whose name the HDF5 file contains.
    """
    if key not in group:
        raise KeyError(key)
    link = type(group.get(key, getlink=True)).__name__
    dataset: Any = group[key] if link == "HardLink" else None
    if not hasattr(dataset, "external") or dataset.external:
        raise ValueError(
            "A weight must be a dataset in the HDF5 file itself. Received: "
            f"{key!r}, {link} to {dataset}. Save the weights again."
        )
    return dataset
