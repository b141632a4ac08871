"""Reads and checks the batches of a step for the host engine.

`BatchReader` splits distributed inputs by replica, and converts the input of
each feature to ids, splits and weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_layoutmap._core.strategies import on_host
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import packing, replicas
from tf_layoutmap.embedding.host import shapes as host_shapes
from tf_layoutmap.embedding.host.engine import StepInputs
from tf_layoutmap.embedding.steps import check_structures


@dataclasses.dataclass(frozen=True)
class Batch:
    """The inputs of all replicas for which a call enqueues steps.

    Attributes:
      steps: A tuple of the replica index and the checked inputs, for each step.
      unread: Distributed features and weights of which each replica reads and
        checks its values, or None.
    """

    steps: list[tuple[int, StepInputs]]
    unread: tuple[Any, Any] | None = None


class BatchReader:
    """A reader of the batches of one embedding."""

    def __init__(
        self,
        feature_config: Any,
        strategy_replicas: replicas.Replicas,
        shapes: host_shapes.StepShapes,
    ):
        """Creates a reader for batches of the given features.

        Args:
          feature_config: Nested structure of features.
          strategy_replicas: Replicas of the strategy.
          shapes: Known shapes of the steps.
        """
        self._feature_config = feature_config
        self._replicas = strategy_replicas
        self._shapes = shapes

    def read(self, features: Any, weights: Any, device: str | None) -> Batch:
        """Checks the inputs, and returns a batch that can be enqueued.

        Args:
          features: Ids in the structure of the feature config, or a packed
            batch.
          weights: None, or the same structure with None or the weights of the
            ids.
          device: Device of the replica that the step belongs to, or None.

        Raises:
          TypeError: If the structure of `features` or `weights` has other types
            than the feature config, or if ids are not integers.
          ValueError: If a structure, size or rank does not match the feature
            config or the known shapes, or if weights do not match their ids.
        """
        if (
            self._replicas.has_processes
            and device is None
            and tf.distribute.in_cross_replica_context()
        ):
            return Batch([], (features, weights))
        # The caller enqueues a step only after the inputs of all replicas have
        # been checked. Without this order, an error could occur after only some
        # replicas have enqueued the step.
        return Batch(
            [
                (replica, self.read_features(features, weights))
                for replica, features, weights in self._split(
                    features, weights, device
                )
            ]
        )

    def _split(self, features, weights, device):
        """Returns the replica, features and weights of each step."""
        replica = self._replicas.current()
        if device is not None:
            if replica is not None and self._replicas.num_replicas > 1:
                raise ValueError(
                    "Argument `device` must be None inside `strategy.run`. "
                    f"Received: device={device!r}."
                )
            return [(self._replicas.of_device(device), features, weights)]
        if replica is not None:
            return [(replica, features, weights)]
        return list(
            zip(
                range(self._replicas.num_replicas),
                self._replicas.split(features, "features"),
                self._replicas.split(weights, "weights"),
            )
        )

    @on_host
    def read_features(self, features: Any, weights: Any) -> StepInputs:
        """Returns the inputs of one replica, in the order of the features."""
        if packing.is_packed(features, self._feature_config):
            packed = packing.read_packed(
                features, weights, self._feature_config
            )
            if not (
                self._replicas.has_processes or self._shapes.has_open_tables
            ):
                return self._shapes.check_packed(packed)
            # The packed batch is unpacked, because two operations require a
            # separate tensor for each feature: gathering over processes, and
            # assigning rows to keys.
            return self.unpacked_features(packed)
        flat_weights = check_structures(features, weights, self._feature_config)
        return [
            self._shapes.read_input(index, value, weight)
            for index, (value, weight) in enumerate(
                zip(tf.nest.flatten(features), flat_weights)
            )
        ]

    def unpacked_features(
        self, packed: packing.PackedIds
    ) -> list[embedding_inputs.FeatureIds]:
        """Returns a separate input for each feature of a packed batch."""
        ids, factors = packing.unpack_ids(
            self._shapes.samples.features,
            packed,
            self._shapes.has_keys(),
        )
        return [
            self._shapes.read_input(index, *arguments)
            for index, arguments in enumerate(zip(ids, factors))
        ]
