"""The steps of a `TPUEmbedding` inside a model, of either Keras."""

# DOC-MERGE: Marks, which stand for the gradients of a lookup in tape and optimizer.
# DOC-MERGE: What a weight that takes marks tells of a step that is really taken.
# DOC-MERGE: Errors for tables that get no gradient, or no values, from Keras.
# DOC-MERGE: The shapes of activations, known from those of the inputs.
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import packing
from tf_layoutmap.embedding.serving import serving_embedding_lookup
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.base import keras_rs_configs
from tf_layoutmap.layers.base import tables as base_tables
from tf_layoutmap.layers.base.keras_rs_configs import ScheduledRate
from tf_layoutmap.serving import report

Shape = tuple[int | None, ...]


def activation_shapes(
    spec: config.EmbeddingSpec, feature_config: Any, inputs: Any
) -> list[Shape]:
    """Returns the shape of each feature's activations.

    Nothing is computed: a step must not be enqueued for it.

    Args:
      spec: Tables and features.
      feature_config: Nested structure of features.
      inputs: Its structure, of what has a `shape`: `[num_samples]` or `[...,
        ids per sample]`; or a packed batch.

    Raises:
      TypeError, ValueError: The structures differ.
    """
    if has_packed_ids(feature_config, inputs):
        # Each feature has its samples.
        return [
            _of_input(spec, feature, (inputs.shape[0], None))
            for feature in spec.features
        ]
    embedding_inputs.check_same_structure(
        inputs, "inputs", feature_config, "feature_config"
    )
    return [
        _of_input(spec, feature, tuple(value.shape))
        for feature, value in zip(spec.features, tf.nest.flatten(inputs))
    ]


def zero_activations(
    spec: config.EmbeddingSpec, feature_config: Any, inputs: Any
) -> Any:
    """Returns zeros in the shape of the activations, without a step.

    Args:
      spec: Tables and features.
      feature_config: Nested structure of features.
      inputs: Its structure of dense, sparse or ragged ids, or a packed batch.

    Returns:
      Structure of `feature_config` with float32 tensors.
    """
    shapes = activation_shapes(spec, feature_config, inputs)
    values = tf.nest.flatten(inputs)
    if has_packed_ids(feature_config, inputs):
        values *= len(shapes)
    return tf.nest.pack_sequence_as(
        feature_config,
        [
            tf.zeros(
                [
                    _size(value, axis) if size is None else size
                    for axis, size in enumerate(shape)
                ]
            )
            for shape, value in zip(shapes, values)
        ],
    )


def has_packed_ids(feature_config: Any, inputs: Any) -> bool:
    """Whether an input is a packed batch, or what stands for one."""
    return packing.is_packed(inputs, feature_config) or (
        tf.nest.is_nested(feature_config)
        and not tf.nest.is_nested(inputs)
        and not isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor))
        and len(getattr(inputs, "shape", ())) == 2
    )


def _of_input(
    spec: config.EmbeddingSpec, feature: config.FeatureSpec, shape: Shape
) -> Shape:
    dim = spec.table_of(feature).dim
    if feature.output_shape is not None:
        return (*feature.output_shape, dim)
    samples = shape[: max(len(shape) - 1, 1)]
    positions = [feature.max_sequence_length] * feature.is_sequence
    return (*samples, *positions, dim)


def _size(value: Any, axis: int) -> tf.Tensor:
    """A size that is only known at run time, of any form of input."""
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[axis], tf.int32)
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.bounding_shape(axis), tf.int32)
    return tf.shape(value)[axis]


def may_be_recorded(weight: tf.Variable, training: Any) -> bool:
    """Whether a call is one that gradients may follow.

    Args:
      weight: Takes the marks.
      training: Of the call. What counts is whether a tape records, as for any
        other weight; a true value says that one will, where a `tf.function`
        is traced before.
    """
    if training:
        return True
    # `tf.recompute_grad` asks for the gradients of what its first run uses,
    # where no tape records.
    tf_private.variable_accessed(weight)
    return tf_private.could_possibly_record() and (
        tf_private.should_record_backprop([tf.convert_to_tensor(weight)])
    )


