"""Reads the input of a step for the cores of a TPU, and checks it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import packed_ids, replicas, structure
from tf_layoutmap.embedding.tpu import (
    cores,
    enqueue_lists,
    replicate_context,
)
from tf_layoutmap.embedding.tpu import shapes as tpu_shapes

Inputs = list[Any] | packed_ids.PackedIds
Step = tuple[Inputs, list[Any] | None]


@dataclasses.dataclass(frozen=True)
class Batch:
    """What is enqueued on the cores.

    Attributes:
      steps: Flat inputs and weights of each replica; or a packed batch, and
        None.
      device: The core whose step it is, if the caller says so.
      in_program: Whether a TPU's program enqueues it.
    """

    steps: list[Step]
    device: str | None
    in_program: bool


class BatchReader:
    """Reads batches of one embedding."""

    def __init__(
        self,
        feature_config: Any,
        features: Sequence[config.FeatureSpec],
        strategy_replicas: replicas.Replicas,
        strategy_cores: cores.Cores,
        shapes: tpu_shapes.OutputShapes,
    ):
        """Takes what the batches must fit.

        Args:
          feature_config: Nested structure of features.
          features: The same, flat.
          strategy_replicas: Those of the strategy.
          strategy_cores: Its cores.
          shapes: Of the activations, as far as they are known.
        """
        self._feature_config = feature_config
        self._features = features
        self._replicas = strategy_replicas
        self._cores = strategy_cores
        self._shapes = shapes

    def read(
        self,
        features: Any,
        weights: Any,
        device: str | None,
        *,
        checks_shapes: bool,
        settles_shapes: bool,
    ) -> Batch:
        """Returns a batch that can be enqueued.

        Args:
          features: Structure of the feature config with ids, or a packed
            batch.
          weights: None, or the same structure with None or weights.
          device: The core whose step it is, or None.
          checks_shapes: Whether shapes are compared with those known.
          settles_shapes: Whether those that are not known are taken from it.

        Raises:
          TypeError: Structures differ in types, or ids are not integers.
          ValueError: Structures, sizes, ranks or weights do not match.
        """
        is_packed = self._is_packed(features)
        if not is_packed:
            structure.check_same(
                features, "features", self._feature_config, "feature_config"
            )
            if weights is not None:
                structure.check_same(
                    weights, "weights", self._feature_config, "feature_config"
                )
        in_program = replicate_context.is_in_tpu_program()
        steps = self._split(features, weights, device, in_program)
        if checks_shapes:
            self._check_shapes(
                [values for values, _ in steps], device is None, settles_shapes
            )
        for values, given in steps:
            named = self._named_tensors(values)
            replicate_context.check_on_host(named)
            if in_program:
                replicate_context.check_direct_inputs(named)
            if given is None or isinstance(values, packed_ids.PackedIds):
                continue
            for feature, value, weight in zip(self._features, values, given):
                enqueue_lists.check_weight(feature, value, weight)
        return Batch(steps, device, in_program)

    def _is_packed(self, features):
        """Whether it is a packed batch, or one for each replica."""
        return not tf.nest.is_nested(features) and all(
            packed_ids.is_packed(one, self._feature_config)
            for one in self._replicas.strategy.experimental_local_results(
                features
            )
        )

    def _named_tensors(self, values: Inputs) -> list[tuple[str, Any]]:
        if isinstance(values, packed_ids.PackedIds):
            return [("packed", values.given)]
        return [
            (feature.name, value)
            for feature, value in zip(self._features, values)
        ]

    def _split(self, features, weights, device, in_program) -> list[Step]:
        """Flat inputs and weights of each replica that enqueues here."""
        if in_program or device is not None:
            if in_program and device is not None:
                raise ValueError(
                    "Argument `device` must be None inside `strategy.run`. "
                    f"Received: device={device!r}."
                )
            steps = [(features, weights)]
        else:
            steps = zip(
                self._replicas.split(features, "features"),
                self._replicas.split(weights, "weights"),
            )
        return [self._flatten(*step) for step in steps]

    def _flatten(self, features, weights) -> Step:
        if packed_ids.is_packed(features, self._feature_config):
            if self._cores.num_cores_per_replica:
                raise ValueError(
                    "A replica of several cores (SPMD) does not take a packed "
                    "batch: its samples cannot be divided among them. Pass "
                    "the features as tf.SparseTensors."
                )
            return packed_ids.read(
                features, weights, self._feature_config
            ), None
        values = [
            enqueue_lists.convert(feature, value)
            for feature, value in zip(self._features, tf.nest.flatten(features))
        ]
        if self._cores.num_cores_per_replica and any(
            isinstance(one, tf.RaggedTensor) for one in values
        ):
            raise ValueError(
                "A replica of several cores (SPMD) does not take a "
                "tf.RaggedTensor: its samples cannot be divided among them. "
                "Pass `to_sparse()` of it."
            )
        flat_weights = structure.flatten_weights(
            weights, self._feature_config, like="feature_config"
        )
        return values, flat_weights

    def _check_shapes(self, values_of_replicas, is_divided, settles_shapes):
        num_cores = self._cores.num_cores_per_replica if is_divided else None
        for values in values_of_replicas:
            if isinstance(values, packed_ids.PackedIds):
                values = packed_ids.stand_ins(values, len(self._features))
            incoming = [
                tpu_shapes.of_input(feature, value, num_cores)
                for feature, value in zip(self._features, values)
            ]
            if settles_shapes:
                self._shapes.settle(incoming)
            self._shapes.check(
                incoming, [isinstance(one, tf.RaggedTensor) for one in values]
            )
