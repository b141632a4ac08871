"""Creates the variables of an open vocabulary."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.variables import table_variable
from tf_layoutmap.sharded import ShardedVariable, new_rows
from tf_layoutmap.vocabulary import bucket_layout, state
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary


def create_variables(
    vocabulary: OpenVocabulary,
    table: str,
    num_shards: int,
) -> dict[str, Any]:
    """Creates the variables of a vocabulary without keys.

    Args:
      vocabulary: Its settings.
      table: The name of its table.
      num_shards: How many the table is cut into; each has whole buckets.

    Returns:
      From `state.KEYS` and so on to a `tf.Variable`, or a `ShardedVariable` of
      several shards. Keys, steps and counts are `[num_buckets, 8]`.
    """
    cut = bucket_layout.bucket_partition(vocabulary.num_buckets, num_shards)

    def by_bucket(name, value, dtype):
        shards = [
            # Buckets are read at random, as rows are.
            _variable(
                new_rows.fill(
                    (size, bucket_layout.KEYS_PER_BUCKET), value, dtype
                ),
                f"{table}/{name}"
                + (f"/part_{shard}" if num_shards > 1 else ""),
            )
            for shard, size in enumerate(cut.sizes)
        ]
        return (
            shards[0]
            if num_shards == 1
            else ShardedVariable(shards, name=f"{table}/{name}")
        )

    variables = {
        state.KEYS: by_bucket(state.KEYS, bucket_layout.EMPTY_KEY, tf.int64),
        state.LAST_STEPS: by_bucket(state.LAST_STEPS, 0, tf.int32),
        state.COUNTS: by_bucket(state.COUNTS, 0, tf.int32),
    }
    if vocabulary.has_sketch:
        shape = bucket_layout.sketch_shape(vocabulary.num_buckets)
        variables[state.SKETCH] = _variable(
            tf.zeros(shape, tf.uint8), f"{table}/{state.SKETCH}"
        )
        variables[state.SKETCH_SUMS] = _variable(
            tf.zeros(shape[:1], tf.int64), f"{table}/{state.SKETCH_SUMS}"
        )
    variables[state.NUMBERS] = _variable(
        tf.zeros([len(state.NUMBERS_HELD)], tf.int64),
        f"{table}/{state.NUMBERS}",
    )
    return variables


def _variable(value: tf.Tensor, name: str) -> tf.Variable:
    return _tf_private.ResourceVariable(
        value,
        trainable=False,
        name=name,
        distribute_strategy=table_variable.strategy_in_scope(),
    )
