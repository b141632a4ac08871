"""`TPUEmbedding`: the Cloud TPU embedding API for TPUs, servers and hosts.

`EmbeddingBase` contains the constructor and `build`, which `TPUEmbeddingV2`
also uses. Three mixin classes contain all other methods: `state.StepMethods`,
`table_access.TableAccess` and `checkpointing.CheckpointHooks`. The backends
contain all code that depends on where the tables are stored.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import tensorflow as tf

from tf_layoutmap._core import checks, literals, patches, placeholders
from tf_layoutmap.embedding import backend as embedding_backend
from tf_layoutmap.embedding import (
    inputs,
    replicas,
    serving,
    tables,
)
from tf_layoutmap.embedding.checkpointing import CheckpointHooks
from tf_layoutmap.embedding.configs import config, open_tables, optimizer_specs
from tf_layoutmap.embedding.configs import table_dtypes as dtypes
from tf_layoutmap.embedding.host import backend as host_backend
from tf_layoutmap.embedding.state import EmbeddingState, StepMethods
from tf_layoutmap.embedding.table_access import LayerAccess, TableAccess
from tf_layoutmap.vocabulary import first_values, open_vocabulary, shared

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

# Without this decorator, each trace would run AutoGraph on the methods of this
# module and on all functions that they call.
_no_autograph = tf.autograph.experimental.do_not_convert


class EmbeddingOptions(TypedDict, total=False):
    """Keyword arguments of `TPUEmbedding` that `TPUEmbeddingV2` also has."""

    partitioner: ShardCounts | None
    out_of_range: literals.OutOfRange
    engine: literals.Engine
    table_dtypes: DTypeLike | Mapping[Any, DTypeLike] | None
    rounding_seed: int
    vocabularies: Mapping[Any, open_vocabulary.OpenVocabulary | Any] | None
    wire_dtype: literals.WireDtype
    over_processes: literals.OverProcesses
    gradient_aggregation: literals.GradientAggregation


class EmbeddingBase(TableAccess, CheckpointHooks, tf.Module):
    """Base class of `TPUEmbedding` and `TPUEmbeddingV2`.

    The class contains the constructor and `build`. Subclasses contain the
    methods of a step.
    """

    # Number of updates, for learning rate schedules. A layer with a schedule
    # sets this attribute.
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
        vocabularies: Mapping[
            TableKey, open_vocabulary.OpenVocabulary | TableKey
        ]
        | None = None,
        wire_dtype: literals.WireDtype = "float32",
        sparse_core_embedding_config: None = None,
        over_processes: literals.OverProcesses = "replicated",
        gradient_aggregation: literals.GradientAggregation = "exact",
    ):
        """Reads and checks the configuration.

        Args:
          feature_config: Nested structure of
            `tf.tpu.experimental.embedding.FeatureConfig`. The configuration
            objects are not changed. The default name of a table is `table_{i}`.
          optimizer: Optimizer of all tables whose `TableConfig` has no
            optimizer. All engines support the optimizers of
            `tf.tpu.experimental.embedding` (`SGD`, `Adagrad`,
            `AdagradMomentum`, `Adam`, `FTRL`). The host engine also supports
            the optimizers of `tf_layoutmap.optimizers` (`RowwiseAdagrad`,
            `LAMB`). Pass None if the tables are only used for serving.
          pipeline_execution_with_tensor_core: Whether the lookup of a step runs
            before the update of the previous step, as on a TPU whose two types
            of cores run in parallel. A training step then reads rows that
            contain all updates except the last update. `flush` applies the last
            update.
          partitioner: Callable that returns the number of shards of a table,
            such as
            `tlm.partitioners.FixedShardsPartitioner(num_shards=3)`.
            Under `ParameterServerStrategy`, each shard is placed on the server
            with the fewest bytes. The default is then the
            `variable_partitioner` of the strategy. If the strategy has no
            partitioner, a table has at most one shard per server, and is not
            split into shards below 256 KiB.
          out_of_range: How ids outside of their table are handled: `"error"`
            raises an error, `"drop"` ignores the id, and `"clip"` uses the
            nearest row. `stats` counts these ids. A TPU supports only
            `"error"`, and does not check ids inside `strategy.run`.
          engine: Engine that runs the steps. `"auto"` selects the servers under
            `ParameterServerStrategy`. Under `TPUStrategy`, it selects the TPU
            if the TPU has an embedding engine (v2 to v4), and otherwise the
            host engine. Under other strategies, it selects the host engine.
            `"host"` selects the host engine, also under `TPUStrategy`: the
            tables are then in the memory of the host, which passes activations
            to the TPU and receives gradients in each step. `"tpu"` selects the
            TPU. With `"tpu"` under another strategy, programs can use the
            tables for serving, but steps raise an error, as in TensorFlow's
            class.
          table_dtypes: Storage dtype of rows: `"float32"` (the default),
            `"bfloat16"` or `"float16"`. Pass one dtype for all tables, or a
            mapping from table names to dtypes. Lookups and updates of 16-bit
            rows are computed in float32. After an update, each value is rounded
            stochastically to one of the two nearest values of the dtype.
            Therefore small updates are not lost on average. Values are clipped
            to the finite range of the dtype. Slot variables are float32. A TPU
            supports only float32.
          rounding_seed: Seed of the stochastic rounding. The rounding also
            depends on the table, its number of updates, the row and the column.
          vocabularies: Mapping from tables to `tlm.vocabulary.OpenVocabulary`
            objects. Tables are table names or `TableConfig` objects. A table
            with a vocabulary accepts any int64 or string as an id. Tables can
            share one vocabulary. In this case, the value of each further table
            is the first table, for example `{"deep":
            tlm.vocabulary.OpenVocabulary(1000), "wide": "deep"}`. A key then
            has one row in each of these tables. The `vocabulary_size` of the
            table must equal the `capacity` of the vocabulary. The initializer
            must be uniform, normal, truncated normal or constant, because the
            initial values of each key are computed separately. For tables on a
            TPU, `vocabularies` must be None.
          wire_dtype: Dtype of rows and gradients in messages between processes
            under `ParameterServerStrategy`. With `"float32"`, values are sent
            unchanged. With `"bfloat16"`, messages have half the size. Rows that
            are looked up, and the sums of their gradients, are then rounded to
            the nearest bfloat16, with a relative error of up to 2^-8. The
            dtypes of tables and slot variables do not change.
          sparse_core_embedding_config: Must be None. `tlm.TPUEmbeddingV2`
            supports SparseCores.
          over_processes: Placement of tables under
            `MultiWorkerMirroredStrategy`. With `"replicated"`, each process
            stores all tables. With `"sharded"`, each process stores an equal
            share of the rows and slot variables of each table, and of the keys
            of open vocabularies. The processes exchange keys, rows and
            gradients in each step. All processes must save and read tables
            together.
          gradient_aggregation: Order of gradient summation for
            `over_processes="sharded"`. With `"exact"`, replicas send all
            gradients of a row to the process that owns the row. The owner sums
            the gradients in the same order as a single process, so the results
            are bitwise identical. With `"local"`, each replica sums its
            gradients of a row, and sends only the sum. The results can differ
            from the results of a single process in the last bits.

        Raises:
          TypeError: If `feature_config` contains an object that is not a
            `FeatureConfig`.
          ValueError: If a setting is invalid, or if the engine does not support
            a setting.
          NotImplementedError: If the strategy in scope is not supported, or if
            the tables are on the host beside a TPU whose replicas have several
            cores.
        """
        super().__init__()
        if sparse_core_embedding_config is not None:
            raise ValueError(
                "Argument `sparse_core_embedding_config` must be None: use "
                "tlm.TPUEmbeddingV2 for SparseCores. Received: "
                f"{sparse_core_embedding_config!r}."
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
        if partitioner is not None:
            checks.check_partitioner(partitioner)
        strategy_replicas = replicas.Replicas()
        over_processes = embedding_backend.read_over_processes(
            over_processes,
            gradient_aggregation,
            strategy_replicas.has_processes,
        )
        beside_tpu = embedding_backend.is_tpu_strategy(
            strategy_replicas.strategy
        )
        backend_name = embedding_backend.choose_engine(
            engine, strategy_replicas.strategy
        )
        on_tpu = beside_tpu and backend_name == "tpu"
        if beside_tpu and not on_tpu:
            _check_one_core_per_replica(strategy_replicas.strategy)
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
                "Argument `vocabularies` must be None if the tables are on a "
                'TPU; pass engine="host" for tables on the host beside the '
                f"TPU. Received: vocabularies={vocabularies!r} under "
                f"{type(strategy_replicas.strategy).__name__}."
            )
        if on_tpu:
            from tf_layoutmap.embedding.tpu import backend as tpu_backend
            from tf_layoutmap.embedding.tpu import config_proto

            _check_tpu_arguments(spec, partitioner, out_of_range)
            backend = tpu_backend.TPUBackend(
                feature_config,
                config_proto.read_spec(
                    spec,
                    [feature for _, feature in named_features],
                    table_configs,
                    optimizer,
                ),
                strategy_replicas,
                pipeline_execution_with_tensor_core,
            )
        else:
            if strategy_replicas.has_processes:
                from tf_layoutmap.embedding.host import agreed_settings

                agreed_settings.check_agreed_settings(
                    strategy_replicas.strategy,
                    agreed_settings.describe_settings(
                        spec,
                        {
                            "over_processes": over_processes,
                            "gradient_aggregation": gradient_aggregation,
                            "out_of_range": out_of_range,
                            "pipeline_execution_with_tensor_core": pipeline_execution_with_tensor_core,  # noqa: E501
                            "rounding_seed": rounding_seed,
                        },
                    ),
                )
            backend = _host_backend(
                "servers"
                if backend_name == "servers"
                else "sharded"
                if over_processes == "sharded"
                else "tpu"
                if beside_tpu
                else "host",
                wire_dtype=wire_dtype,
                gradient_aggregation=gradient_aggregation,
            )(
                feature_config,
                spec,
                strategy_replicas,
                partitioner=partitioner,
                out_of_range=out_of_range,
                is_pipelined=pipeline_execution_with_tensor_core,
                rounding_seed=dtypes.read_seed(rounding_seed),
            )
        # The state is a plain object, because `tf.Module` would track a dict or
        # a list, and save its contents.
        self._state = EmbeddingState(
            feature_config,
            spec,
            table_configs,
            strategy_replicas,
            out_of_range,
            backend,
            backend_name == "tpu" and not beside_tpu,
        )
        if strategy_replicas.has_processes or strategy_replicas.is_on_servers:
            # All processes must create the tables together. All processes run
            # the constructor, so the constructor creates the tables.
            self.build()

    def __repr__(self) -> str:
        if "_state" not in vars(self):
            return super().__repr__()
        tables = [
            f"{table.name}: {table.num_rows} x {table.dim} {table.dtype}, "
            + (table.optimizer.name if table.optimizer else "no optimizer")
            for table in self._state.spec.tables
        ]
        shown = [*tables[:5], *["..."] * (len(tables) > 5)]
        return (
            f"<{type(self).__name__} of {len(tables)} "
            f"table{'s' * (len(tables) != 1)} "
            f"({'; '.join(shown)})>"
        )

    @_no_autograph
    def build(
        self,
        per_replica_input_shapes: Nested[ShapeLike] | None = None,
        per_replica_batch_size: int | None = None,
    ) -> None:
        """Creates the variables and the engine, if they do not exist yet.

        If a program does not call `build`, the first `enqueue` builds the
        embedding. If sizes are passed, the inputs of each `enqueue` must have
        these sizes, and activations have static shapes.

        Under `TPUStrategy`, `build` initializes the TPU. The shapes of all
        activations must be known before this call.

        Args:
          per_replica_input_shapes: None, the batch size of every feature, or
            the shape of each input in the structure of `feature_config`. The
            shape of an input is `[num_samples]` or `[..., ids per sample]`. A
            list with one `tf.TensorShape` per feature, in `tf.nest.flatten`
            order, is also accepted.
          per_replica_batch_size: None, or the batch size of every feature.

        Raises:
          ValueError: If a shape has another rank, if sizes differ from an
            earlier call of `build`, or if a TPU requires a size that is not
            known.
          RuntimeError: If the call is in a graph of TensorFlow 1, or if the TPU
            is already initialized for another embedding.
        """
        backend = self._state.backend
        backend.declare(per_replica_input_shapes, per_replica_batch_size)
        if not backend.is_built:
            self._create()

    def _create(self):
        """Creates the variables and starts the backend."""
        backend = self._state.backend
        patches.ensure("function_calls")
        # The variables exist longer than a function that is being traced.
        # Therefore the variables are always created eagerly.
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(
                    "TPUEmbedding requires eager execution to create its "
                    "tables; do not use it in a tf.compat.v1 graph."
                )
            # The keys of the dicts are strings, because checkpoints require
            # strings. The names and the structure match the checkpoints of
            # TensorFlow's class. The assignment to `_variables` starts a
            # deferred restore.
            variables = backend.create_tables()
            self._check_deferred_restore(variables)
            self._finish_restore(variables)
            owners = open_tables.owners_by_name(self._state.spec)
            if owners:
                self._vocabulary_owners = tables.text_variable(
                    shared.encode_owners(owners),
                    shared.OWNERS.removeprefix("_"),
                )
            self._variables = variables
            backend.start(self._variables)
            if backend.strings:
                # The assignment makes checkpoints contain the strings.
                self._kept_strings = backend.strings


# Python's error for a missing argument contains this name.
EmbeddingBase.__init__.__qualname__ = "TPUEmbedding.__init__"


class TPUEmbedding(StepMethods, EmbeddingBase):
    """Embedding tables that a separate engine looks up and updates.

    The interface is the same as in
    `tf.tpu.experimental.embedding.TPUEmbedding`. Under `TPUStrategy`, an object
    of this class behaves like an object of TensorFlow's class, and runs the
    same operations, unless `engine` selects the host. Under other strategies,
    except `ParameterServerStrategy`, the host stores the tables, and the host
    engine updates the tables with the semantics of the TPU. First, the
    gradients of a row are summed over features, replicas and samples. Then each
    row that was looked up is updated once.

    In a step, each replica calls `enqueue`, `dequeue` and `apply_gradients`, in
    this order. A program can enqueue several steps before it dequeues the first
    step. Steps run eagerly or in a `tf.function`. Under `OneDeviceStrategy`,
    `MirroredStrategy`, `MultiWorkerMirroredStrategy` and `TPUStrategy`, call
    `dequeue` and `apply_gradients` inside `strategy.run`. Gradients are not
    divided by the number of replicas.

    Under `ParameterServerStrategy`, the servers store the tables. Each worker
    runs separate steps, in functions that a `ClusterCoordinator` or a
    `tlm.ps.Run` schedules. With one worker, the results match the results of
    the host engine. With several workers, a server can apply other updates
    between the lookup of a row and the update with its gradients. `stats`
    reports the number of these updates.

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

    `tf.train.Checkpoint(embedding=embedding)` saves tables and slot variables.
    A program can restore a checkpoint before or after `build`. Steps in flight
    are not saved. If steps are in flight, a restore raises an error.
    """

    @_no_autograph
    def __call__(
        self, features: Features, weights: Features | None = None
    ) -> Any:
        """Looks up activations with TensorFlow's own ops, outside of steps.

        See `serving_embedding_lookup`. If tables are sharded over processes,
        all processes must make the call together, inside `strategy.run` in a
        `tf.function`.
        """
        return self._look_up(features, weights, may_fuse=False)

    @_no_autograph
    def _look_up(self, features: Any, weights: Any, *, may_fuse: bool) -> Any:
        """Does the same as a call; see `serving.look_up`."""
        stand_in = placeholders.placeholder_of(self)
        if stand_in is not None:
            return stand_in(features, weights)
        if LayerAccess(self).is_sharded:
            return tf.nest.pack_sequence_as(
                self._state.feature_config,
                LayerAccess(self).look_up(features, weights),
            )
        return serving.look_up(
            features,
            weights,
            self.embedding_tables,
            self._state.feature_config,
            self._state.out_of_range,
            self.vocabularies,
            may_fuse=may_fuse,
        )


def _host_backend(
    kind: str, *, wire_dtype: str, gradient_aggregation: str
) -> Any:
    """Returns a function that creates a backend with tables on hosts.

    Most programs use only `HostBackend`. The modules of the other backends are
    imported when they are used, because their import takes as long as the
    import of all other modules that an embedding requires.
    """
    if kind == "servers":
        from tf_layoutmap.embedding.servers.backend import ServersBackend

        return functools.partial(ServersBackend, wire_dtype=wire_dtype)
    if kind == "sharded":
        from tf_layoutmap.embedding.process_sharded.backend import (
            ProcessShardedBackend,
        )

        return functools.partial(
            ProcessShardedBackend, gradient_aggregation=gradient_aggregation
        )
    if kind == "tpu":
        from tf_layoutmap.embedding.host.tpu_backend import HostBackendOfTPU

        return HostBackendOfTPU
    return host_backend.HostBackend


def _check_one_core_per_replica(strategy: tf.distribute.Strategy):
    from tf_layoutmap.embedding.tpu import config_proto

    num_cores = config_proto.num_cores_per_replica(strategy)
    if num_cores is not None and num_cores > 1:
        raise NotImplementedError(
            "Each replica of a TPUStrategy must have one core if the tables "
            "are on the host; create the strategy without a device assignment. "
            f"Received: {num_cores} cores per replica."
        )


_OR_ON_HOST = 'unless engine="host" selects tables on the host'


def _check_tpu_arguments(
    spec: config.EmbeddingSpec,
    partitioner: Any,
    out_of_range: str,
):
    for table in spec.tables:
        if table.is_half:
            raise ValueError(
                "Argument `table_dtypes` must be float32 under TPUStrategy, "
                f"{_OR_ON_HOST}. Received: {table.dtype} "
                f"(table {table.name!r})."
            )
    if partitioner is not None:
        raise ValueError(
            "Argument `partitioner` must be None under TPUStrategy, which "
            f"shards the tables over its hosts, {_OR_ON_HOST}. "
            f"Received: {partitioner!r}."
        )
    if out_of_range != "error":
        raise ValueError(
            'Argument `out_of_range` must be "error" under TPUStrategy, '
            f"{_OR_ON_HOST}: a TPU does not drop or clip ids. "
            f"Received: out_of_range={out_of_range!r}."
        )