def connect_mark(
    follow: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    step: tf.Tensor,
    activations: Sequence[tf.Tensor],
    num_replicas: int,
) -> list[tf.Tensor]:
    """Returns the activations as something that depends on the step.

    Args:
      follow: Takes their gradients, and returns the mark of these, a float32
        tensor of the shape of `step`.
      step: Value of the weight that takes the marks, float32.
      activations: Of one lookup, one per feature.
      num_replicas: Replicas of the strategy.

    Returns:
      The same activations. The gradient of `step` is the mark, or not finite
      where a gradient is not.
    """

    @tf.custom_gradient
    def connected(step, *activations):
        def gradient(*gradients):
            gradients = [tf.convert_to_tensor(one) for one in gradients]
            mark = follow(gradients)
            one_or_nan = _mean_of_replicas(
                1 + tf.add_n([tf.reduce_sum(one * 0) for one in gradients]),
                num_replicas,
            )
            mark = tf.where(mark == 0, 0.0, mark * one_or_nan)
            return mark, *[None] * len(gradients)

        return [tf.identity(one) for one in activations], gradient

    activated: Any = connected(step, *activations)
    return activated


def _mean_of_replicas(value: tf.Tensor, num_replicas: int) -> tf.Tensor:
    """The mean over replicas, so that they take the step or none does.

    Keras looks for overflows in the first replica's gradients only.
    """
    if num_replicas == 1:
        return value
    return (
        tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, value
        )
        / num_replicas
    )


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
            self.embedding.schedule_updates = tf_private.ResourceVariable(
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
        stand_in = report.placeholder_of(self.embedding)
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
        base_tables.watch_table(self.embedding)
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
        return activation_shapes(self.spec, self.feature_config, inputs)

    def is_packed(self, inputs: Any) -> bool:
        """Whether it is a packed batch, or what stands for one."""
        return has_packed_ids(self.feature_config, inputs)

    def zeros(self, inputs: Any) -> Any:
        """Returns zeros in the shape of the activations, without a step."""
        return zero_activations(self.spec, self.feature_config, inputs)

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
        flat = connect_mark(follow, step, found, self.num_replicas)
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
        ids, factors = packing.unpack_ids(
            self.spec.features,
            packing.read_packed(inputs, weights, self.feature_config),
        )
        return (
            tf.nest.pack_sequence_as(self.feature_config, ids),
            None
            if weights is None
            else tf.nest.pack_sequence_as(self.feature_config, factors),
        )

    def _cut(self, inputs, weights):
        features = dict(
            embedding_inputs.flatten_with_paths(self.feature_config)
        )
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
                embedding_inputs.flatten_with_paths(inputs),
                embedding_inputs.flatten_weights(
                    weights, inputs, like="inputs"
                ),
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


class StepTaker(Protocol):
    """The tables of one layer, whose gradients an engine keeps."""

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        ...

    @property
    def table_names(self) -> list[str]:
        """Names of its tables; none if the layer is the table."""
        ...

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the weight that takes the marks of gradients."""
        ...

    @property
    def variable_device(self) -> str:
        """Where that weight is."""
        ...

    @property
    def num_replicas(self) -> int:
        """Replicas that take part in each step."""
        ...

    def apply(self, sum_of_marks: tf.Tensor) -> None:
        """Lets the tables take a step with what came for the weight."""


def missing_gradient_message(layer: str, tables: Sequence[str]) -> str:
    """Returns why a table got no gradient, and what to do about it.

    Keras only warns of a weight without a gradient, and trains the others.

    Args:
      layer: Name of the layer, or path of its weight.
      tables: Names of its tables; none if the layer is the table.
    """
    what = f"Layer {layer!r}" + (
        f" (tables {', '.join(map(repr, tables))})" if tables else ""
    )
    traced = " (call the layer there with training=True)" * bool(tables)
    return (
        f"{what} got no gradient in this training step, so its tables would "
        "not be trained. Likely causes: the layer was not called in this "
        "step, or outside of the `tf.GradientTape`; the loss does not depend "
        "on its output, or only through `tf.stop_gradient` or an operation "
        "without a gradient; or it was called in a `tf.function` that was "
        f"first called outside of the tape{traced}. For a step without this "
        "layer leave its weight out of what the optimizer is given; for tables "
        "that are not to be trained set `trainable = False` of the layer "
        "before `compile`."
    )


def tables_are_not_weights(layer: str) -> str:
    """Returns why `set_weights` is refused, and what to do instead."""
    return (
        f"The tables of layer {layer!r} are no weights of Keras: `get_weights` "
        "has not got them, so `set_weights`, and EarlyStopping with "
        "restore_best_weights=True, would leave them as they are. Use "
        "`save_weights` and `load_weights`, or ModelCheckpoint."
    )
