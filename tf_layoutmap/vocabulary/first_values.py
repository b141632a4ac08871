"""Converts initializers to distributions of the initial values of keys.

An initializer returns different values in each call, and it cannot compute the
values of a single key. This module therefore reads the distribution of an
initializer. Ops then draw the values of each key from the distribution. The
module identifies initializers of TensorFlow, Keras 3 and tf_keras by their
class name and config, without importing these packages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

# Maps the class name of an initializer to its distribution and to the names of
# the distribution's two parameters.
_KINDS = {
    "RandomUniform": ("uniform", "minval", "maxval"),
    "RandomNormal": ("normal", "mean", "stddev"),
    "TruncatedNormal": ("truncated_normal", "mean", "stddev"),
    "Constant": ("constant", "value", None),
    "Zeros": ("constant", 0.0, None),
    "Ones": ("constant", 1.0, None),
}
# Maps the name of a function to its constant.
_FUNCTIONS = {"zeros": 0.0, "zeros_v2": 0.0, "ones": 1.0, "ones_v2": 1.0}
_LARGEST = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65504.0}


@dataclasses.dataclass(frozen=True)
class FirstValues:
    """A distribution of initial values, as the op `FirstRows` requires it.

    Attributes:
      kind: `"constant"`, `"uniform"`, `"normal"` or `"truncated_normal"`.
      limits: The two parameters of the distribution. For `"constant"`, the
        constant and 0; for `"uniform"`, the lower and the upper limit;
        otherwise the mean and the standard deviation.
      seed: A signed 64-bit integer.
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
      seed: Seed of the vocabulary. The seed of the initializer is ignored.
      table: Name of the table. Initial values depend on the name.
      dtype: Dtype in which the rows are stored.

    Raises:
      ValueError: If the distribution of the initializer is not known, or its
        values may exceed the range of `dtype`.
    """
    name = getattr(initializer, "__name__", type(initializer).__name__)
    seed = int.from_bytes(
        hashlib.sha256(f"{seed}/{table}".encode()).digest()[:8],
        "little",
        signed=True,
    )
    if name in _FUNCTIONS:
        values = FirstValues("constant", (_FUNCTIONS[name], 0.0), seed)
    else:
        kind, *names = _KINDS.get(
            type(initializer).__name__, (None, None, None)
        )
        if kind is None or not hasattr(initializer, "get_config"):
            raise ValueError(
                "The initializer of a table with an open vocabulary must "
                "support values for single keys. Use RandomUniform, "
                "RandomNormal, TruncatedNormal, Constant, Zeros or Ones. "
                f"Received: {initializer!r} (table {table!r})."
            )
        config = initializer.get_config()
        numbers = [
            config[entry] if isinstance(entry, str) else entry or 0.0
            for entry in names
        ]
        values = FirstValues(kind, _checked(numbers, initializer, table), seed)
    reach = (
        max(map(abs, values.limits))
        if values.kind == "uniform"
        else abs(values.limits[0]) + 9 * abs(values.limits[1])
    )
    if reach > _LARGEST[dtype]:
        raise ValueError(
            f"The initial values of a table in {dtype} must be at most "
            f"{_LARGEST[dtype]} in magnitude. Received: {initializer!r} "
            f"(table {table!r})."
        )
    return values


def _checked(
    numbers: list[Any],
    initializer: Any,
    table: str,
) -> tuple[float, float]:
    try:
        first, second = (float(number) for number in numbers)
    except TypeError:
        first = second = math.nan
    if not (math.isfinite(first) and math.isfinite(second)):
        raise ValueError(
            "The initializer of a table with an open vocabulary must have "
            f"finite parameters. Received: {numbers} of {initializer!r} "
            f"(table {table!r})."
        )
    return first, second
