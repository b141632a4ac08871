"""Steps of a `TPUEmbedding` inside a Keras model, for both Keras versions.

The embedding engine, not Keras, holds the tables and their gradients. For
Keras, the layer has one small trainable weight, the mark weight. When the tape
computes gradients, the engine stores the gradients of each lookup. The engine
returns a mark, a number that identifies the stored gradients, and the tape uses
the mark as the gradient of the mark weight. The model's optimizer passes the
sum of the marks to `EmbeddingSteps.apply`, which applies the stored gradients.
The tables are therefore updated if and only if the optimizer's step is applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import (
    function_traces,
    literals,
    ops,
    patches,
    placeholders,
    tf_private,
)
from tf_layoutmap.embedding import backend as embedding_backend
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import packing, serving, stock_lookup
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase, TPUEmbedding
from tf_layoutmap.embedding.v2.tpu_embedding_v2 import TPUEmbeddingV2
from tf_layoutmap.layers import evaluation
from tf_layoutmap.layers.base import (
    activation_shapes,
    keras_rs_configs,
    ordered_steps,
    weight_files,
    weight_gradients,
)
from tf_layoutmap.layers.base import tables as base_tables
from tf_layoutmap.layers.base.keras_rs_configs import ScheduledRate
from tf_layoutmap.layers.base.mark_weights import AccessedTables
from tf_layoutmap.sharded.routing import checks as routing_checks


def may_be_recorded(
    weight: tf.Variable, training: Any, *, adds_keys: bool
) -> bool:
    """Returns whether gradients may be computed for a call.

    Args:
      weight: The mark weight.
      training: The argument of the call. A true value declares that a tape
        will record the calls of a concrete function, which has only one trace.
        In all other calls, only the tapes matter: a `tf.function` is traced
        again if a tape starts to record its calls.
      adds_keys: Whether a training step adds keys to a vocabulary. In this
        case, the first run of `tf.recompute_grad` must also add the keys,
        because an evaluation returns other rows for new keys.
    """
    is_recorded = function_traces.is_recorded(weight, resumes=adds_keys)
    if training and function_traces.in_concrete_function():
        return True
    return is_recorded


def connect_mark(
    record_gradients: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    step: tf.Tensor,
    activations: Sequence[tf.Tensor],
    num_replicas: int,
) -> list[tf.Tensor]:
    """Connects the gradient of the activations with the gradient of `step`.

    Args:
      record_gradients: Function that stores the gradients of the activations
        and returns their mark, a float32 tensor of the shape of `step`.
      step: Value of the mark weight, float32.
      activations: Activations of one lookup, one tensor per feature.
      num_replicas: Number of replicas of the strategy.

    Returns:
      The same activations. The gradient of `step` is the mark, whose norm is
      the norm of the gradients of the tables. If any gradient of the
      activations is not finite, in any replica, the mark is not finite.
    """

    @tf.custom_gradient
    def connected(step, *activations):
        def gradient(*gradients):
            gradients = [
                tf.convert_to_tensor(gradient) for gradient in gradients
            ]
            mark = record_gradients(gradients)
            if not mark.shape.rank:
                # A TPU identifies gradients only by the order of the steps.
                mark *= _mean_of_replicas(_one_or_nan(gradients), num_replicas)
            elif num_replicas > 1:
                mark *= _finite_in_all_replicas(mark, num_replicas)
            return mark, *[None] * len(gradients)

        return [tf.identity(activation) for activation in activations], gradient

    activated: Any = connected(step, *activations)
    return activated


def _finite_in_all_replicas(mark: tf.Tensor, num_replicas: int) -> tf.Tensor:
    """Returns ones, or NaN in column 0 if any replica's mark is not finite.

    The engine ignores NaN in this column. If the step is applied, the gradients
    that are finite are therefore applied as they are.
    """
    is_finite = tf.reduce_all(tf.math.is_finite(mark))
    first = _mean_of_replicas(_one_if(is_finite), num_replicas)
    return tf.concat([first[tf.newaxis], tf.ones([tf.shape(mark)[1] - 1])], 0)


def _one_or_nan(gradients: list[tf.Tensor]) -> tf.Tensor:
    """Returns 1 if all gradients are finite, and NaN otherwise."""
    if routing_checks.in_xla() or any(
        gradient.dtype != tf.float32 for gradient in gradients
    ):
        return 1 + tf.add_n(
            [tf.reduce_sum(gradient * 0) for gradient in gradients]
        )
    return _one_if(ops.all_finite(tensors=gradients))


def _one_if(condition: tf.Tensor) -> tf.Tensor:
    """Returns 1 if a condition is True, and NaN otherwise.

    `tf.debugging.enable_check_numerics` does not allow a constant NaN, so NaN
    is computed only if the condition is False.
    """
    return 1.0 + tf.sqrt(tf.cast(condition, tf.float32) - 1.0)


def _mean_of_replicas(value: tf.Tensor, num_replicas: int) -> tf.Tensor:
    """Returns the mean over replicas.

    Keras checks only the first replica's gradients for overflows. If this mean
    is used, either all replicas apply the step or no replica applies it.
    """
    if num_replicas == 1:
        return value
    try:
        total = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, value
        )
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "Replicas must not call a layer whose tables train themselves in "
            "a `tf.function`, a loop or a branch inside `strategy.run`, "
            "because they compare their gradients, which TensorFlow does not "
            "support there. Call `strategy.run` inside the only "
            "`tf.function`, and inside loops over steps. Remove "
            f"`tf.function` from the layers and functions that {num_replicas} "
            "replicas call."
        ) from error
    return total / num_replicas


class EmbeddingSteps(AccessedTables):
    """Runs the steps and lookups of layers, for both Keras versions.

    If a tape records, each replica calls `start`. The tape then computes the
    gradients, and `apply` passes the gradients to the tables. The engine sums
    gradients feature by feature, then call by call, then in the order of the
    replicas. Because replicas process consecutive parts of the batch, the
    updated tables are independent of the number of replicas.

    On the host, a step may contain several calls, and some calls never get
    gradients. The engine therefore identifies each call by a token. The
    gradients of a call are identified by a mark, which passes through tape and
    optimizer like a gradient. A TPU identifies steps only by their order.
    Therefore, each step on a TPU has exactly one call.
    """

    def __init__(
        self,
        layer: str,
        feature_config: Any,
        optimizer: Any,
        *,
        partitioner: Any,
        out_of_range: literals.OutOfRange,
        table_dtypes: Any,
        rounding_seed: int,
        vocabularies: Any,
        wire_dtype: literals.WireDtype,
        over_processes: literals.OverProcesses,
        gradient_aggregation: literals.GradientAggregation,
        engine: literals.Engine,
        sparse_core_embedding_config: Any = None,
    ):
        """Creates the embedding; `build` creates its tables.

        All arguments except `layer` have the same meaning as in
        `tlm.TPUEmbedding`.

        Args:
          layer: Name of the layer, for messages and step names.
          feature_config: Nested structure of features, of TensorFlow or of
            keras-rs.
          optimizer: Optimizer of the tables that do not specify one.
          partitioner: Partitioner of tables into shards.
          out_of_range: How out-of-range ids are handled.
          table_dtypes: Dtypes of the stored rows.
          rounding_seed: Seed of the rounding of 16-bit rows.
          vocabularies: Settings of tables with open vocabularies.
          wire_dtype: Dtype of rows and gradients between worker and server.
          over_processes: How several processes hold the tables.
          gradient_aggregation: How gradients of tables sharded over processes
            are summed.
          engine: Engine that runs the steps.
          sparse_core_embedding_config: Limits of SparseCores, or None.
        """
        self._layer = layer
        strategy = tf.distribute.get_strategy()
        self.on_sparse_cores = engine != "host" and bool(
            embedding_backend.has_sparse_cores(strategy)
        )
        if self.on_sparse_cores and sparse_core_embedding_config is None:
            sparse_core_embedding_config = keras_rs_configs.sparse_core_config(
                feature_config
            )
        feature_config = keras_rs_configs.to_tensorflow_configs(
            feature_config,
            strategy.num_replicas_in_sync if self.on_sparse_cores else None,
        )
        optimizer = keras_rs_configs.read_optimizer(
            optimizer, f"(layer {layer!r})"
        )
        self.feature_config = feature_config
        self.optimizer = optimizer
        self.out_of_range: literals.OutOfRange = out_of_range
        with keras_rs_configs.optimizers_of_tables(feature_config):
            make_embedding = (
                functools.partial(
                    TPUEmbeddingV2,
                    sparse_core_embedding_config=sparse_core_embedding_config,
                )
                if self.on_sparse_cores
                else TPUEmbedding
            )
            self.embedding: EmbeddingBase = make_embedding(
                feature_config,
                optimizer,
                partitioner=partitioner,
                out_of_range=out_of_range,
                table_dtypes=table_dtypes,
                rounding_seed=rounding_seed,
                vocabularies=vocabularies,
                wire_dtype=wire_dtype,
                over_processes=over_processes,
                gradient_aggregation=gradient_aggregation,
                engine=engine,
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
                "callable without arguments; only the host engine supports "
                f"schedules. Received: {self._schedules[0].schedule!r} (layer "
                f"{layer!r})."
            )
        self._ordered = (
            ordered_steps.OrderedSteps(self.embedding, layer)
            if self.access.has_ordered_steps
            else None
        )

    @property
    def is_on_tpu(self) -> bool:
        """Whether the tables are on a real or an emulated TPU."""
        return self.access.is_on_tpu

    def build(self):
        """Creates the tables, or lets the first step on a TPU create them.

        The `output_shape` of each feature is known on SparseCores, so that the
        tables can be created before the first step.
        """
        patches.ensure("function_traces")
        if self.on_sparse_cores:
            self.embedding.build()
        if self.is_on_tpu:
            return
        self.embedding.build()
        if not self._schedules:
            return
        with tf.init_scope(), tf.device(self.access.variable_device):
            # The variable is created outside of the strategy, because all
            # replicas share the variable. Checkpoints contain the variable,
            # because it is an attribute of the embedding.
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
        """The tables and features of the layer, with their current sizes."""
        return self.access.spec

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self.spec.tables]

    @property
    def can_accumulate(self) -> bool:
        """Whether `apply` can be called in a `tf.cond`."""
        return self.access.can_apply_in_cond

    def look_up(self, inputs: Any, weights: Any) -> Any:
        """Returns activations without a training step, by TensorFlow's ops.

        In `evaluate` and `predict`, the op `LookupRows` of this package looks
        up the rows, because their graphs are never exported. In a TPU program,
        a forward step is enqueued instead, because the program cannot read the
        tables. If tables are sharded over processes, each process sends the
        rows that it owns.

        Raises:
          RuntimeError: If the method is called outside of `strategy.run`, and
            the tables are on a TPU or sharded over processes.
        """
        placeholder = placeholders.placeholder_of(self.embedding)
        if placeholder is not None:
            return placeholder(
                *self._truncate(*self._unpacked(inputs, weights))
            )
        if self._ordered is not None and (
            self.is_on_tpu or ordered_steps.is_in_program()
        ):
            return self._ordered.look_up(*self._truncate(inputs, weights))
        if self.access.is_sharded:
            return tf.nest.pack_sequence_as(
                self.feature_config,
                self.access.look_up(*self._truncate(inputs, weights)),
            )
        inputs, weights = self._truncate(*self._unpacked(inputs, weights))
        base_tables.watch_table(self.embedding)
        return serving.look_up(
            inputs,
            weights,
            self.embedding.embedding_tables,
            self.feature_config,
            self.out_of_range,
            self.embedding.vocabularies,
            may_fuse=evaluation.is_running(),
        )

    def output_shapes(self, inputs: Any) -> list[activation_shapes.Shape]:
        """Returns the shape of each feature's activations for `inputs`."""
        return activation_shapes.shapes(self.spec, self.feature_config, inputs)

    def is_packed(self, inputs: Any) -> bool:
        """Returns whether `inputs` are a packed batch, or its placeholder."""
        return activation_shapes.has_packed_ids(self.feature_config, inputs)

    def zeros(self, inputs: Any) -> Any:
        """Returns zeros in the shape of the activations; enqueues no step."""
        return activation_shapes.zeros(self.spec, self.feature_config, inputs)

    def start(self, step: tf.Tensor, inputs: Any, weights: Any) -> Any:
        """Returns the activations of a new step of the calling replica.

        Args:
          step: Value of the mark weight: float32 of `mark_shape`. The gradient
            of this value is the mark of the call. If the gradient of an
            activation is not finite, the mark is not finite.
          inputs: Structure of the feature config, as for `enqueue`.
          weights: None, or weights in the same structure as `inputs`.

        Raises:
          RuntimeError: If a table has no optimizer, or if there are several
            replicas and the method is not called in a replica.
          NotImplementedError: In `tf.vectorized_map`, or if a tape records
            weights on a TPU.
        """
        if routing_checks.in_vectorized_map():
            raise NotImplementedError(
                "A layer whose tables train must not be called in "
                "`tf.vectorized_map`, because each call is a separate step of "
                "its tables; call the layer before `tf.vectorized_map` with "
                "the ids of all iterations, or use `tf.map_fn`. Received: a "
                f"call of layer {self._layer!r} that a gradient tape records."
            )
        self.access.require_replica("call")
        inputs, weights = self._truncate(inputs, weights)
        self.access.check_can_train(self._layer)
        record_gradients, rows = (
            self.access.open(inputs, weights)
            if self._ordered is None
            else self._ordered.start(inputs, weights)
        )
        flat = connect_mark(record_gradients, step, rows, self.num_replicas)
        if weights is not None and weight_gradients.may_have_gradient(weights):
            flat = self._connect_weights(flat, inputs, weights)
        return tf.nest.pack_sequence_as(self.feature_config, flat)

    def open(
        self, inputs: Any, weights: Any
    ) -> tuple[Callable[[Sequence[tf.Tensor]], tf.Tensor], list[tf.Tensor]]:
        """Starts a step without a tape; returns as `LayerAccess.open`."""
        inputs, weights = self._truncate(inputs, weights)
        self.access.check_can_train(self._layer)
        return self.access.open(inputs, weights)

    def _connect_weights(
        self, activations: Sequence[tf.Tensor], inputs: Any, weights: Any
    ) -> Sequence[tf.Tensor]:
        """Connects the gradients of activations and of weights.

        Raises:
          NotImplementedError: If a tape records weights on a TPU.
        """
        if self._ordered is not None:
            if weight_gradients.is_recorded(weights):
                raise NotImplementedError(
                    "The gradient of `weights` is not supported on a TPU, "
                    "whose program has only the combined rows; use "
                    "`tf.stop_gradient(weights)`, or multiply embeddings of "
                    "single ids by the weights. Received: weights that a "
                    f"gradient tape records (layer {self._layer!r})."
                )
            return activations
        inputs, weights = self._unpacked(inputs, weights)
        return weight_gradients.connect(
            self.spec,
            activations,
            [
                weight
                for _, weight in embedding_inputs.flatten_with_paths(inputs)
            ],
            embedding_inputs.flatten_weights(weights, inputs, like="inputs"),
            self._rows_of_ids,
            self.out_of_range,
        )

    def _rows_of_ids(
        self, features: Sequence[embedding_inputs.FeatureIds | None]
    ) -> list[tf.Tensor]:
        """Returns the rows of ids; see `weight_gradients`."""
        if self.access.is_sharded:
            return self.access.rows_of_ids(features)
        vocabularies = self.embedding.vocabularies
        rows = {
            table.name: rows
            for table, rows in zip(
                self.spec.tables, self.embedding.embedding_tables.values()
            )
        }
        activations = []
        for feature, ids in zip(self.spec.features, features):
            table = self.spec.table_of(feature)
            vocabulary = vocabularies.get(table.name)
            activations.append(
                tf.zeros([0, table.dim])
                if ids is None
                else stock_lookup.rows_of_ids(
                    table,
                    rows[table.name],
                    ids,
                    self.out_of_range,
                    vocabulary and vocabulary.rows_of_keys,
                )
            )
        return activations

    @property
    def unlisted(self) -> str | None:
        """Why the tables are not weights in tf_keras, or None."""
        if self.is_on_tpu:
            return "on a TPU"
        return "sharded over processes" if self.access.is_sharded else None

    @property
    def has_copies(self) -> bool:
        """Whether this process can copy the tables now."""
        return not self.is_on_tpu or self.access.is_built

    def save(self, store: Any) -> None:
        """Writes tables and slot variables, each as one array.

        If tables are sharded over processes, each process writes its rows.
        """
        if self.access.is_sharded:
            weight_files.save_shards(self.embedding, store)
        else:
            weight_files.save_tables(self.embedding, store)

    def load(self, store: Any) -> None:
        """Reads what `save` wrote; the number of local shards may differ."""
        if self.access.is_sharded:
            weight_files.load_shards(self.embedding, store)
        else:
            weight_files.load_tables(self.embedding, store, layer=self._layer)

    def apply(self, sum_of_marks: tf.Tensor):
        """Applies a step to the tables when the last replica calls.

        Args:
          sum_of_marks: Gradient of the mark weight: float32 of `mark_shape`, a
            sum of marks. Each mark identifies the gradients of one call. The
            stored gradients are multiplied by the factor that the mark has in
            the sum.

        Raises:
          RuntimeError: If no gradients were stored.
          ValueError: If a TPU program contains the step, and the method is
            called in a branch that is not executed in every step.
        """
        if self._ordered is None:
            self.access.apply_marks(sum_of_marks)
        else:
            self._ordered.apply(sum_of_marks)
        if self._schedules and self.access.is_last_here(
            self.access.require_replica("apply")
        ):
            with ordered_steps.on_host():
                self.embedding.schedule_updates.assign_add(1)

    def _unpacked(self, inputs, weights):
        """Returns ids and weights in the structure of the feature config."""
        if not self.is_packed(inputs):
            return inputs, weights
        ids, factors = packing.unpack_ids(
            self.spec.features,
            packing.read_packed(inputs, weights, self.feature_config),
            self.spec.has_keys(),
        )
        return (
            tf.nest.pack_sequence_as(self.feature_config, ids),
            None
            if weights is None
            else tf.nest.pack_sequence_as(self.feature_config, factors),
        )

    def _truncate(self, inputs, weights):
        if self.on_sparse_cores:
            inputs, weights = self._unpacked(inputs, weights)
        features = dict(
            embedding_inputs.flatten_with_paths(self.feature_config)
        )
        has_limits = any(
            hasattr(feature, "max_ids") for feature in features.values()
        )
        if self.is_packed(inputs) and has_limits:
            inputs, weights = self._unpacked(inputs, weights)
        elif self.is_packed(inputs):
            return inputs, weights
        if weights is None and not has_limits and not self.on_sparse_cores:
            return inputs, weights
        pairs = [
            keras_rs_configs.truncate_ids(features.get(path), ids, weight)
            for (path, ids), weight in zip(
                embedding_inputs.flatten_with_paths(inputs),
                embedding_inputs.flatten_weights(
                    weights, inputs, like="inputs"
                ),
            )
        ]
        if self.on_sparse_cores:
            pairs = [
                (keras_rs_configs.ragged_samples(feature, ids), weight)
                for feature, (ids, weight) in zip(
                    tf.nest.flatten(self.feature_config), pairs
                )
            ]
        flat, flat_weights = zip(*pairs)
        return (
            tf.nest.pack_sequence_as(inputs, flat),
            None
            if weights is None
            else tf.nest.pack_sequence_as(inputs, flat_weights),
        )
