"""What the constructors of `ShardedVariable` take, checked."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.partition import FixedShardsPartitioner


def check_variables(variables: Any, name: str) -> list[tf.Variable]:
    """Returns `variables` if they can be the shards of one table."""
    where = f" (table {name!r})."
    if (not isinstance(variables, Sequence) or not variables
            or not all(isinstance(v, tf.Variable) for v in variables)):
        raise TypeError(
            "Argument `variables` should be a non-empty list of "
            f"`tf.Variable`s. Received: {variables!r}{where}")
    if len({id(variable) for variable in variables}) < len(variables):
        raise ValueError(
            "Argument `variables` must not hold a variable twice. Received: "
            f"{[v.name for v in variables]}{where}")
    if any(not v.shape.rank or not v.shape.is_fully_defined()
           for v in variables):
        raise ValueError(
            "All `variables` must have fully defined shapes with at least "
            f"one axis. Received: {[v.shape for v in variables]}{where}")
    if len({variable.dtype for variable in variables}) > 1:
        raise ValueError(
            "All `variables` must have the same dtype. Received: "
            f"{[v.dtype.name for v in variables]}{where}")
    if len({tuple(variable.shape[1:]) for variable in variables}) > 1:
        raise ValueError(
            "All `variables` must have the same shapes except for the first "
            f"axis. Received: {[v.shape for v in variables]}{where}")
    if len({variable.trainable for variable in variables}) > 1:
        raise ValueError(
            "All `variables` must be trainable, or none. Received: "
            f"{[v.trainable for v in variables]}{where}")
    if any(variable._get_save_slice_info() for variable in variables):
        raise ValueError(
            "`SaveSliceInfo` should not be set for `variables`: the table "
            f"gives each its slice. Received: {[v.name for v in variables]}"
            f"{where}")
    return list(variables)


def check_whole_value(value: Any, shape: Any, dtype: Any,
                       name: str) -> tuple[Any, tf.TensorShape, tf.DType]:
    """Returns the value as array or tensor, its shape and dtype."""
    if not isinstance(value, np.ndarray) or dtype is not None:
        value = tf.convert_to_tensor(value, dtype=dtype)
    found = tf.TensorShape(value.shape)
    if shape is not None and not found.is_compatible_with(shape):
        raise ValueError(
            f"Argument `shape` must be that of `initial_value`, {found}. "
            f"Received: {shape} (table {name!r}).")
    return value, found, tf.as_dtype(value.dtype)


def number_of_shards(partitioner: Any, num_shards: Any, shape: tuple,
                      dtype: tf.DType, name: str) -> int:
    """Returns how many shards `create` is asked for."""
    if partitioner is not None and num_shards is not None:
        raise ValueError(
            "Arguments `partitioner` and `num_shards` must not both be "
            f"given. Received: {partitioner!r} and {num_shards!r} (table "
            f"{name!r}).")
    if partitioner is None:
        partitioner = FixedShardsPartitioner(
            1 if num_shards is None else num_shards)
    if not callable(partitioner):
        raise TypeError(_checks.message(
            "partitioner", "callable", partitioner, f"table {name!r}"))
    counts = list(partitioner(tf.TensorShape(shape), dtype))
    if (len(counts) != len(shape) or counts[0] < 1
            or any(count != 1 for count in counts[1:])):
        raise ValueError(
            "Argument `partitioner` must cut axis 0 only. Received: counts "
            f"{counts} for shape {shape} (table {name!r}).")
    return int(counts[0])
