"""`TPUEmbedding`: the Cloud TPU embedding API over a TPU or the host engine.

What holds for both is here; each has a backend of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding import (
    config,
    engine_choice,
    host_backend,
    replicas,
    restore_check,
    serving,
    structure,
    tables,
)
from tf_layoutmap.embedding import table_dtypes as dtypes
from tf_layoutmap.embedding.tpu_engine import backend as tpu_backend
from tf_layoutmap.embedding.tpu_engine import config_proto

# AutoGraph would rewrite all of this file and what it calls, at each trace.
_as_written = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass
class _State:
    """What an embedding knows and a checkpoint must not.

    Attributes:
      backend: What carries the steps out. Both kinds have `is_built`,
        `declare`, `create_tables`, `start`, `enqueue`, `dequeue` and `apply`.
      is_refused: Whether steps are for a TPU that is not there.
    """

    feature_config: Any
    spec: config.EmbeddingSpec
    table_configs: list[Any]
    replicas: replicas.Replicas
    out_of_range: str
    backend: host_backend.HostBackend | tpu_backend.TPUBackend
    is_refused: bool


class TPUEmbedding(tf.Module):
    """Embedding tables with optimizers of their own.

    The interface is that of `tf.tpu.experimental.embedding.TPUEmbedding`.
    Created under `TPUStrategy` it does what that class does, by the same
    operations. Elsewhere the tables live on the host and are updated by the
    host engine, with the semantics of the TPU: the gradients of a row are
    summed over features, replicas and samples, then each row that was looked
    up gets one update.

    A step goes `enqueue`, `dequeue`, `apply_gradients`, in this order on each
    replica; several steps may be enqueued ahead. It works eagerly, in
    `tf.function`, and under `OneDeviceStrategy`, `MirroredStrategy`,
    `MultiWorkerMirroredStrategy` and `TPUStrategy`, where `dequeue` and
    `apply_gradients` are called inside `strategy.run`. Gradients are not
    divided by the number of replicas.

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
        out_of_range: str = "error", engine: str = "auto",
        table_dtypes: Any = None, rounding_seed: int = 0,
    ):
        """Reads the configuration; variables are created by `build`.

        Args:
          feature_config: Nested structure of
            `tf.tpu.experimental.embedding.FeatureConfig`. Neither it nor its
            tables are changed; a table without name is called `table_{i}`.
          optimizer: An optimizer of `tf.tpu.experimental.embedding` (`SGD`,
            `Adagrad`, `AdagradMomentum`, `Adam`, `FTRL`) or, on the host, of
            `tf_layoutmap.optimizers` (`RowwiseAdagrad`, `LAMB`), for tables
            that bring none; None for tables that only serve.
          pipeline_execution_with_tensor_core: Whether lookups are one step
            old, as on a TPU whose two kinds of core work at the same time: a
            step sees the updates of all steps but the last. `flush` lands
            that one.
          partitioner: Cuts tables into shards, as
            `tf_layoutmap.partition.FixedShardsPartitioner(num_shards=3)`.
          out_of_range: What becomes of an id that is no row of its table:
            `"error"`, `"drop"` (as if it were not there) or `"clip"` (the
            nearest row). `stats` counts them. A TPU has `"error"` only, and
            inside `strategy.run` ids cannot be checked.
          engine: `"auto"`: the TPU under `TPUStrategy`, else the host engine.
            `"host"`: the host engine. `"tpu"`: the TPU; under another strategy
            there are tables to serve and no steps, as of TensorFlow's class.
          table_dtypes: How rows are stored: `"float32"` (None), `"bfloat16"`
            or `"float16"`, for all tables, or by table name. Rows of 16 bits
            are looked up and updated as float32, then rounded to one of their
            two neighbours by chance, so that small updates are not lost on
            average; beyond the largest finite value they stay there. Slot
            variables are float32. A TPU has float32 only.
          rounding_seed: What that chance depends on, beside the table, the
            number of its updates, the row and the column.

        Raises:
          TypeError: If `feature_config` holds something else.
          ValueError: If a setting is invalid, or the engine does not carry
            it out.
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
        strategy_replicas = replicas.Replicas()
        on_tpu = engine_choice.is_tpu(strategy_replicas.strategy)
        engine = engine_choice.choose(engine, strategy_replicas.strategy)
        named_features = structure.flatten_with_paths(feature_config)
        spec, table_configs = config.read_feature_config(
            named_features, optimizer, takes_slot_fn=on_tpu)
        spec = dtypes.with_dtypes(spec, table_configs, table_dtypes)
        if on_tpu:
            _check_tpu_arguments(spec, partitioner, out_of_range)
            backend = tpu_backend.TPUBackend(
                feature_config, config_proto.read_spec(
                    spec, [one for _, one in named_features], table_configs,
                    optimizer),
                strategy_replicas, pipeline_execution_with_tensor_core)
        else:
            backend = host_backend.HostBackend(
                feature_config, spec, strategy_replicas,
                partitioner=partitioner, out_of_range=out_of_range,
                is_pipelined=pipeline_execution_with_tensor_core,
                rounding_seed=dtypes.read_seed(rounding_seed))
        # A plain object: tf.Module would track, and save, a dict or a list.
        self._state = _State(
            feature_config, spec, table_configs, strategy_replicas,
            out_of_range, backend, engine == "tpu" and not on_tpu)
        if strategy_replicas.has_processes:
            # Now, while all processes are known to be at the same place.
            self.build()

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

        Under `TPUStrategy` the shapes of all activations must be known by
        now, and the TPU is initialized.

        Raises:
          ValueError: If a shape is of another rank, or sizes differ from
            those of an earlier `build`, or a TPU needs what is not known.
          RuntimeError: In a graph of TensorFlow 1, or if the TPU is
            initialized for another embedding.
        """
        backend = self._state.backend
        backend.declare(per_replica_input_shapes, per_replica_batch_size)
        if not backend.is_built:
            self._create()

    def _create(self):
        """Creates the variables and starts the backend."""
        backend = self._state.backend
        # Eagerly, even while a function is traced: variables outlive it.
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(
                    "TPUEmbedding needs eager execution to create its "
                    "tables; do not use it in a tf.compat.v1 graph.")
            # String keys, so that the dicts can be saved. The names are those
            # of TensorFlow's class, whose checkpoints have this structure. A
            # restore that waits for them is carried out here.
            self._variables = backend.create_tables()
            backend.start(self._variables)

    @_as_written
    def enqueue(
        self, features: Any, weights: Any = None, training: Any = True,
        name: str | None = None, device: str | None = None,
    ):
        """Hands over the ids of one step.

        Inside `strategy.run` it is the step of that replica. Outside, each
        leaf holds one value per replica, or `device` says whose step it is.

        On a TPU, dense inputs have one id per sample, batch sizes are known
        while tracing and do not change, and a call inside `strategy.run` is at
        the top of the function that is run and is given its arguments.

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
          device: A device of the strategy, as `"/device:CPU:1"`; of a TPU,
            any core.

        Raises:
          TypeError: If structures differ in types, or ids are not integers.
          ValueError: If structures, sizes, ranks or weights do not match.
          RuntimeError: If `training` and a table has no optimizer, or called
            by a replica of another strategy, or in control flow inside a
            TPU's program.
          tf.errors.InvalidArgumentError: If ids, splits or weights are bad;
            it names feature, sample, id and table.
          tf.errors.FailedPreconditionError: If too many steps are pending.
        """
        self._check_can_step("enqueue")
        self._check_training(training)
        backend = self._state.backend
        backend.enqueue(
            features, weights, training, name, device,
            lambda: None if backend.is_built else self._create())

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
        self._check_built("dequeue")
        return tf.nest.pack_sequence_as(
            self._state.feature_config, self._state.backend.dequeue(name))

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
        self._check_built("apply_gradients")
        self._check_optimizers("apply_gradients")
        structure.check_same(
            gradients, "gradients", self._state.feature_config,
            "feature_config")
        self._state.backend.apply(tf.nest.flatten(gradients), name)

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """From each `TableConfig` to its rows, `[num_rows, dim]` float32.

        A `tf.Variable`, or a `ShardedVariable` of a table in shards. Outside
        of `tf.function` a pipelined update lands first.

        Raises:
          RuntimeError: Under `TPUStrategy`, where the rows are on the TPU,
            except while a SavedModel is made; all shards go into it.
        """
        self._make_readable("embedding_tables")
        return {one: self._variables[spec.name][tables.PARAMETERS]
                for one, spec in self._tables()}

    @property
    def slot_variables(self) -> dict[Any, dict[str, Any]]:
        """From each `TableConfig` to its slot variables by name.

        Raises:
          RuntimeError: As of `embedding_tables`.
        """
        self._make_readable("slot_variables")
        return {one: {name: slot
                      for name, slot in self._variables[spec.name].items()
                      if name not in (tables.PARAMETERS,
                                      tables.ROUNDING_STEPS)}
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
        self._host_backend("flush").flush()

    @_as_written
    def reset(self):
        """Forgets every step in flight, as after an interrupted one.

        A step that was applied is none of them: pipelined, it lands first.
        """
        backend = self._host_backend("reset")
        backend.flush()
        backend.engine.reset()

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
        backend = self._host_backend("stats")
        if not tf.executing_eagerly():
            raise RuntimeError("`stats` must be called outside tf.function.")
        return backend.engine.describe()

    def _make_readable(self, what: str):
        """Sees to it that the variables hold what the tables are."""
        if not self._state.backend.is_on_tpu:
            self.build()
            self._flush_eagerly()
            return
        if not _tf_private.in_save_context():
            raise RuntimeError(
                f"Unable to retrieve `{what}` under TPUStrategy: the rows are "
                "on the TPU. Save a checkpoint, and restore it into a "
                "TPUEmbedding that was created under another strategy.")
        self._check_built(what)

    def _host_backend(self, method: str) -> host_backend.HostBackend:
        self._check_built(method)
        backend = self._state.backend
        if backend.is_on_tpu:
            raise RuntimeError(
                f"`{method}` is of the host engine; a TPU keeps its steps to "
                "itself.")
        return backend

    def _flush_eagerly(self):
        # While a function is traced its reads see what has landed by then;
        # and one that is exported must not hold an op of ours.
        if tf.executing_eagerly():
            self._state.backend.flush()

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # Whatever is saved asks for this first.
        if hasattr(self, "_state"):
            if self._state.backend.is_on_tpu:
                self._state.backend.sync.note_walk()
            else:
                self._flush_eagerly()
        return super()._trackable_children(save_type, **kwargs)

    def _tables(self):
        return zip(self._state.table_configs, self._state.spec.tables)

    def _load_variables(self):
        """Sends the variables to the TPU, as of TensorFlow's class.

        Its restore calls this, of a checkpoint that it has written.
        """
        if self._state.backend.is_on_tpu:
            self._state.backend.sync.load()

    def _retrieve_variables(self):
        """Brings the variables up to date, as of TensorFlow's class."""
        if self._state.backend.is_on_tpu:
            self._state.backend.sync.retrieve()

    @property
    def _verify_output_shapes_on_enqueue(self) -> bool:
        """Whether `enqueue` checks shapes; programs switch it off."""
        return getattr(self._state.backend, "checks_shapes", True)

    @_verify_output_shapes_on_enqueue.setter
    def _verify_output_shapes_on_enqueue(self, value: bool):
        # The host engine's checks are cheap and protect memory: they stay.
        if self._state.backend.is_on_tpu:
            self._state.backend.checks_shapes = value

    def _check_can_step(self, method: str):
        if self._state.is_refused:
            raise RuntimeError(
                f"`{method}` is not valid when TPUEmbedding(engine=\"tpu\") is "
                "not created under a TPUStrategy; leave `engine` out to step "
                "on the host.")
        if not self._state.backend.is_on_tpu:
            _check_not_exported(method)

    def _check_built(self, method: str):
        self._check_can_step(method)
        if not self._state.backend.is_built:
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
        backend = self._state.backend
        if not backend.is_built:
            return None
        if backend.is_on_tpu:
            backend.sync.note_restore()
        else:
            self._flush_eagerly()
            backend.check_idle()
        if path is not None:
            restore_check.check_shapes(path, "_variables", self._variables)
        return None


def _check_tpu_arguments(
    spec: config.EmbeddingSpec, partitioner: Any, out_of_range: str,
):
    for table in spec.tables:
        if table.is_half:
            raise ValueError(
                "Argument `table_dtypes` must be float32 under TPUStrategy. "
                f"Received: {table.dtype} (table {table.name!r}).")
    if partitioner is not None:
        raise ValueError(
            "Argument `partitioner` must be None under TPUStrategy, whose "
            f"hosts divide the tables. Received: {partitioner!r}.")
    if out_of_range != "error":
        raise ValueError(
            "Argument `out_of_range` must be \"error\" under TPUStrategy: a "
            f"TPU does neither drop nor clip ids. Received: {out_of_range!r}.")


def _check_not_exported(method: str):
    """Refuses a step in a graph that would need this package to be loaded."""
    if _tf_private.in_save_context():
        raise RuntimeError(
            f"`{method}` cannot be exported: a SavedModel must load without "
            "tf_layoutmap. Serve by `serving_embedding_lookup`, and keep "
            "functions that train out of the attributes of what is saved.")
