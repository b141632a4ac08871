"""Checks of the arguments and the inputs of a `ShardedEmbedding`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import user_warnings

if TYPE_CHECKING:
    from tf_layoutmap._core.types import ShardCounts


def count_shards(
    num_shards: Any,
    partitioner: ShardCounts | None,
    max_shards: int,
    shape: tuple[int, int],
    dtype: str,
    where: str,
) -> int:
    """Returns the number of shards that the arguments specify.

    Args:
      num_shards: Maximum number of shards, or None.
      partitioner: Callable of shape and dtype that returns the number of
        shards, an alternative to `num_shards`.
      max_shards: Maximum number of shards of the table.
      shape: Shape of the table, `[input_dim, output_dim]`.
      dtype: Dtype of the rows.
      where: The layer, for messages.

    Raises:
      TypeError, ValueError: If both `num_shards` and `partitioner` are set, or
        one of them is invalid.
    """
    if num_shards is not None and partitioner is not None:
        raise ValueError(
            "Arguments `num_shards` and `partitioner` must not both be "
            f"given. Received: {num_shards!r} and {partitioner!r} "
            f"({where})."
        )
    if partitioner is None:
        num_shards = _core_checks.check_int(
            "num_shards",
            1 if num_shards is None else num_shards,
            lowest=1,
            where=where,
        )
        if num_shards > max_shards:
            user_warnings.warn(
                f"The table of {shape[0]} rows has {max_shards} shards instead "
                f"of num_shards={num_shards}, because each shard requires at "
                f"least one row, or one bucket of keys ({where})."
            )
        return min(max_shards, num_shards)
    _core_checks.check_partitioner(partitioner, where)
    counts = list(partitioner(tf.TensorShape(shape), tf.as_dtype(dtype)))
    if len(counts) != 2 or counts[1] != 1:
        raise ValueError(
            "Argument `partitioner` must partition the rows only, "
            f"[num_shards, 1]. Received: {counts} ({where})."
        )
    return _core_checks.check_int(
        "num_shards", counts[0], lowest=1, highest=max_shards, where=where
    )


def check_inputs(inputs: Any, layer: str) -> None:
    """Checks that no input is a Python value; Keras' own error is less clear.

    Args:
      inputs: Inputs of a call of a Keras 3 layer, nested or not.
      layer: Name of the layer.

    Raises:
      TypeError: If a leaf is a Python number or string.
    """
    for one in tf.nest.flatten(inputs):
        if isinstance(one, bool | int | float | str | bytes):
            raise TypeError(
                "Ids must be a tensor or an array, such as "
                "tf.constant([1, 2]), not Python numbers, strings or lists of "
                f"them. Received: {one!r} (layer {layer!r})."
            )
