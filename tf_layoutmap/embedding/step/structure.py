"""Nested structures of features: their paths, and what must match them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


def flatten_with_paths(structure: Any) -> list[tuple[str, Any]]:
    """Returns `(path, leaf)` pairs in `tf.nest.flatten` order.

    >>> flatten_with_paths({"b": [1, 2], "a": 3})
    [('a', 3), ('b/0', 1), ('b/1', 2)]
    """
    paths = tf.__internal__.nest.yield_flat_paths(structure)
    return [
        ("/".join(str(step) for step in path), leaf)
        for path, leaf in zip(paths, tf.nest.flatten(structure))
    ]


def check_same(structure: Any, argument: str, expected: Any, like: str):
    """Raises unless `structure` nests as `expected` does.

    Raises:
      TypeError: If a sequence or mapping is of another type.
      ValueError: If one has another size or other keys.
    """
    try:
        tf.nest.assert_same_structure(expected, structure)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"Argument `{argument}` must have the structure of `{like}`, "
            f"{_drawn(expected)}, whose leaves are {_paths(expected)}. "
            f"Received: {_drawn(structure)}, with leaves "
            f"{_paths(structure)}.{_advice(structure)}"
        ) from None


def flatten_weights(weights: Any | None, expected: Any, *, like: str) -> list:
    """Returns one weight, or None, for each leaf of `expected`."""
    if weights is None:
        return [None] * len(tf.nest.flatten(expected))
    check_same(weights, "weights", expected, like)
    return tf.nest.flatten(weights)


def _advice(structure: Any) -> str:
    """What to do about a list of numbers, which is a structure, too."""
    is_list = tf.nest.is_nested(structure) and any(
        isinstance(one, int | float | str) for one in tf.nest.flatten(structure)
    )
    return (
        " A list is a structure, not a tensor: write tf.constant([...])."
        if is_list
        else ""
    )


def _paths(structure: Any) -> list[str]:
    return [path for path, _ in flatten_with_paths(structure)]


def _drawn(structure: Any) -> str:
    """The structure with its types, and `.` for each leaf."""
    if isinstance(structure, Mapping):
        inside = ", ".join(
            f"{key!r}: {_drawn(one)}" for key, one in structure.items()
        )
        text = f"{{{inside}}}"
        plain = dict
    elif isinstance(structure, list | tuple):
        inside = ", ".join(_drawn(one) for one in structure)
        if isinstance(structure, list):
            text, plain = f"[{inside}]", list
        else:
            text, plain = f"({inside}{',' * (len(structure) == 1)})", tuple
    else:
        return "."
    kind = type(structure)
    return text if kind is plain else f"{kind.__name__}({text})"
