"""Returns the values, layouts or the error of a program as JSON.

This module and the programs in this package do not use `tf_layoutmap`.
"""

import contextlib
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

dtensor = tf.experimental.dtensor
PROGRAMS: dict[str, Any] = {}
# Names of programs that only `make test-all` runs.
EXHAUSTIVE: set[str] = set()


def program(function):
    """Registers a program, which is a function without arguments."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    assert name not in PROGRAMS
    PROGRAMS[name] = function
    return function


def exhaustive_program(function):
    """Registers a program that only `make test-all` runs."""
    before = set(PROGRAMS)
    program(function)
    EXHAUSTIVE.update(PROGRAMS.keys() - before)
    return function


def outcome_of(function) -> Any:
    """Resets the global state, runs a program and returns its outcome."""
    keras.backend.clear_session()
    tf_keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    tf_keras.utils.set_random_seed(7)
    return attempt(function)


def attempt(function) -> Any:
    """Returns the result of a function as JSON, or its error."""
    try:
        return as_json(function())
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        # Names of functions contain numbers that differ between runs, so these
        # numbers are removed.
        return {
            "error": type(error).__name__,
            "line": re.sub(
                r"\d+", "N", _same_in_all_runs(lines[0] if lines else "")
            ),
        }


def attempts(**functions) -> dict[str, Any]:
    """Returns the outcome of each function."""
    return {name: attempt(function) for name, function in functions.items()}


def _same_in_all_runs(text: str) -> str:
    """Removes addresses and temporary folder names from a text.

    Also removes a random prefix of links to TensorFlow's message types.
    """
    return re.sub(r"0x[0-9a-f]+|/\S*/tmp\w+|goo\.gle/debug\w+", "X", text)


def as_json(value: Any) -> Any:
    """Returns a value as JSON; numbers with equal texts are bitwise equal."""
    if isinstance(value, str):
        return _same_in_all_runs(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    if isinstance(value, tf.IndexedSlices):
        return {
            "values": as_json(value.values),
            "indices": as_json(value.indices),
        }
    if isinstance(value, tf.RaggedTensor):
        return {"ragged": as_json(value.to_list())}
    if isinstance(value, tf.SparseTensor):
        return as_json([value.indices, value.values, value.dense_shape])
    if isinstance(value, keras.Variable):
        value = value.value
    with contextlib.suppress(ValueError, tf.errors.InvalidArgumentError):
        if tf.is_tensor(value) and dtensor.is_dtensor(value):
            return {
                "layout": list(dtensor.fetch_layout(value).sharding_specs),
                "parts": as_json(list(dtensor.unpack(value))),
            }
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return {
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "values": [repr(one) for one in value.reshape(-1).tolist()],
        }
    return _same_in_all_runs(repr(value))
