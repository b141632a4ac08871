"""A table in Keras' weight files: one array, whatever the shards.

Where the file is HDF5, one shard at a time is copied; else Keras wants the
whole array.
"""

from typing import Any

import numpy as np

from tf_layoutmap import _keras_private
from tf_layoutmap.sharded import ShardedVariable


def save(store: Any, key: str, table: ShardedVariable) -> None:
    """Writes `table` under `key` of what `save_own_variables` is given."""
    dtype = table.dtype.as_numpy_dtype
    dataset = None
    if np.dtype(dtype).kind == "f":  # HDF5 knows no bfloat16; Keras helps.
        dataset = _keras_private.h5_dataset(
            store, key, tuple(table.shape.as_list()), dtype)
    if dataset is None:
        store[key] = table.numpy()
        return
    for start, shard in zip(table.partition.offsets, table.variables):
        dataset[start:start + shard.shape[0]] = shard.numpy()


def load(store: Any, key: str, table: ShardedVariable) -> None:
    """Reads what `save`, or Keras for one variable, has written.

    Raises:
      ValueError: The array has another shape. Nothing is changed.
    """
    value = _keras_private.h5_dataset(store, key)
    if value is None or "dtype" in value.attrs:
        value = store[key]
    if tuple(value.shape) != tuple(table.shape):
        raise ValueError(
            f"Table {table.name!r} must be loaded from an array of shape "
            f"{tuple(table.shape)}. Received: shape {tuple(value.shape)}.")
    for start, shard in zip(table.partition.offsets, table.variables):
        shard.assign(value[start:start + shard.shape[0]])
