"""The batches of all replicas, brought together by a replica that calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.step.feature_inputs import FeatureIds

# The parts of `FeatureIds` that are tensors.
_TENSORS = ("ids", "splits", "num_samples", "weights")


def merged(
    strategy: tf.distribute.Strategy,
    features: Sequence[FeatureIds],
    work: Callable[[list[list[FeatureIds]], Any], Any],
    argument: Any,
) -> None:
    """Calls `work` once, with what each replica has called this with.

    Args:
      strategy: Whose replicas call.
      features: The batch of the calling replica.
      work: Takes the batches by replica, and the argument.
      argument: A bool or a bool tensor that is the same for all replicas.

    Raises:
      RuntimeError: If called in a tf.function or a condition inside of what
        `strategy.run` was given, where replicas cannot meet.
    """
    tensors = [
        [tf.convert_to_tensor(getattr(one, part)) for part in _TENSORS]
        for one in features
    ]

    def work_on_all(_, tensors, argument):
        # A replica's own values come back for each tensor, in its order.
        by_replica = [
            strategy.experimental_local_results(leaf)
            for leaf in tf.nest.flatten(tensors)
        ]
        arguments = strategy.experimental_local_results(argument)
        found = []
        for replica in range(strategy.num_replicas_in_sync):
            parts = tf.nest.pack_sequence_as(
                tensors, [leaf[replica] for leaf in by_replica]
            )
            found.append(
                [
                    dataclasses.replace(one, **dict(zip(_TENSORS, part)))
                    for one, part in zip(features, parts)
                ]
            )
        work(found, arguments[0])

    tf.distribute.get_replica_context().merge_call(
        work_on_all, args=(tensors, tf.convert_to_tensor(argument, tf.bool))
    )
