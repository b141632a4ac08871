"""A table in shards is one tensor in a checkpoint.

Each shard is written as a slice of it, so a checkpoint does not know how many
shards there were: it restores into any number of them, into one `tf.Variable`
and into TensorFlow's own sharded variable, and from all of those.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.sharded import routing


def saveables(shards: routing.Shards, key: str) -> Sequence:
    """Returns what reads and restores the shards under one checkpoint key.

    Args:
      shards: The table.
      key: The checkpoint's name of the tensor.
    """
    full_shape = full_shape_of(shards)
    column_offsets = [0] * (len(full_shape) - 1)
    return [
        _tf_private.ResourceVariableSaveable(
            variable,
            tf.Variable.SaveSliceInfo(
                full_name=shards.name, full_shape=full_shape,
                var_offset=[row_offset, *column_offsets],
                var_shape=variable.shape.as_list()).spec,
            key)
        for variable, row_offset in zip(shards.variables,
                                        shards.partition.offsets)
        # A slice of no rows has no form in the file.
        if variable.shape[0] > 0 or len(shards.variables) == 1]


def check_restorable(shards: routing.Shards, path: str, key: str) -> None:
    """Refuses a checkpoint whose tensor is not this table's.

    Args:
      shards: The table about to be restored.
      path: The checkpoint's prefix.
      key: Its name of the tensor.

    Raises:
      ValueError: The tensor there has another shape or dtype.
    """
    reader = tf.train.load_checkpoint(path)
    if not reader.has_tensor(key):
        return  # Incomplete checkpoints are Checkpoint's own affair.
    found_shape = reader.get_variable_to_shape_map()[key]
    found_dtype = reader.get_variable_to_dtype_map()[key]
    full_shape = full_shape_of(shards)
    if found_shape != full_shape or found_dtype != shards.dtype:
        raise ValueError(
            f"Table {shards.name!r} must be restored from a tensor of shape "
            f"{full_shape} and dtype {shards.dtype.name}. Received: shape "
            f"{found_shape}, dtype {found_dtype.name} ({key!r} in checkpoint "
            f"{path!r}).")


def full_shape_of(shards: routing.Shards) -> list[int]:
    """Returns the shape of the whole table."""
    return [shards.partition.num_rows, *shards.row_shape.as_list()]
