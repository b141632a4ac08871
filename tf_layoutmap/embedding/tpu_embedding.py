"""`TPUEmbedding`: the Cloud TPU embedding API over a TPU, servers or the host.

This module contains the constructor and `build`. The other methods are in
mixin classes: `state.StepMethods`, `table_access.TableAccess` and
`checkpointing.CheckpointHooks`. Code that depends on where the tables are
stored is in the backends.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import literals
from tf_layoutmap.embedding import backend as embedding_backend
from tf_layoutmap.embedding import inputs, replicas, serving
from tf_layoutmap.embedding.checkpointing import CheckpointHooks
from tf_layoutmap.embedding.divided import backend as divided_backend
from tf_layoutmap.embedding.host import backend as host_backend
from tf_layoutmap.embedding.host import multi_process
from tf_layoutmap.embedding.servers import backend as servers_backend
from tf_layoutmap.embedding.spec import config, open_tables, optimizer_specs
from tf_layoutmap.embedding.spec import table_dtypes as dtypes
from tf_layoutmap.embedding.state import EmbeddingState, StepMethods
from tf_layoutmap.embedding.table_access import TableAccess
from tf_layoutmap.embedding.tpu import backend as tpu_backend
from tf_layoutmap.embedding.tpu import config_proto
from tf_layoutmap.serving import report
from tf_layoutmap.vocabulary import first_values, open_vocabulary

if TYPE_CHECKING:
    from tf_layoutmap._core.types import (
        DTypeLike,
        FeatureConfigs,
        Features,
        Nested,
        ShapeLike,
        ShardCounts,
        TableKey,
    )

_WIRE_DTYPES = ("float32", "bfloat16")

# Without this decorator, AutoGraph would convert the methods of this module
# and all functions that they call, in each trace.
_no_autograph = tf.autograph.experimental.do_not_convert


class TPUEmbedding(StepMethods, TableAccess, CheckpointHooks, tf.Module):
    """Embedding tables that apply their own optimizers.

    The interface is the same as in
    `tf.tpu.experimental.embedding.TPUEmbedding`. An object that is created
    under `TPUStrategy` behaves like an object of TensorFlow's class and runs
    the same operations. Otherwise the tables are stored on the host and the
    host engine updates them with the semantics of the TPU: the gradients of a
    row are summed over features, replicas and samples, then each row that was
    looked up gets one update.

    A step consists of `enqueue`, `dequeue` and `apply_gradients`, called in
    this order on each replica. Several steps may be enqueued ahead. Steps run
    eagerly, in `tf.function`, and under `OneDeviceStrategy`,
    `MirroredStrategy`, `MultiWorkerMirroredStrategy` and `TPUStrategy`, where
    `dequeue` and `apply_gradients` are called inside `strategy.run`. Gradients
    are not divided by the number of replicas.

    Under `ParameterServerStrategy` the tables are stored on its servers, and
    each worker runs separate steps, in the functions that a
    `ClusterCoordinator` or a `tlm.ps.Run` schedules. With one worker, results
    match the host engine. With several workers, the servers may have applied
    other updates between the lookup of a row and the arrival of its
    gradients; `stats` reports how many.

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
    not saved. A restore while steps are in flight raises an error.
    """

    # Step count of the learning rate schedules. A layer with a schedule sets
    # this attribute.
    schedule_updates: tf.Variable

    def __init__(
        self,
        feature_config: FeatureConfigs,
        optimizer: optimizer_specs.TableOptimizer | None,
        pipeline_execution_with_tensor_core: bool = False,
        *,
        partitioner: ShardCounts | None = None,
        out_of_range: literals.OutOfRange = "error",
        engine: literals.Engine = "auto",
        table_dtypes: DTypeLike | Mapping[TableKey, DTypeLike] | None = None,
        rounding_seed: int = 0,
        vocabularies: Mapping[TableKey, open_vocabulary.OpenVocabulary]
        | None = None,
        wire_dtype: literals.WireDtype = "float32",
        sparse_core_embedding_config: None = None,
        over_processes: literals.OverProcesses = "copied",
        order: literals.Order = "exact",
    ):
        """Reads the configuration; `build` creates the variables.

        Args:
          feature_config: Nested structure of
            `tf.tpu.experimental.embedding.FeatureConfig`. The structure and
            its tables are not changed. The name of a table defaults to
            `table_{i}`.
          optimizer: Default optimizer, for tables whose `TableConfig` has
            none: one of `tf.tpu.experimental.embedding` (`SGD`, `Adagrad`,
            `AdagradMomentum`, `Adam`, `FTRL`) or, on the host, one of
            `tf_layoutmap.optimizers` (`RowwiseAdagrad`, `LAMB`). None for
            tables that are only used for serving.
          pipeline_execution_with_tensor_core: Whether lookups are one step
            behind, as on a TPU whose two kinds of core run in parallel: a
            step reads rows that contain all updates except the last one.
            `flush` applies the last update.
          partitioner: Callable that returns the number of shards of a table,
            such as
            `tf_layoutmap.partition.FixedShardsPartitioner(num_shards=3)`.
            Under `ParameterServerStrategy` a shard is placed on the server
            with the fewest bytes; None means the `variable_partitioner` of
            the strategy or, if it has none, one shard of at least 256 KiB
            for each server.
          out_of_range: How ids outside of their table are handled: `"error"`
            raises, `"drop"` ignores the id, `"clip"` uses the nearest row.
            `stats` counts such ids. A TPU supports `"error"` only, and does
            not check ids inside `strategy.run`.
          engine: `"auto"`: the TPU under `TPUStrategy`, the servers under
            `ParameterServerStrategy`, otherwise the host engine.
            `"host"`: the host engine. `"tpu"`: the TPU; under another strategy
            the tables can be used for serving but steps raise, as in
            TensorFlow's class.
          table_dtypes: Storage dtype of rows: `"float32"` (None), `"bfloat16"`
            or `"float16"`, for all tables or by table name. 16-bit rows are
            looked up and updated in float32, then each value is rounded
            stochastically to one of the two nearest values of the dtype, so
            that small updates are not lost on average. Values are limited to
            the largest finite value of the dtype. Slot variables are float32. A
            TPU supports float32 only.
          rounding_seed: Seed of the stochastic rounding, which also depends
            on the table, the number of its updates, the row and the column.
          vocabularies: Mapping from table names, or `TableConfig` objects, to
            a `tlm.OpenVocabulary`. Such a table accepts any int64 or string
            as an id. Its `vocabulary_size` must equal the `capacity` of the
            vocabulary, and its initializer must compute each value
            separately: uniform, normal, truncated normal or constant. Must be
            None on a TPU.
          wire_dtype: Dtype in which rows and gradients are sent between
            processes under `ParameterServerStrategy`. `"float32"` sends them
            unchanged. `"bfloat16"` sends half the bytes: the values of each
            row that is looked up, and of the sum of its gradients, are rounded
            to the nearest bfloat16, with a relative error of up to 2^-8. The
            dtypes of tables and slot variables do not change.
          sparse_core_embedding_config: Must be None: SparseCores are not
            supported yet.
          over_processes: Placement under `MultiWorkerMirroredStrategy`.
            `"copied"`: each process stores all tables. `"sharded"`: each
            process stores an equal share of the rows of each table, and their
            slot variables; in a step, processes exchange rows and gradients.
            The program cannot read such tables; it can save and restore them.
          order: Summation of gradients for `over_processes="sharded"`.
            `"exact"`: all gradients of a row are sent to its owner and summed
            in the order of a single process, with bitwise identical results.
            `"folded"`: each replica sums its gradients of a row and sends the
            sum; results differ in the last bits.

        Raises:
          TypeError: If `feature_config` contains an object that is not a
            `FeatureConfig`.
          ValueError: If a setting is invalid, or the engine does not support
            it.
          NotImplementedError: If the strategy in scope is not supported, or
            `sparse_core_embedding_config` is passed.
        """
        super().__init__()
        if sparse_core_embedding_config is not None:
            raise NotImplementedError(
                "Argument `sparse_core_embedding_config` must be None: "
                "SparseCores, which "
                "tf.tpu.experimental.embedding.TPUEmbeddingV2 uses, are not "
                f"supported yet. Received: {sparse_core_embedding_config!r}."
            )
        if not isinstance(pipeline_execution_with_tensor_core, bool):
            raise TypeError(
                "Argument `pipeline_execution_with_tensor_core` must be a "
                f"bool. Received: {pipeline_execution_with_tensor_core!r}."
            )
        if out_of_range not in config.OUT_OF_RANGE:
            raise ValueError(
                "Argument `out_of_range` must be one of "
                f"{config.OUT_OF_RANGE}. Received: {out_of_range!r}."
            )
        if wire_dtype not in _WIRE_DTYPES:
            raise ValueError(
                f"Argument `wire_dtype` must be one of {_WIRE_DTYPES}. "
                f"Received: {wire_dtype!r}."
            )
        if partitioner is not None and not callable(partitioner):
            raise TypeError(
                "Argument `partitioner` must be a callable of `shape` and "
                f"`dtype`, or None. Received: {partitioner!r}."
            )
        strategy_replicas = replicas.Replicas()
        over_processes = embedding_backend.read_over_processes(
            over_processes, order, strategy_replicas.has_processes
        )
        on_tpu = embedding_backend.is_tpu_strategy(strategy_replicas.strategy)
        backend_name = embedding_backend.choose_engine(
            engine, strategy_replicas.strategy
        )
        if wire_dtype != "float32" and backend_name != "servers":
            raise ValueError(
                'Argument `wire_dtype` must be "float32" unless under '
                "ParameterServerStrategy: without servers no rows are sent. "
                f"Received: {wire_dtype!r}."
            )
        named_features = inputs.flatten_with_paths(feature_config)
        spec, table_configs = config.read_feature_config(
            named_features, optimizer, takes_slot_fn=on_tpu
        )
        spec = dtypes.with_dtypes(spec, table_configs, table_dtypes)
        spec = open_tables.with_vocabularies(
            spec,
            table_configs,
            vocabularies,
            open_vocabulary.OpenVocabulary,
            first_values.read_initializer,
        )
        if spec.has_open_tables and on_tpu:
            raise NotImplementedError(
                "Argument `vocabularies` must be None on a TPU. Received: "
                f"vocabularies={vocabularies!r} under "
                f"{type(strategy_replicas.strategy).__name__}."
            )
        if on_tpu:
            _check_tpu_arguments(spec, partitioner, out_of_range)
            backend = tpu_backend.TPUBackend(
                feature_config,
                config_proto.read_spec(
                    spec,
                    [one for _, one in named_features],
                    table_configs,
                    optimizer,
                ),
                strategy_replicas,
                pipeline_execution_with_tensor_core,
            )
        else:
            if strategy_replicas.has_processes:
                multi_process.check_agreed_settings(
                    strategy_replicas.strategy,
                    multi_process.describe_settings(
                        spec,
                        {
                            "over_processes": over_processes,
                            "order": order,
                            "out_of_range": out_of_range,
                            "pipeline_execution_with_tensor_core": pipeline_execution_with_tensor_core,  # noqa: E501
                            "rounding_seed": rounding_seed,
                        },
                    ),
                )
            kind = (
                functools.partial(
                    servers_backend.ServersBackend, wire_dtype=wire_dtype
                )
                if backend_name == "servers"
                else functools.partial(
                    divided_backend.DividedBackend, order=order
                )
                if over_processes == "sharded"
                else host_backend.HostBackend
            )
            backend = kind(
                feature_config,
                spec,
                strategy_replicas,
                partitioner=partitioner,
                out_of_range=out_of_range,
                is_pipelined=pipeline_execution_with_tensor_core,
                rounding_seed=dtypes.read_seed(rounding_seed),
            )
        # The state is a plain object, because tf.Module would track and save
        # a dict or a list.
        self._state = EmbeddingState(
            feature_config,
            spec,
            table_configs,
            strategy_replicas,
            out_of_range,
            backend,
            backend_name == "tpu" and not on_tpu,
        )
        if strategy_replicas.has_processes or strategy_replicas.is_on_servers:
            # All processes must create the tables together, and all of them
            # run the constructor.
            self.build()

    @_no_autograph
    def build(
        self,
        per_replica_input_shapes: Nested[ShapeLike] | None = None,
        per_replica_batch_size: int | None = None,
    ) -> None:
        """Creates the variables and the engine, once.

        The first `enqueue` calls `build` if the program has not called it. If
        sizes are passed, each `enqueue` must match them, and activations have
        static shapes.

        Under `TPUStrategy` the shapes of all activations must be known when
        `build` is called, and `build` initializes the TPU.

        Args:
          per_replica_input_shapes: None, the batch size of every feature, or
            the structure of `feature_config` with the shape of each input,
            `[num_samples]` or `[..., ids per sample]`. A list with the
            `tf.TensorShape` of each feature, in `tf.nest.flatten` order, is
            also accepted.
          per_replica_batch_size: The batch size of every feature.

        Raises:
          ValueError: If a shape has another rank, or sizes differ from an
            earlier `build`, or a TPU requires a size that is not known.
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
        # Variables are created eagerly even while a function is traced,
        # because they outlive the function.
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(
                    "TPUEmbedding requires eager execution to create its "
                    "tables; do not use it in a tf.compat.v1 graph."
                )
            # The keys are strings, so that the dicts can be saved. Names and
            # structure match the checkpoints of TensorFlow's class. A deferred
            # restore runs when `_variables` is assigned.
            variables = backend.create_tables()
            self._check_deferred_restore(variables)
            self._variables = variables
            backend.start(self._variables)

    @_no_autograph
    def __call__(
        self, features: Features, weights: Features | None = None
    ) -> Any:
        """Returns activations outside of any step, computed by stock ops.

        See `serving_embedding_lookup`.
        """
        stand_in = report.placeholder_of(self)
        if stand_in is not None:
            return stand_in(features, weights)
        return serving.serving_embedding_lookup(
            features,
            weights,
            self.embedding_tables,
            self._state.feature_config,
            out_of_range=self._state.out_of_range,
            vocabularies=self.vocabularies,
        )


def _check_tpu_arguments(
    spec: config.EmbeddingSpec,
    partitioner: Any,
    out_of_range: str,
):
    for table in spec.tables:
        if table.is_half:
            raise ValueError(
                "Argument `table_dtypes` must be float32 under TPUStrategy. "
                f"Received: {table.dtype} (table {table.name!r})."
            )
    if partitioner is not None:
        raise ValueError(
            "Argument `partitioner` must be None under TPUStrategy, which "
            f"shards the tables over its hosts. Received: {partitioner!r}."
        )
    if out_of_range != "error":
        raise ValueError(
            'Argument `out_of_range` must be "error" under TPUStrategy: a '
            "TPU does not drop or clip ids. "
            f"Received: out_of_range={out_of_range!r}."
        )
