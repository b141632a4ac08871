"""Refuses ids that are no row of their table, before they reach a TPU.

A TPU keeps ids in 32 bits and says nothing of what it does with one that is
out of range. Outside of `strategy.run` ids are on the host, where they can be
checked for the price of reading them once.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap.embedding.spec import config

# Under which its operations are found in a graph.
SCOPE = "tf_layoutmap_id_check"


def check_ids(spec: config.EmbeddingSpec, ids: Sequence[tf.Tensor]) -> list:
    """Returns operations that fail on an id outside its table.

    Args:
      spec: Tables and features.
      ids: `[num_ids]` int64 of each feature.

    Raises:
      tf.errors.InvalidArgumentError: Of eager ids.
    """
    checks = []
    with tf.name_scope(SCOPE):
        for feature, one in zip(spec.features, ids):
            table = spec.table_of(feature)
            lowest, highest = tf.reduce_min(one), tf.reduce_max(one)
            # Of no ids the lowest is the largest int64.
            is_inside = tf.logical_or(
                tf.equal(tf.size(one), 0),
                tf.logical_and(lowest >= 0, highest < table.num_rows),
            )
            # The raw op: tf.debugging.Assert would put a branch around it,
            # which waits for every stateful operation before it.
            checks.append(
                tf.raw_ops.Assert(
                    condition=is_inside,
                    data=[
                        f"Feature {feature.name!r}: ids must be in [0, "
                        f"{table.num_rows}), the rows of table {table.name!r}. "
                        "Received ids from",
                        lowest,
                        "to",
                        highest,
                    ],
                    summarize=3,
                )
            )
    return [one for one in checks if one is not None]
