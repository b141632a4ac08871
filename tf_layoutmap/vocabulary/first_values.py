"""Initializers, read as a distribution that values are drawn from by key.

Pure: initializers of TensorFlow, Keras 3 and tf_keras are read by the name of
their class and their config. One that is called for a whole table gives other
values at each call, and cannot be asked for those of one key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

# By the name of a class: the distribution, and the names of its two numbers.
_KINDS = {
    "RandomUniform": ("uniform", "minval", "maxval"),
    "RandomNormal": ("normal", "mean", "stddev"),
    "TruncatedNormal": ("truncated_normal", "mean", "stddev"),
    "Constant": ("constant", "value", None),
    "Zeros": ("constant", 0.0, None),
    "Ones": ("constant", 1.0, None),
}
# By the name of a function.
_FUNCTIONS = {"zeros": 0.0, "zeros_v2": 0.0, "ones": 1.0, "ones_v2": 1.0}
_LARGEST = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65504.0}


@dataclasses.dataclass(frozen=True)
class FirstValues:
    """A distribution: see the op `FirstRows`.

    Attributes:
      kind: `"constant"`, `"uniform"`, `"normal"` or `"truncated_normal"`.
      limits: The constant and 0; the limits; mean and standard deviation.
      seed: An integer of 64 bits, signed.
    """

    kind: str
    limits: tuple[float, float]
    seed: int


def read_initializer(
    initializer: Any,
    *,
    seed: int,
    table: str,
    dtype: str = "float32",
) -> FirstValues:
    """Returns the distribution that an initializer draws from.

    Args:
      initializer: An object of TensorFlow or Keras with `get_config`, or
        `tf.zeros` or `tf.ones`.
      seed: That of the vocabulary; the initializer's own is not used.
      table: Name of the table, which first values depend on, too.
      dtype: How its rows are stored.

    Raises:
      ValueError: If it is no initializer whose distribution is known, or its
        values may be larger than the rows can hold.
    """
    name = getattr(initializer, "__name__", type(initializer).__name__)
    seed = int.from_bytes(
        hashlib.sha256(f"{seed}/{table}".encode()).digest()[:8],
        "little",
        signed=True,
    )
    if name in _FUNCTIONS:
        found = FirstValues("constant", (_FUNCTIONS[name], 0.0), seed)
    else:
        kind, *names = _KINDS.get(
            type(initializer).__name__, (None, None, None)
        )
        if kind is None or not hasattr(initializer, "get_config"):
            raise ValueError(
                "The initializer of a table with an open vocabulary must be "
                "one whose values can be drawn for one key: RandomUniform, "
                "RandomNormal, TruncatedNormal, Constant, Zeros or Ones. "
                f"Received: {initializer!r} (table {table!r})."
            )
        config = initializer.get_config()
        numbers = [
            config[one] if isinstance(one, str) else one or 0.0 for one in names
        ]
        found = FirstValues(kind, _checked(numbers, initializer, table), seed)
    reach = (
        max(map(abs, found.limits))
        if found.kind == "uniform"
        else abs(found.limits[0]) + 9 * abs(found.limits[1])
    )
    if reach > _LARGEST[dtype]:
        raise ValueError(
            f"The first rows of a table in {dtype} must be at most "
            f"{_LARGEST[dtype]} in magnitude. Received: {initializer!r} "
            f"(table {table!r})."
        )
    return found


def _checked(
    numbers: list[Any],
    initializer: Any,
    table: str,
) -> tuple[float, float]:
    try:
        first, second = (float(one) for one in numbers)
    except TypeError:
        first = second = math.nan
    if not (math.isfinite(first) and math.isfinite(second)):
        raise ValueError(
            "The initializer of a table with an open vocabulary must have "
            f"finite numbers. Received: {numbers} of {initializer!r} (table "
            f"{table!r})."
        )
    return first, second
