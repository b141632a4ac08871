"""Creates the variables of an open vocabulary on parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.variables import table_variable
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.vocabulary import bucket_layout, divided_numbers, state
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary


def create_variables(
    vocabulary: OpenVocabulary,
    table: str,
    devices: Sequence[str],
) -> dict[str, Any]:
    """Creates the variables of a vocabulary without keys.

    A shard has whole segments, with all that is known of their keys: so a
    server decides about a key alone.

    Args:
      vocabulary: Its settings.
      table: The name of its table.
      devices: Of each shard of the table.

    Returns:
      From `state.KEYS` and so on to a `tf.Variable`, or a `ShardedVariable` of
      several shards; and to `DividedNumbers`.
    """
    num_buckets = vocabulary.num_buckets
    buckets = bucket_layout.segment_partition(num_buckets, len(devices)).sizes
    per_segment = num_buckets // bucket_layout.num_segments(num_buckets)
    segments = [size // per_segment for size in buckets]

    def by_shard(
        name: str,
        sizes: Sequence[int],
        row_shape: Sequence[int],
        value: int,
        dtype: tf.DType,
    ) -> list[tf.Variable]:
        shards = []
        for shard, (size, device) in enumerate(zip(sizes, devices)):
            with tf.device(device):  # What fills it, too: nothing is sent.
                shards.append(
                    _tf_private.ResourceVariable(
                        tf.fill([size, *row_shape], tf.constant(value, dtype)),
                        trainable=False,
                        name=f"{table}/{name}"
                        + (f"/part_{shard}" if len(devices) > 1 else ""),
                        distribute_strategy=table_variable.strategy_in_scope(),
                    )
                )
        return shards

    def as_one(name: str, *arguments: Any) -> Any:
        shards = by_shard(name, *arguments)
        return (
            shards[0]
            if len(shards) == 1
            else ShardedVariable(shards, name=f"{table}/{name}")
        )

    lanes = [bucket_layout.KEYS_PER_BUCKET]
    variables = {
        state.KEYS: as_one(
            state.KEYS, buckets, lanes, bucket_layout.EMPTY_KEY, tf.int64
        ),
        state.LAST_STEPS: as_one(state.LAST_STEPS, buckets, lanes, 0, tf.int32),
        state.COUNTS: as_one(state.COUNTS, buckets, lanes, 0, tf.int32),
    }
    if vocabulary.has_sketch:
        shape = bucket_layout.sketch_shape(num_buckets)
        variables[state.SKETCH] = as_one(
            state.SKETCH, segments, shape[1:], 0, tf.uint8
        )
        variables[state.SKETCH_SUMS] = as_one(
            state.SKETCH_SUMS, segments, [], 0, tf.int64
        )
    variables[state.NUMBERS] = divided_numbers.DividedNumbers(
        by_shard(
            state.NUMBERS,
            [len(state.NUMBERS_HELD)] * len(devices),
            [],
            0,
            tf.int64,
        )
    )
    return variables
