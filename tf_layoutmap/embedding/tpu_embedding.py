"""`TPUEmbedding`: the Cloud TPU embedding API over a TPU, servers or the host.

It is made and built here; the modules of `api` have the methods of each use.
Whatever differs between the three is in their backends.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import backend as embedding_backend
from tf_layoutmap.embedding import inputs, replicas, serving, tables
from tf_layoutmap.embedding.checkpointing import CheckpointHooks
from tf_layoutmap.embedding.divided import backend as divided_backend
from tf_layoutmap.embedding.host import backend as host_backend
from tf_layoutmap.embedding.host import multi_process
from tf_layoutmap.embedding.servers import backend as servers_backend
from tf_layoutmap.embedding.spec import config, open_tables
from tf_layoutmap.embedding.spec import table_dtypes as dtypes
from tf_layoutmap.embedding.state import EmbeddingState, StepMethods
from tf_layoutmap.embedding.table_access import TableAccess
from tf_layoutmap.embedding.tpu import backend as tpu_backend
from tf_layoutmap.embedding.tpu import config_proto
from tf_layoutmap.serving import report
from tf_layoutmap.vocabulary import first_values, open_vocabulary

_WIRE_DTYPES = ("float32", "bfloat16")

# AutoGraph would rewrite all of this file and what it calls, at each trace.
_as_written = tf.autograph.experimental.do_not_convert


class TPUEmbedding(StepMethods, TableAccess, CheckpointHooks, tf.Module):
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

    Created under `ParameterServerStrategy` the tables are on its servers, and
    each worker takes steps of its own, in the functions that a
    `ClusterCoordinator` or a `tlm.ps.Run` schedules. With one worker the
    numbers are those of the host engine; with several, rows may be some
    updates old when their gradients arrive (`stats`).

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

    # Counts the steps of learning rate schedules; a layer that has one sets it.
    schedule_updates: tf.Variable

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        pipeline_execution_with_tensor_core: bool = False,
        *,
        partitioner: tables.Partitioner | None = None,
        out_of_range: str = "error",
        engine: str = "auto",
        table_dtypes: Any = None,
        rounding_seed: int = 0,
        vocabularies: Mapping[Any, open_vocabulary.OpenVocabulary] | None = (
            None
        ),
        wire_dtype: str = "float32",
        sparse_core_embedding_config: Any = None,
        over_processes: str = "copied",
        order: str = "exact",
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
            Under `ParameterServerStrategy` shards are put where the fewest
            bytes are; None is its `variable_partitioner`, or without one a
            shard of 256 KiB or more for each server.
          out_of_range: What becomes of an id that is no row of its table:
            `"error"`, `"drop"` (as if it were not there) or `"clip"` (the
            nearest row). `stats` counts them. A TPU has `"error"` only, and
            inside `strategy.run` ids cannot be checked.
          engine: `"auto"`: the TPU under `TPUStrategy`, the servers under
            `ParameterServerStrategy`, else the host engine.
            `"host"`: the host engine. `"tpu"`: the TPU; under another strategy
            there are tables to serve and no steps, as of TensorFlow's class.
          table_dtypes: How rows are stored: `"float32"` (None), `"bfloat16"`
            or `"float16"`, for all tables, or by table name. Rows of 16 bits
            are looked up and updated as float32, then rounded to one of their
            two neighbours by chance, so that small updates are not lost on
            average; beyond the largest finite value they stay there. Slot
            variables are float32. A TPU has float32 only.
          rounding_seed: What that chance depends on, along with the table, the
            number of its updates, the row and the column.
          vocabularies: From names of tables, or their `TableConfig`, to the
            `tlm.OpenVocabulary` by which a table takes ids as they come: any
            int64, or strings. The `vocabulary_size` of such a table is the
            `capacity` of that, and its initializer one that draws a value at
            a time: uniform, normal, truncated normal or constant. Of a TPU,
            None.
          wire_dtype: How rows and gradients go from process to process under
            `ParameterServerStrategy`: `"float32"`, as they are, or
            `"bfloat16"`, half the bytes: a row that is looked up, and the sum
            of its gradients, become the nearest bfloat16, off by up to 2^-8
            of each value. Tables and slot variables stay what they are.
          sparse_core_embedding_config: Must be None: SparseCores are not
            supported yet.
          over_processes: Of `MultiWorkerMirroredStrategy`: `"copied"`: each
            process has all tables. `"divided"`: each has as many rows of a
            table, and their slot variables; steps exchange rows and gradients
            with their owners. Tables cannot be read in the program then, only
            saved and restored.
          order: Of divided tables: `"exact"`: the gradients of a row are
            summed as in one process, to the same bits, and travel as they
            are. `"folded"`: each replica sums its own, and one gradient of a
            row travels; sums differ in the last bits.

        Raises:
          TypeError: If `feature_config` holds something else.
          ValueError: If a setting is invalid, or the engine does not carry
            it out.
          NotImplementedError: If the strategy in scope is not supported, or
            SparseCores are asked for.
        """
        super().__init__()
        if sparse_core_embedding_config is not None:
            raise NotImplementedError(
                "Argument `sparse_core_embedding_config` must be None: what "
                "tf.tpu.experimental.embedding.TPUEmbeddingV2 does on "
                "SparseCores is not supported yet. Received: "
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
        if partitioner is not None and not callable(partitioner):
            raise TypeError(
                "Argument `partitioner` must be a callable of `shape` and "
                f"`dtype`, or None. Received: {partitioner!r}."
            )
        strategy_replicas = replicas.Replicas()
        embedding_backend.check_over_processes(
            over_processes, order, strategy_replicas.has_processes
        )
        on_tpu = embedding_backend.is_tpu_strategy(strategy_replicas.strategy)
        engine = embedding_backend.choose_engine(
            engine, strategy_replicas.strategy
        )
        if wire_dtype != "float32" and engine != "servers":
            raise ValueError(
                'Argument `wire_dtype` must be "float32" unless under '
                "ParameterServerStrategy: without servers no rows travel. "
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
                "Argument `vocabularies` must be None on a TPU. Received: it "
                f"under {type(strategy_replicas.strategy).__name__}."
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
                if engine == "servers"
                else functools.partial(
                    divided_backend.DividedBackend, order=order
                )
                if over_processes == "divided"
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
        # A plain object: tf.Module would track, and save, a dict or a list.
        self._state = EmbeddingState(
            feature_config,
            spec,
            table_configs,
            strategy_replicas,
            out_of_range,
            backend,
            engine == "tpu" and not on_tpu,
        )
        if strategy_replicas.has_processes or strategy_replicas.is_on_servers:
            # Now, while all processes are known to be at the same line.
            self.build()

    @_as_written
    def build(
        self,
        per_replica_input_shapes: Any = None,
        per_replica_batch_size: int | None = None,
    ):
        """Creates the variables and the engine, once.

        `enqueue` does so when it is needed first. With sizes given, each
        `enqueue` must have them, and activations have a static shape.

        Args:
          per_replica_input_shapes: None, the batch size of every feature, or
            the structure of `feature_config` with the shape of each input,
            `[num_samples]` or `[..., ids per sample]`. Also a list with the
            `tf.TensorShape` of each feature, in the order of `tf.nest.flatten`.
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
                    "tables; do not use it in a tf.compat.v1 graph."
                )
            # String keys, so that the dicts can be saved. The names are those
            # of TensorFlow's class, whose checkpoints have this structure. A
            # restore that waits for them is carried out here.
            variables = backend.create_tables()
            self._check_deferred_restore(variables)
            self._variables = variables
            backend.start(self._variables)

    @_as_written
    def __call__(self, features: Any, weights: Any = None) -> Any:
        """Looks up outside of any step, by stock ops; see
        `serving_embedding_lookup`."""
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
            "Argument `partitioner` must be None under TPUStrategy, whose "
            f"hosts divide the tables. Received: {partitioner!r}."
        )
    if out_of_range != "error":
        raise ValueError(
            'Argument `out_of_range` must be "error" under TPUStrategy: a '
            f"TPU does neither drop nor clip ids. Received: {out_of_range!r}."
        )
