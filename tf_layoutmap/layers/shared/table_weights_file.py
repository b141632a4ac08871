"""A table in Keras' weight files: one array, whatever the shards.

Where the file is HDF5, one shard at a time is copied; else Keras wants the
whole array.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.routing.shards import known_size, known_sizes

dtensor = tf.experimental.dtensor


def save(store: Any, key: str, table: ShardedVariable | MeshVariable) -> None:
    """Writes `table` under `key` of what `save_own_variables` is given."""
    dtype = tf.as_dtype(table.dtype).as_numpy_dtype
    dataset = None
    if np.dtype(dtype).kind != "f" and hasattr(store, "create_dataset"):
        dtype = np.float32  # HDF5 knows no bfloat16, but all of its numbers.
    if np.dtype(dtype).kind == "f":  # Else Keras helps.
        dataset = _keras_private.h5_dataset(
            store, key, tuple(known_sizes(table)), dtype
        )
    if dataset is None:
        store[key] = table.numpy()
        return
    for index, shard in _shards(table):
        dataset[index] = shard().astype(dtype, copy=False)


def _shards(
    table: ShardedVariable | MeshVariable,
) -> Iterator[tuple[tuple[slice, ...], Callable[[], np.ndarray]]]:
    """Yields where each shard is, and a function that copies it."""
    if isinstance(table, ShardedVariable):
        for start, shard in zip(table.partition.offsets, table.variables):
            yield (slice(start, start + known_size(shard)),), shard.numpy
        return
    value = transfer.read_divided(table.divided_value)
    layout = table.layout
    if layout.mesh.num_local_devices() < layout.mesh.size:
        # Other processes hold the rest.
        yield (slice(None),), table.numpy
        return
    indices = transfer.slices_of_devices(table.shape, layout)
    # Each shard once, however many devices hold it.
    shards = {
        tuple((s.start, s.stop) for s in index): (index, shard)
        for index, shard in zip(indices, dtensor.unpack(value))
    }
    for index, shard in shards.values():
        # What is behind the rows of the table is padding.
        size = index[0].stop - index[0].start
        yield index, lambda shard=shard, size=size: shard.numpy()[:size]


def load(store: Any, key: str, table: ShardedVariable | MeshVariable) -> None:
    """Reads what `save`, or Keras for one variable, has written.

    Raises:
      ValueError: The array has another shape. Nothing is changed.
    """
    value = _checked(store, key, table)
    if isinstance(table, ShardedVariable):
        for start, shard in zip(table.partition.offsets, table.variables):
            shard.assign(
                tf.cast(value[start : start + known_size(shard)], shard.dtype)
            )
        return
    shards = transfer.unique_shards(table.shape, table.layout)
    variable = table.divided_value
    variable.assign(
        tf.cast(
            transfer.packed(
                shards,
                (np.array(value[shard.slices], order="C") for shard in shards),
                table.layout,
            ),
            variable.dtype,
        )
    )


def check(store: Any, key: str, variable: Any) -> None:
    """Refuses what `load`, or an assignment, would find half-way.

    Args:
      store: What `load_own_variables` is given.
      key: Of the array.
      variable: A table, or any other variable.

    Raises:
      ValueError: The array has another shape.
    """
    _checked(store, key, variable)


def _checked(store: Any, key: str, variable: Any) -> Any:
    value = _keras_private.h5_dataset(store, key)
    if value is None or "dtype" in value.attrs:
        value = store[key]
    if tuple(value.shape) != tuple(variable.shape):
        kind = (
            "Table"
            if isinstance(variable, ShardedVariable | MeshVariable)
            else "Variable"
        )
        raise ValueError(
            f"{kind} {variable.name!r} must be loaded from an array of shape "
            f"{tuple(variable.shape)}. Received: shape {tuple(value.shape)}."
        )
    return value
