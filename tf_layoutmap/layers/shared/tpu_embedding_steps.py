"""The steps of a `TPUEmbedding` inside a model, of either Keras."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.host import engine as host_engine
from tf_layoutmap.embedding.serving import serving_embedding_lookup
from tf_layoutmap.embedding.step import structure
from tf_layoutmap.embedding.tpu import replicate_context
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.configs import keras_rs_configs
from tf_layoutmap.layers.configs.scheduled_rate import ScheduledRate
from tf_layoutmap.layers.shared.host_table import HOST


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

    def __init__(self, layer: str, feature_config: Any, optimizer: Any, *,
                 partitioner: Any, out_of_range: str, table_dtypes: Any,
                 rounding_seed: int):
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
        """
        self._layer = layer
        feature_config = keras_rs_configs.read(feature_config)
        optimizer = keras_rs_configs.read_optimizer(
            optimizer, f"(layer {layer!r})")
        self.feature_config = feature_config
        self.optimizer = optimizer
        self.out_of_range = out_of_range
        self.embedding = TPUEmbedding(
            feature_config, optimizer, partitioner=partitioner,
            out_of_range=out_of_range, table_dtypes=table_dtypes,
            rounding_seed=rounding_seed)
        self.rounding_seed = rounding_seed
        self.spec = self.embedding._state.spec
        self._schedules = [
            table.optimizer.learning_rate for table in self.spec.tables
            if table.optimizer is not None and isinstance(
                table.optimizer.learning_rate, ScheduledRate)]
        if self._schedules and self.is_on_tpu:
            raise ValueError(
                "The learning rate of a table on a TPU must be a number or a "
                "callable without arguments; a schedule is for the host "
                f"engine. Received: {self._schedules[0].schedule!r} (layer "
                f"{layer!r}).")
        # Of a TPU, by replica: the call that a tape may ask for gradients,
        # and these.
        self._latest_call: dict[int, object] = {}
        self._gradients: dict[int, tuple[tf.Tensor, ...]] = {}

    @property
    def is_on_tpu(self) -> bool:
        """Whether the tables are on a TPU, or an emulated one."""
        return self.embedding._state.backend.is_on_tpu

    def build(self):
        """Makes the tables; on a TPU the first step does, from its sizes."""
        if self.is_on_tpu:
            return
        self.embedding.build()
        if not self._schedules:
            return
        with tf.init_scope(), tf.device(HOST):
            # Of no strategy: one for all replicas. An attribute of the
            # embedding, so that checkpoints have it.
            self.embedding.schedule_updates = _tf_private.ResourceVariable(
                tf.constant(0, tf.int64), trainable=False,
                name="schedule_updates")
        for schedule in self._schedules:
            schedule.updates = self.embedding.schedule_updates

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        return self._layer

    @property
    def table_names(self) -> list[str]:
        """Names of its tables."""
        return [table.name for table in self.spec.tables]

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the weight that takes the marks of gradients."""
        return () if self.is_on_tpu else host_engine.MARK_SHAPE

    def trains(self, weight: tf.Variable, training: Any) -> bool:
        """Whether a call is one that gradients may follow.

        Args:
          weight: Takes the marks.
          training: Of the call. What counts is whether a tape records, as for
            any other weight; a true value says that one will, where a
            `tf.function` is traced before.
        """
        if training:
            return True
        # `tf.recompute_grad` asks for the gradients of what its first run
        # uses, where no tape records.
        _tf_private.variable_accessed(weight)
        return _tf_private.could_possibly_record() and (
            _tf_private.should_record_backprop(
                [tf.convert_to_tensor(weight)]))

    @property
    def num_replicas(self) -> int:
        """Replicas that take part in each step."""
        return self.embedding._state.replicas.num_replicas

    def look_up(self, inputs: Any, weights: Any) -> Any:
        """Returns activations by stock ops, outside of any step.

        On a TPU nothing can read its tables but a forward step.

        Raises:
          RuntimeError: On a TPU, outside of `strategy.run`.
        """
        inputs, weights = self._cut(inputs, weights)
        if self.is_on_tpu:
            self._replica("call")
            self.embedding.enqueue(
                inputs, weights, training=False, name=self._layer)
            return self.embedding.dequeue(name=self._layer)
        return serving_embedding_lookup(
            inputs, weights, self.embedding.embedding_tables,
            self.feature_config, out_of_range=self.out_of_range)

    def zeros(self, inputs: Any) -> Any:
        """Returns what has the shape of the activations, without a step."""
        return tf.nest.pack_sequence_as(self.feature_config, [
            tf.zeros([_size(value, axis) if size is None else size
                      for axis, size in enumerate(shape)])
            for shape, value in zip(
                self.output_shapes(inputs), tf.nest.flatten(inputs))])

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
        replica = self._replica("call")
        inputs, weights = self._cut(inputs, weights)
        state = self.embedding._state
        state.check_can_step("call")
        state.check_optimizers("call in a training step")
        if self.is_on_tpu:
            self.embedding.enqueue(inputs, weights, name=self._layer)
            found = tf.nest.flatten(self.embedding.dequeue(name=self._layer))
            take = self._of_last_call(replica)
        else:
            lookup, found = state.backend.open(inputs, weights)
            take = functools.partial(state.backend.follow, lookup)
        flat = self._connect(take, step, *found)
        return tf.nest.pack_sequence_as(self.feature_config, flat)

    def apply(self, marks: tf.Tensor):
        """Lets the tables take a step, when the last replica calls.

        Args:
          marks: What came for the weight of `start`: a sum of marks, of which
            each stands for the gradients of one call. They are multiplied
            with its factor in the sum.

        Raises:
          RuntimeError: If none were taken.
          ValueError: If the tables are on a TPU, and this is a branch that
            not every step takes.
        """
        if not self.is_on_tpu:
            self.embedding._state.backend.apply_followed(marks)
            if self._schedules and (
                    self.embedding._state.replicas.is_last_here(
                        self._replica("apply"))):
                self.embedding.schedule_updates.assign_add(1)
            return
        if not self._is_in_program():
            raise ValueError(
                "The model's optimizer must be applied in every step on a "
                "TPU, which waits for the gradients: a loss scale, which may "
                "skip one, is not for it; use the policy \"mixed_bfloat16\" "
                f"(layer {self._layer!r}).")
        gradients = self._gradients.pop(self._replica("apply"), None)
        if gradients is None:
            raise RuntimeError(
                f"Layer {self._layer!r} has no gradients to apply; call it "
                "inside the tape, once per step.")
        self.embedding.apply_gradients(
            tf.nest.pack_sequence_as(
                self.feature_config, [one * marks for one in gradients]),
            name=self._layer)

    def _is_in_program(self) -> bool:
        try:
            return replicate_context.is_in_tpu_program()
        except RuntimeError:
            return False

    def output_shapes(self, inputs: Any) -> list[tuple[int | None, ...]]:
        """Returns the shape of each feature's activations, from its input's.

        Nothing is computed: a step must not be enqueued for it.

        Args:
          inputs: Structure of the feature config of what has a `shape`.
        """
        structure.check_same(
            inputs, "inputs", self.feature_config, "feature_config")
        return [self._output_shape(feature, tuple(value.shape))
                for feature, value in zip(
                    self.spec.features, tf.nest.flatten(inputs))]

    def _cut(self, inputs, weights):
        features = dict(structure.flatten_with_paths(self.feature_config))
        if weights is None and not any(
                hasattr(one, "max_ids") for one in features.values()):
            return inputs, weights
        pairs = [
            keras_rs_configs.cut(features.get(path), ids, weight)
            for (path, ids), weight in zip(
                structure.flatten_with_paths(inputs),
                structure.flatten_weights(weights, inputs, like="inputs"))]
        flat, flat_weights = zip(*pairs)
        return (tf.nest.pack_sequence_as(inputs, flat),
                None if weights is None else
                tf.nest.pack_sequence_as(inputs, flat_weights))

    def _replica(self, method: str) -> int:
        return self.embedding._state.replicas.require_current(method)

    def _of_last_call(self, replica):
        """What keeps the gradients of a TPU's step until it is applied."""
        this_call = self._latest_call[replica] = object()

        def take(gradients):
            if this_call is not self._latest_call[replica]:
                raise RuntimeError(
                    f"Layer {self._layer!r} must be called once in a "
                    "training step on a TPU; give it the features of both "
                    "calls under names of their own.")
            self._gradients[replica] = gradients
            return tf.ones([])

        return take

    def _connect(self, take, step, *activations):
        """The activations, as something that depends on the step."""
        @tf.custom_gradient
        def connected(step, *activations):
            def gradient(*gradients):
                gradients = [tf.convert_to_tensor(one) for one in gradients]
                mark = take(gradients)
                one_or_nan = self._of_all(1 + tf.add_n([
                    tf.reduce_sum(one * 0) for one in gradients]))
                mark = tf.where(mark == 0, 0.0, mark * one_or_nan)
                return mark, *[None] * len(gradients)

            return [tf.identity(one) for one in activations], gradient

        return connected(step, *activations)

    def _of_all(self, value):
        """The mean over replicas, so that they take the step or none does.

        Keras looks for overflows in the first replica's gradients only.
        """
        if self.num_replicas == 1:
            return value
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, value) / self.num_replicas

    def _output_shape(self, feature, shape):
        dim = self.spec.table_of(feature).dim
        if feature.output_shape is not None:
            return (*feature.output_shape, dim)
        samples = shape[:max(len(shape) - 1, 1)]
        positions = [feature.max_sequence_length] * feature.is_sequence
        return (*samples, *positions, dim)


def _size(value: Any, axis: int) -> tf.Tensor:
    """A size that is only known at run time, of any form of input."""
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[axis], tf.int32)
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.bounding_shape(axis), tf.int32)
    return tf.shape(value)[axis]
