"""What is refused with the number of the process that it comes from.

All processes have the ids of all replicas, so each finds the same error; the
engine's own message knows the feature and not whose it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs
from tf_layoutmap.embedding.variables import tables


def check_ids(
    spec: config.EmbeddingSpec,
    features: Sequence[feature_inputs.FeatureIds],
    process: int,
) -> list[tf.Operation]:
    """Returns checks that ids of a process are rows of their tables.

    Those of tables with open vocabularies are keys, and any will do.

    Args:
      spec: Tables and features.
      features: What a replica of that process looks up.
      process: Its number.
    """
    checks = []
    for feature, inputs in zip(spec.features, features):
        if spec.table_of(feature).vocabulary is not None:
            continue
        num_rows = spec.table_of(feature).num_rows
        ids = tf.cast(inputs.ids, tf.int64)
        is_bad = (ids < 0) | (ids >= num_rows)
        # Without a bad id it is the first one, and the sentence is not used.
        first = tf.argmax(tf.concat([is_bad, [True]], 0))
        # There may be no id at all.
        which = tf.gather(tf.concat([ids, [0]], 0), first)
        checks.append(
            tf.debugging.Assert(
                ~tf.reduce_any(is_bad),
                [
                    tf.strings.join(
                        [
                            f"Process {process}: feature {feature.name}, "
                            "sample ",
                            tf.strings.as_string(_sample_of(inputs, first)),
                            ": id ",
                            tf.strings.as_string(which),
                            f" is outside table {spec.table_of(feature).name} "
                            f"with {num_rows} rows",
                        ]
                    )
                ],
            )
        )
    return [one for one in checks if one is not None]


def check_modes(
    modes: Sequence[tf.Tensor],
    num_local: int,
) -> list[tf.Operation]:
    """Returns a check that all replicas train, or none does.

    The engine sees the batches of all replicas as one where tables have open
    vocabularies.

    Args:
      modes: Of each replica, whether gradients follow.
      num_local: Replicas of each process.
    """
    values = tf.stack(modes)
    other = tf.argmax(values != values[0])
    check = tf.debugging.Assert(
        ~tf.reduce_any(values != values[0]),
        [
            tf.strings.join(
                [
                    "All replicas must enqueue a step with the same "
                    "`training`. Process 0 has ",
                    tf.strings.as_string(values[0]),
                    ", process ",
                    tf.strings.as_string(other // num_local),
                    " ",
                    tf.strings.as_string(tf.gather(values, other)),
                    ".",
                ]
            )
        ],
    )
    return [] if check is None else [check]


def _sample_of(
    inputs: feature_inputs.FeatureIds, index: tf.Tensor
) -> tf.Tensor:
    """Returns the sample of an id, by its position among the ids."""
    splits = tf.cast(inputs.splits, tf.int64)
    if splits.shape.rank == 2:  # Indices of a sparse tensor.
        return tf.gather(tf.concat([splits[:, 0], [0]], 0), index)
    if splits.shape[0] == 0:  # Dense.
        num_ids = tf.maximum(tf.size(inputs.ids, tf.int64), 1)
        return index * tf.cast(inputs.num_samples, tf.int64) // num_ids
    return (
        tf.searchsorted(
            splits, index[tf.newaxis], side="right", out_type=tf.int64
        )[0]
        - 1
    )


class RestoreCounter:
    """How often the tables of this process were restored.

    A process that restores alone has other rows than the others from then on.
    """

    def __init__(self):
        with tf.init_scope(), tf.device(tables.HOST):
            # One of this process, whatever the strategy.
            self._count = _tf_private.ResourceVariable(
                0, dtype=tf.int64, trainable=False, name="num_restores"
            )

    def add_one(self):
        """Counts a restore."""
        self._count.assign_add(1)

    def value(self) -> tf.Tensor:
        """Returns the count, as a step reads it."""
        return self._count.read_value()


def check_restores(
    counts: tf.Tensor,
    num_local: int,
) -> list[tf.Operation]:
    """Returns a check that all replicas tell the same number of restores.

    Args:
      counts: `[num_replicas]` int64.
      num_local: Replicas of each process.
    """
    is_other = counts != counts[0]
    other = tf.argmax(is_other)
    text = tf.strings.as_string
    check = tf.debugging.Assert(
        ~tf.reduce_any(is_other),
        [
            tf.strings.join(
                [
                    "A checkpoint must be restored in all processes, or their "
                    "tables differ. Process 0 has restored ",
                    text(counts[0]),
                    " times, process ",
                    text(other // num_local),
                    " ",
                    text(tf.gather(counts, other)),
                    " times.",
                ]
            )
        ],
    )
    return [] if check is None else [check]
