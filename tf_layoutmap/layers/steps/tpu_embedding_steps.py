"""The steps of a `TPUEmbedding` inside a model, of either Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.api.layer_access import LayerAccess
from tf_layoutmap.embedding.serving import serving_embedding_lookup
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import packed_ids, structure
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.configs import keras_rs_configs
from tf_layoutmap.layers.configs.scheduled_rate import ScheduledRate
from tf_layoutmap.layers.steps import (
    activation_shapes,
    marks,
    watched_tables,
)
from tf_layoutmap.serving import stand_ins


class EmbeddingSteps:
    """What the layers of both Keras share: steps, lookups, shapes.

    Where a tape records, each replica calls `start`, the tape takes the
    gradients, and `apply` hands them to the tables. The engine sums them
    feature by feature, then call by call, then in the order of the replicas,
    whose shares of a batch follow each other: so the tables do not tell how
    many replicas there were.

    On the host a call may be one of several in a step, or one that nothing
    follows: the engine knows it by a token, and its gradients by a mark that
    takes the way of a gradient through tape and optimizer. A TPU knows steps
    by their order only; there each step has one call.
    """

    def __init__(
        self,
        layer: str,
        feature_config: Any,
        optimizer: Any,
        *,
        partitioner: Any,
        out_of_range: str,
        table_dtypes: Any,
        rounding_seed: int,
        vocabularies: Any,
        wire_dtype: str,
        over_processes: str,
        order: str,
    ):
        """Makes the embedding; `build` of it makes the tables.

        Args:
          layer: Name of the layer, for messages and step names.
          feature_config: As of `tlm.TPUEmbedding`, like all that follow; or
            of keras-rs' configs.
          optimizer: Of tables that bring none.
          partitioner: Cuts tables into shards.
          out_of_range: What becomes of ids that are no row.
          table_dtypes: How rows are stored.
          rounding_seed: Of tables with 16-bit rows.
          vocabularies: Of tables that take ids as they come.
          wire_dtype: How rows and gradients go to servers and back.
          over_processes: How several processes keep the tables.
          order: How the gradients of divided tables are summed.
        """
        self._layer = layer
        feature_config = keras_rs_configs.read(feature_config)
        optimizer = keras_rs_configs.read_optimizer(
            optimizer, f"(layer {layer!r})"
        )
        self.feature_config = feature_config
        self.optimizer = optimizer
        self.out_of_range = out_of_range
        self.embedding = TPUEmbedding(
            feature_config,
            optimizer,
            partitioner=partitioner,
            out_of_range=out_of_range,
            table_dtypes=table_dtypes,
            rounding_seed=rounding_seed,
            vocabularies=vocabularies,
            wire_dtype=wire_dtype,
            over_processes=over_processes,
            order=order,
        )
        self.rounding_seed = rounding_seed
        self.access = LayerAccess(self.embedding)
        self._schedules = [
            table.optimizer.learning_rate
            for table in self.spec.tables
            if table.optimizer is not None
            and isinstance(table.optimizer.learning_rate, ScheduledRate)
        ]
        if self._schedules and self.is_on_tpu:
            raise ValueError(
                "The learning rate of a table on a TPU must be a number or a "
                "callable without arguments; a schedule is for the host "
                f"engine. Received: {self._schedules[0].schedule!r} (layer "
                f"{layer!r})."
            )
        # Of a TPU, by replica: the call that a tape may ask for gradients,
        # and these.
        self._latest_call: dict[int, object] = {}
        self._gradients: dict[int, tuple[tf.Tensor, ...]] = {}

    @property
    def is_on_tpu(self) -> bool:
        """Whether the tables are on a TPU, or an emulated one."""
        return self.access.is_on_tpu

    def build(self):
        """Makes the tables; on a TPU the first step does, from its sizes."""
        if self.is_on_tpu:
            return
        self.embedding.build()
        if not self._schedules:
            return
        with tf.init_scope(), tf.device(self.access.variable_device):
            # Of no strategy: one for all replicas. An attribute of the
            # embedding, so that checkpoints have it.
            self.embedding.schedule_updates = _tf_private.ResourceVariable(
                tf.constant(0, tf.int64),
                trainable=False,
                name="schedule_updates",
            )
        for schedule in self._schedules:
            schedule.updates = self.embedding.schedule_updates

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        return self._layer

    @property
    def spec(self) -> config.EmbeddingSpec:
        """Its tables and features, of the sizes that they have now."""
        return self.access.spec

    @property
    def table_names(self) -> list[str]:
        """Names of its tables."""
        return [table.name for table in self.spec.tables]

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the weight that takes the marks of gradients."""
        return self.access.mark_shape

    @property
    def variable_device(self) -> str:
        """Where that weight is."""
        return self.access.variable_device

    @property
    def num_replicas(self) -> int:
        """Replicas that take part in each step."""
        return self.access.num_replicas

    def look_up(self, inputs: Any, weights: Any) -> Any:
        """Returns activations by stock ops, outside of any step.

        On a TPU nothing can read its tables but a forward step; and where
        tables are divided among processes, what their owners send.

        Raises:
          RuntimeError: On a TPU and of divided tables, outside of
            `strategy.run`.
        """
        stand_in = stand_ins.of(self.embedding)
        if stand_in is not None:
            return stand_in(*self._cut(*self._unpacked(inputs, weights)))
        if self.is_on_tpu:
            self.access.require_replica("call")
            inputs, weights = self._cut(inputs, weights)
            self.embedding.enqueue(
                inputs, weights, training=False, name=self._layer
            )
            return self.embedding.dequeue(name=self._layer)
        if self.access.is_divided:
            return tf.nest.pack_sequence_as(
                self.feature_config,
                self.access.look_up(*self._cut(inputs, weights)),
            )
        inputs, weights = self._cut(*self._unpacked(inputs, weights))
        watched_tables.watch(self.embedding)
        return serving_embedding_lookup(
            inputs,
            weights,
            self.embedding.embedding_tables,
            self.feature_config,
            out_of_range=self.out_of_range,
            vocabularies=self.embedding.vocabularies,
        )

    def output_shapes(self, inputs: Any) -> list[tuple[int | None, ...]]:
        """Returns the shape of each feature's activations, from its input's."""
        return activation_shapes.of_inputs(
            self.spec, self.feature_config, inputs
        )

    def is_packed(self, inputs: Any) -> bool:
        """Whether it is a packed batch, or what stands for one."""
        return activation_shapes.is_packed(self.feature_config, inputs)

    def zeros(self, inputs: Any) -> Any:
        """Returns zeros in the shape of the activations, without a step."""
        return activation_shapes.zeros(self.spec, self.feature_config, inputs)

    def start(self, step: tf.Tensor, inputs: Any, weights: Any) -> Any:
        """Returns the activations of a new step of the calling replica.

        Args:
          step: A float32 weight of `mark_shape` that the model trains. Its
            gradient is a mark of the call's, or not finite if that of an
            activation is not.
          inputs: Structure of the feature config, as `enqueue` takes it.
          weights: None, or the same structure of weights.

        Raises:
          RuntimeError: If there are several replicas and none is calling, or
            a table has no optimizer.
        """
        replica = self.access.require_replica("call")
        inputs, weights = self._cut(inputs, weights)
        self.access.check_can_train(self._layer)
        if self.is_on_tpu:
            self.embedding.enqueue(inputs, weights, name=self._layer)
            found = tf.nest.flatten(self.embedding.dequeue(name=self._layer))
            follow = self._of_last_call(replica)
        else:
            follow, found = self.access.open(inputs, weights)
        flat = marks.connect(follow, step, found, self.num_replicas)
        return tf.nest.pack_sequence_as(self.feature_config, flat)

    def apply(self, sum_of_marks: tf.Tensor):
        """Lets the tables take a step, when the last replica calls.

        Args:
          sum_of_marks: What came for the weight of `start`, float32 of
            `mark_shape`: a sum of marks, of which each stands for the
            gradients of one call. They are multiplied with its factor in the
            sum.

        Raises:
          RuntimeError: If none were taken.
          ValueError: If the tables are on a TPU, and this is a branch that
            not every step takes.
        """
        if not self.is_on_tpu:
            self.access.apply_marks(sum_of_marks)
            if self._schedules and self.access.is_last_here(
                self.access.require_replica("apply")
            ):
                self.embedding.schedule_updates.assign_add(1)
            return
        if not self.access.is_in_program():
            raise ValueError(
                "The model's optimizer must be applied in every step on a "
                "TPU, which waits for the gradients: a loss scale, which may "
                'skip one, is not for it; use the policy "mixed_bfloat16" '
                f"(layer {self._layer!r})."
            )
        gradients = self._gradients.pop(
            self.access.require_replica("apply"), None
        )
        if gradients is None:
            raise RuntimeError(
                f"Layer {self._layer!r} has no gradients to apply; call it "
                "inside the tape, once per step."
            )
        self.embedding.apply_gradients(
            tf.nest.pack_sequence_as(
                self.feature_config, [one * sum_of_marks for one in gradients]
            ),
            name=self._layer,
        )

    def _unpacked(self, inputs, weights):
        """Ids and weights in the structure of the feature config."""
        if not self.is_packed(inputs):
            return inputs, weights
        ids, factors = packed_ids.unpack(
            self.spec.features,
            packed_ids.read(inputs, weights, self.feature_config),
        )
        return (
            tf.nest.pack_sequence_as(self.feature_config, ids),
            None
            if weights is None
            else tf.nest.pack_sequence_as(self.feature_config, factors),
        )

    def _cut(self, inputs, weights):
        features = dict(structure.flatten_with_paths(self.feature_config))
        has_limits = any(hasattr(one, "max_ids") for one in features.values())
        if self.is_packed(inputs) and has_limits:
            inputs, weights = self._unpacked(inputs, weights)
        elif self.is_packed(inputs):
            return inputs, weights
        if weights is None and not has_limits:
            return inputs, weights
        pairs = [
            keras_rs_configs.cut(features.get(path), ids, weight)
            for (path, ids), weight in zip(
                structure.flatten_with_paths(inputs),
                structure.flatten_weights(weights, inputs, like="inputs"),
            )
        ]
        flat, flat_weights = zip(*pairs)
        return (
            tf.nest.pack_sequence_as(inputs, flat),
            None
            if weights is None
            else tf.nest.pack_sequence_as(inputs, flat_weights),
        )

    def _of_last_call(self, replica):
        """What keeps the gradients of a TPU's step until it is applied."""
        this_call = self._latest_call[replica] = object()

        def follow(gradients):
            if this_call is not self._latest_call[replica]:
                raise RuntimeError(
                    f"Layer {self._layer!r} must be called once in a "
                    "training step on a TPU; give it the features of both "
                    "calls under names of their own."
                )
            self._gradients[replica] = gradients
            return tf.ones([])

        return follow
