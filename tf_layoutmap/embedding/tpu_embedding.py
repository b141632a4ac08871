"""`TPUEmbedding`: the Cloud TPU embedding API over the host engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding import (
    config,
    gradient_checks,
    host_engine,
    ragged_ids,
    replicas,
    restore_check,
    serving,
    step_modes,
    step_shapes,
    structure,
    tables,
)

# AutoGraph would rewrite all of this file and what it calls, at each trace.
_as_written = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass
class _State:
    """What an embedding knows and a checkpoint must not."""

    feature_config: Any
    spec: config.EmbeddingSpec
    table_configs: list[Any]
    partitioner: tables.Partitioner | None
    replicas: replicas.Replicas
    shapes: step_shapes.StepShapes
    modes: step_modes.StepModes
    is_pipelined: bool
    out_of_range: str
    engine: host_engine.HostEngine | None = None


class TPUEmbedding(tf.Module):
    """Embedding tables with optimizers of their own.

    The interface is that of `tf.tpu.experimental.embedding.TPUEmbedding`;
    the tables live on the host and are updated by the host engine, with the
    semantics of the TPU: the gradients of a row are summed over features,
    replicas and samples, then each row that was looked up gets one update.

    A step goes `enqueue`, `dequeue`, `apply_gradients`, in this order on each
    replica; several steps may be enqueued ahead. It works eagerly, in
    `tf.function`, and under `OneDeviceStrategy` and `MirroredStrategy`, where
    `dequeue` and `apply_gradients` are called inside `strategy.run`.
    Gradients are not divided by the number of replicas.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> words = tf.tpu.experimental.embedding.TableConfig(
    ...     vocabulary_size=4, dim=2, initializer=tf.ones, combiner="sum",
    ...     name="words")
    >>> embedding = tlm.TPUEmbedding(
    ...     {"title": tf.tpu.experimental.embedding.FeatureConfig(words)},
    ...     tf.tpu.experimental.embedding.SGD(learning_rate=0.5))
    >>> embedding.enqueue({"title": tf.ragged.constant([[0, 2], [2]])})
    >>> embedding.dequeue()["title"].numpy().tolist()
    [[2.0, 2.0], [1.0, 1.0]]
    >>> embedding.apply_gradients({"title": tf.ones([2, 2])})
    >>> embedding.embedding_tables[words].numpy()[:, 0].tolist()
    [0.5, 1.0, 0.0, 1.0]

    `tf.train.Checkpoint(embedding=embedding)` saves tables and slot
    variables, and restores them before or after `build`. Steps in flight are
    not saved; restoring over them is an error.
    """

    def __init__(
        self, feature_config: Any, optimizer: Any,
        pipeline_execution_with_tensor_core: bool = False, *,
        partitioner: tables.Partitioner | None = None,
        out_of_range: str = "error",
    ):
        """Reads the configuration; variables are created by `build`.

        Args:
          feature_config: Nested structure of
            `tf.tpu.experimental.embedding.FeatureConfig`. Neither it nor its
            tables are changed; a table without name is called `table_{i}`.
          optimizer: An optimizer of `tf.tpu.experimental.embedding` (`SGD`,
            `Adagrad`, `AdagradMomentum`, `Adam`, `FTRL`), for tables that
            bring none; None for tables that only serve.
          pipeline_execution_with_tensor_core: Whether lookups are one step
            old, as on a TPU whose two kinds of core work at the same time: a
            step sees the updates of all steps but the last. `flush` lands
            that one.
          partitioner: Cuts tables into shards, as
            `tf_layoutmap.partition.FixedShardsPartitioner(num_shards=3)`.
          out_of_range: What becomes of an id that is no row of its table:
            `"error"`, `"drop"` (as if it were not there) or `"clip"` (the
            nearest row). `stats` counts them.

        Raises:
          TypeError: If `feature_config` holds something else.
          ValueError: If a setting is invalid, or the host engine does not
            carry it out.
          NotImplementedError: If the strategy in scope is not supported.
        """
        super().__init__()
        if not isinstance(pipeline_execution_with_tensor_core, bool):
            raise TypeError(
                "Argument `pipeline_execution_with_tensor_core` must be a "
                f"bool. Received: {pipeline_execution_with_tensor_core!r}.")
        if out_of_range not in config.OUT_OF_RANGE:
            raise ValueError(
                "Argument `out_of_range` must be one of "
                f"{config.OUT_OF_RANGE}. Received: {out_of_range!r}.")
        if partitioner is not None and not callable(partitioner):
            raise TypeError(
                "Argument `partitioner` must be a callable of `shape` and "
                f"`dtype`, or None. Received: {partitioner!r}.")
        spec, table_configs = config.read_feature_config(
            structure.flatten_with_paths(feature_config), optimizer)
        # A plain object: tf.Module would track, and save, a dict or a list.
        self._state = _State(
            feature_config, spec, table_configs, partitioner,
            replicas.Replicas(), step_shapes.StepShapes(spec),
            step_modes.StepModes(), pipeline_execution_with_tensor_core,
            out_of_range)

    @_as_written
    def build(self, per_replica_input_shapes: Any = None,
              per_replica_batch_size: int | None = None):
        """Creates the variables and the engine, once.

        `enqueue` does so when it is needed first. With sizes given, each
        `enqueue` must have them, and activations have a static shape.

        Args:
          per_replica_input_shapes: None, the batch size of every feature, or
            the structure of `feature_config` with the shape of each input,
            `[num_samples]` or `[..., ids per sample]`.
          per_replica_batch_size: The batch size of every feature.

        Raises:
          ValueError: If a shape is of another rank, or sizes differ from
            those of an earlier `build`.
          RuntimeError: In a graph of TensorFlow 1.
        """
        state = self._state
        num_samples = step_shapes.read_num_samples(
            state.feature_config, state.spec.features,
            per_replica_input_shapes, per_replica_batch_size)
        if num_samples is not None:
            state.shapes.declare(num_samples)
        if state.engine is not None:
            return
        # Eagerly, even while a function is traced: variables outlive it.
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(
                    "TPUEmbedding needs eager execution to create its "
                    "tables; do not use it in a tf.compat.v1 graph.")
            # String keys, so that the dicts can be saved. The names are those
            # of TensorFlow's class, whose checkpoints have this structure.
            self._variables = tables.create_tables(
                state.spec, state.partitioner)
            state.engine = host_engine.HostEngine(
                state.spec, self._variables,
                num_replicas=state.replicas.num_replicas,
                is_pipelined=state.is_pipelined,
                out_of_range=state.out_of_range)

    @_as_written
    def enqueue(
        self, features: Any, weights: Any = None, training: Any = True,
        name: str | None = None, device: str | None = None,
    ):
        """Hands over the ids of one step.

        Inside `strategy.run` it is the step of that replica. Outside, each
        leaf holds one value per replica, or `device` says whose step it is.

        Args:
          features: Structure of `feature_config`. Each leaf is a `tf.Tensor`
            `[num_samples]` or `[..., ids per sample]`, a `tf.SparseTensor`
            (row-major) of rank 2 or more, or a `tf.RaggedTensor` of rank 2,
            of integers. Forms and batch sizes may differ.
          weights: None, or the same structure with None or the factors of the
            ids, in the sparse or ragged form of the ids.
          training: Bool or scalar bool tensor. False: forward only, nothing
            to apply. A `tf.function` that enqueues and dequeues under one
            `name` and never applies under it is forward-only anyway.
          name: Which calls of a `tf.function` belong together. Steps pair by
            their order.
          device: A device of the strategy, as `"/device:CPU:1"`.

        Raises:
          TypeError: If structures differ in types, or ids are not integers.
          ValueError: If structures, sizes, ranks or weights do not match.
          RuntimeError: If `training` and a table has no optimizer, or called
            by a replica of another strategy.
          tf.errors.InvalidArgumentError: If ids, splits or weights are bad;
            it names feature, sample, id and table.
          tf.errors.FailedPreconditionError: If too many steps are pending.
        """
        _check_not_exported("enqueue")
        state = self._state
        replica = state.replicas.current()
        if device is not None:
            if replica is not None and state.replicas.num_replicas > 1:
                raise ValueError(
                    "Argument `device` must be None inside `strategy.run`. "
                    f"Received: device={device!r}.")
            steps = [(state.replicas.of_device(device), features, weights)]
        elif replica is not None:
            steps = [(replica, features, weights)]
        else:
            steps = list(zip(
                range(state.replicas.num_replicas),
                state.replicas.split(features, "features"),
                state.replicas.split(weights, "weights")))
        self._check_training(training)
        # All are read before the first goes in: half a step cannot pair.
        steps = [(replica, self._read_features(features, weights))
                 for replica, features, weights in steps]
        self.build()
        training = state.modes.enqueued(name, training)
        for replica, inputs in steps:
            state.engine.enqueue(replica, training, inputs)

    @_as_written
    def dequeue(self, name: str | None = None) -> Any:
        """Returns the activations of the oldest step enqueued.

        Args:
          name: That of its `enqueue`.

        Returns:
          Structure of `feature_config` with float32 tensors: `[num_samples,
          dim]`, `[*output_shape, dim]`, or `[num_samples,
          max_sequence_length, dim]` of a sequence feature. A sample without
          ids is zeros.

        Raises:
          RuntimeError: If not built, or outside `strategy.run` with several
            replicas.
          tf.errors.FailedPreconditionError: If no step is enqueued, or the
            step before still waits for its gradients.
        """
        state = self._state
        self._check_built("dequeue")
        replica = state.replicas.require_current("dequeue")
        state.modes.dequeued(name)
        activations = [
            state.shapes.shape_activations(index, one)
            for index, one in enumerate(state.engine.dequeue(replica))]
        state.shapes.note_dequeued(replica, activations)
        return tf.nest.pack_sequence_as(state.feature_config, activations)

    @_as_written
    def apply_gradients(self, gradients: Any, name: str | None = None):
        """Updates the tables with the gradients of the step dequeued last.

        The update runs when the last replica has applied. Dynamic learning
        rates are called once each.

        Args:
          gradients: Structure of `feature_config` with the gradient of each
            activation, float32 and of its shape. None counts as zeros, with
            a warning.
          name: That of the step's `enqueue`.

        Raises:
          TypeError: If the structure differs in types.
          ValueError: If the structure differs in size, or a gradient is no
            tensor or of another type or shape.
          RuntimeError: If not built, a table has no optimizer, or outside
            `strategy.run` with several replicas; or while a function is
            traced that enqueues under this name with `training=False`.
          tf.errors.FailedPreconditionError: If no step was dequeued, or it
            was enqueued with `training=False`.
          tf.errors.InvalidArgumentError: If a learning rate is negative or
            not finite; it names the table.
        """
        state = self._state
        self._check_built("apply_gradients")
        self._check_optimizers("apply_gradients")
        structure.check_same(
            gradients, "gradients", state.feature_config, "feature_config")
        replica = state.replicas.require_current("apply_gradients")
        state.modes.applied(name)
        flat = []
        for index, gradient in enumerate(tf.nest.flatten(gradients)):
            feature = state.spec.features[index]
            if gradient is None:
                gradient = gradient_checks.zero_gradient(
                    feature, state.shapes.dequeued_shape(replica, index))
            else:
                gradient = gradient_checks.read_gradient(
                    feature, gradient, state.shapes.activation_shape(index))
            flat.append(state.shapes.flatten_gradient(index, gradient))
        state.engine.apply(
            replica, flat, gradient_checks.hyperparameters(state.spec.tables))

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """From each `TableConfig` to its rows, `[num_rows, dim]` float32.

        A `tf.Variable`, or a `ShardedVariable` of a table in shards. Outside
        of `tf.function` a pipelined update lands first.
        """
        self.build()
        self._flush_eagerly()
        return {one: self._variables[spec.name][tables.PARAMETERS]
                for one, spec in self._tables()}

    @property
    def slot_variables(self) -> dict[Any, dict[str, Any]]:
        """From each `TableConfig` to its slot variables by name."""
        self.build()
        self._flush_eagerly()
        return {one: {name: slot
                      for name, slot in self._variables[spec.name].items()
                      if name != tables.PARAMETERS}
                for one, spec in self._tables()}

    @_as_written
    def __call__(self, features: Any, weights: Any = None) -> Any:
        """Looks up outside of any step, by stock ops; see
        `serving_embedding_lookup`."""
        return serving.serving_embedding_lookup(
            features, weights, self.embedding_tables,
            self._state.feature_config,
            out_of_range=self._state.out_of_range)

    @_as_written
    def flush(self):
        """Lands the update that pipelining still holds back, if any.

        Reading `embedding_tables` outside of `tf.function`, saving, restoring
        and forward-only steps do so by themselves.
        """
        self._check_built("flush")
        if self._state.is_pipelined:
            self._state.engine.land()

    @_as_written
    def reset(self):
        """Forgets every step in flight, as after an interrupted one.

        A step that was applied is none of them: pipelined, it lands first.
        """
        self._check_built("reset")
        self.flush()
        self._state.engine.reset()

    def stats(self) -> dict[str, Any]:
        """Returns what the engine holds.

        Returns:
          `pending`: steps that wait for a dequeue, by replica; `awaiting`:
          whether a dequeued one waits for gradients, by replica; `num_updates`:
          updates made; `poisoned`: why a reset is needed, or empty; `held`:
          whether a pipelined update waits to land. `features`: by name, of
          all steps, `num_samples`, `num_ids` and of these `num_dropped`,
          `num_clipped` and `num_truncated` behind a sequence's last position.
          `tables`: by name, `num_bytes`, `num_slot_bytes`, and of all
          training steps `num_lookups`, `num_unique_rows` and their
          `unique_ratio`.
        """
        self._check_built("stats")
        if not tf.executing_eagerly():
            raise RuntimeError("`stats` must be called outside tf.function.")
        return self._state.engine.describe()

    def _flush_eagerly(self):
        # While a function is traced its reads see what has landed by then;
        # and one that is exported must not hold an op of ours.
        state = self._state
        if state.is_pipelined and state.engine and tf.executing_eagerly():
            state.engine.land()

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # Whatever is saved asks for this first.
        if hasattr(self, "_state"):
            self._flush_eagerly()
        return super()._trackable_children(save_type, **kwargs)

    def _tables(self):
        return zip(self._state.table_configs, self._state.spec.tables)

    def _read_features(self, features, weights):
        state = self._state
        structure.check_same(
            features, "features", state.feature_config, "feature_config")
        flat_weights = structure.flatten_weights(
            weights, state.feature_config, like="feature_config")
        return [
            state.shapes.check_input(index, ragged_ids.read_feature(
                feature, value, weight))
            for index, (feature, value, weight) in enumerate(zip(
                state.spec.features, tf.nest.flatten(features), flat_weights))]

    def _check_built(self, method: str):
        _check_not_exported(method)
        if self._state.engine is None:
            raise RuntimeError(
                f"`{method}` needs a built TPUEmbedding; call `enqueue` or "
                "`build` first.")

    def _check_optimizers(self, what: str):
        for table in self._state.spec.tables:
            if table.optimizer is None:
                raise RuntimeError(
                    f"`{what}` needs an optimizer for every table; table "
                    f"{table.name!r} has none, so it only serves: use "
                    "`enqueue(training=False)` and `dequeue`.")

    def _check_training(self, training):
        """Refuses what is no bool, and a true one where tables only serve.

        Of a tensor, the engine does the latter.
        """
        if tf.is_tensor(training) or isinstance(training, tf.Variable):
            return
        if not isinstance(training, bool):
            raise TypeError(
                "Argument `training` must be a bool or a bool tensor. "
                f"Received: {training!r}.")
        if training:
            self._check_optimizers("enqueue(training=True)")

    def _checkpoint_adapter(self, path):
        # A restore asks this before it writes anything: the one moment to
        # refuse to change rows under a step whose gradients belong to the
        # old ones.
        if self._state.engine is None:
            return None
        self._flush_eagerly()
        found = self._state.engine.describe()
        if any(found["pending"]) or any(found["awaiting"]):
            raise RuntimeError(
                "A checkpoint cannot be restored while steps are in flight; "
                "finish them, or call `reset` to forget them. Pending by "
                f"replica: {found['pending']}, awaiting gradients: "
                f"{found['awaiting']}.")
        if path is not None:
            restore_check.check_shapes(path, "_variables", self._variables)
        return None


def _check_not_exported(method: str):
    """Refuses a step in a graph that would need this package to be loaded."""
    if _tf_private.in_save_context():
        raise RuntimeError(
            f"`{method}` cannot be exported: a SavedModel must load without "
            "tf_layoutmap. Serve by `serving_embedding_lookup`, and keep "
            "functions that train out of the attributes of what is saved.")
