"""The ops of the host engine as methods (docs/ops.md, "The host engine").

`HostEngine` has a method for each op. Other functions in this module convert
specs and batches to attributes and inputs of the ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import freed_gradients, ops
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import packing, tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import counts, open_tables
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import kept_strings, key_rows

# The inputs of a step: a sequence with one entry per feature, in the order of
# the spec, or a packed batch.
StepInputs = Sequence[embedding_inputs.FeatureIds] | packing.PackedIds


def config_attrs(
    spec: config.EmbeddingSpec,
    variables: dict[str, dict[str, Any]],
    *,
    out_of_range: str,
    rounding_seed: int,
) -> dict[str, Any]:
    """Returns the op attributes that describe tables and features.

    Args:
      spec: Tables and features.
      variables: Variables by table name and variable name. The variable
        `"parameters"` contains the rows.
      out_of_range: How out-of-range ids are handled.
      rounding_seed: Seed for rounding the rows of 16-bit tables.
    """
    counts, offsets, placements = [], [], []
    for table in spec.tables:
        shards = tables.shards_of(variables[table.name][tables.PARAMETERS])
        counts.append(len(shards))
        offsets.extend(_offsets(shards))
        placements.append(
            "div"
            if table.vocabulary is None
            else RowPartition.from_sizes(
                [known_size(shard) for shard in shards]
            ).placement
        )
    return {
        "table_names": [table.title or table.name for table in spec.tables],
        "table_num_rows": [table.num_rows for table in spec.tables],
        "table_dims": [table.dim for table in spec.tables],
        "table_num_shards": counts,
        "table_placements": placements,
        "table_offsets": offsets,
        "table_optimizers": [
            table.optimizer.name if table.optimizer else "none"
            for table in spec.tables
        ],
        "feature_names": [feature.name for feature in spec.features],
        "feature_tables": [feature.table for feature in spec.features],
        "feature_combiners": [
            spec.table_of(feature).combiner for feature in spec.features
        ],
        "feature_max_sequence_lengths": [
            feature.max_sequence_length for feature in spec.features
        ],
        "out_of_range": out_of_range,
        "table_dtypes": [tf.as_dtype(table.dtype) for table in spec.tables],
        "rounding_seed": rounding_seed,
        **_quantization(spec.tables),
    }


def activation_attrs(spec: config.EmbeddingSpec) -> dict[str, Any]:
    """Returns attributes of ops that compute activations of all features."""
    features = spec.features
    return {
        "num_features": len(features),
        "dims": [spec.table_of(feature).dim for feature in features],
        "max_sequence_lengths": [
            feature.max_sequence_length for feature in features
        ],
    }


def batch_inputs(
    features: StepInputs, *, of_keys: bool = False
) -> dict[str, Any]:
    """Returns the inputs of an op that reads the ids of a batch."""
    if isinstance(features, packing.PackedIds):
        return {
            "ids": [features.ids],
            "splits": [tf.zeros([0], tf.int64)],
            "num_samples": tf.reshape(
                tf.cast(features.num_samples, tf.int64), [1]
            ),
            "weights": [features.weights],
            "packed": True,
            "mark": features.mark,
        }
    return embedding_inputs.combine(features, of_keys=of_keys)


def _offsets(shards: Sequence[tf.Variable]) -> list[int]:
    offsets = [0]
    for shard in shards:
        offsets.append(offsets[-1] + known_size(shard))
    return offsets


def _quantization(specs: Sequence[config.TableSpec]) -> dict[str, list]:
    """Returns the quantization attributes; 0 buckets mean no quantization."""
    if all(spec.quantization is None for spec in specs):
        return {}
    settings = [
        spec.quantization or config.QuantizationSpec(0.0, 0.0, 0)
        for spec in specs
    ]
    return {
        "table_num_buckets": [setting.num_buckets for setting in settings],
        "table_limits": [
            limit
            for setting in settings
            for limit in (setting.lower, setting.upper)
        ],
    }


# Shape of the mark that represents gradients of one replica. See
# cc/core/engine/marks.h.
MARK_SHAPE = (64, 8)


def mark_shape(num_replicas: int) -> tuple[int, int]:
    """Returns the shape of a sum of marks of all replicas."""
    rows, columns = MARK_SHAPE
    return (num_replicas * rows, columns)


def mark_of_replica(
    mark: tf.Tensor, replica: int | tf.Tensor, num_replicas: int
) -> tf.Tensor:
    """Returns a mark of one replica in the shape of a sum of marks.

    The marks of all replicas are in different rows, so that a program can sum
    or average marks over replicas. The other rows contain -0, like the unused
    elements of a mark.
    """
    if num_replicas == 1:
        return mark
    is_own = tf.one_hot(replica, num_replicas, True, False, dtype=tf.bool)
    return tf.reshape(
        tf.where(is_own[:, tf.newaxis, tf.newaxis], mark[tf.newaxis], -0.0),
        mark_shape(num_replicas),
    )


class OpenLookup(NamedTuple):
    """An open lookup, which can receive gradients.

    Attributes:
      engine: Handle of the engine, as a tensor in the graph of the lookup. The
        gradient function of a loop or condition can capture only tensors of
        that graph.
      tokens: Dict from replica to a scalar int64 token. The dict contains all
        replicas whose steps the caller runs.
    """

    engine: tf.Tensor
    tokens: dict[int, tf.Tensor]


class RowLookup(NamedTuple):
    """An open lookup whose gradients the caller holds.

    Attributes:
      engine: Handle of the engine, as a tensor in the graph of the lookup.
      token: Scalar int64 token.
      rows: `[num_samples]` int64, the row of each sample. -1 if the sample has
        no key, or if its key has no row.
    """

    engine: tf.Tensor
    token: tf.Tensor
    rows: tf.Tensor


class HostEngine:
    """The host engine of one embedding, with its steps in flight.

    The engine does not store rows and slot variables. Each call passes the
    variables to the op. The engine is deleted together with its handle.
    Checkpoints do not contain the engine.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        *,
        num_replicas: int,
        is_pipelined: bool = False,
        out_of_range: str = "error",
        rounding_seed: int = 0,
        first_rows: Sequence[int] = (),
        vocabulary_buckets: Sequence[int] = (),
        reports_evicted: bool = True,
        in_processes: bool = False,
        strings: Mapping[str, kept_strings.KeptStrings] | None = None,
    ):
        """Creates the engine eagerly on the host.

        Args:
          spec: Tables and features.
          variables: Variables that `tables.create_tables` created for `spec`.
          num_replicas: Number of replicas that participate in each step.
          is_pipelined: Whether each update is applied after the lookup of the
            next step.
          out_of_range: How out-of-range ids are handled. One of
            `config.OUT_OF_RANGE`.
          rounding_seed: Seed for rounding the rows of 16-bit tables.
          first_rows: For each table that is a shard, the index of its first row
            in the unsharded table. By default, all indices are 0.
          vocabulary_buckets: For each table that is a shard of a table with an
            open vocabulary, the number of buckets of the full vocabulary,
            otherwise 0. By default, all numbers are 0.
          reports_evicted: Whether the engine calls `on_evict` of open
            vocabularies with evicted keys.
          in_processes: Whether other processes run the same steps.
          strings: The strings of vocabularies that keep strings, by the name
            of the table that owns the vocabulary.
        """
        self._spec = spec
        self._num_replicas = num_replicas
        self.is_pipelined = is_pipelined
        # This object stores variables, and reads their handles at each call, so
        # that traced functions capture the handles.
        self._shards = []
        self._slots = []
        self._rounding_steps = []
        for table in spec.tables:
            self._shards.extend(
                tables.shards_of(variables[table.name][tables.PARAMETERS])
            )
            for slot in table.slots:
                self._slots.extend(
                    tables.shards_of(variables[table.name][slot.name])
                )
            if tables.ROUNDING_STEPS in variables[table.name]:
                self._rounding_steps.append(
                    variables[table.name][tables.ROUNDING_STEPS]
                )
        self._keys = open_tables.OpenTables(
            spec,
            variables,
            reports_evicted=reports_evicted,
            in_processes=in_processes,
            strings=strings,
        )
        with tf.device(tables.HOST):
            self._handle = ops.create_host_engine(
                num_replicas=num_replicas,
                pipelined=is_pipelined,
                table_first_rows=list(first_rows),
                table_vocabulary_buckets=list(vocabulary_buckets),
                **config_attrs(
                    spec,
                    variables,
                    out_of_range=out_of_range,
                    rounding_seed=rounding_seed,
                ),
            )
        freed_gradients.free_with([self._handle])

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the engine. The engine exists as long as its handle."""
        return self._handle

    def enqueue(
        self,
        replica: int,
        training: Any,
        features: StepInputs,
    ):
        """Enqueues the ids of one step."""
        with tf.device(self._handle.device):
            return ops.enqueue_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                training=tf.convert_to_tensor(training, tf.bool),
                **batch_inputs(features),
            )

    def enqueue_keys(
        self,
        training: Any,
        steps: Sequence[Sequence[embedding_inputs.FeatureIds]],
    ):
        """Enqueues the step of all replicas for tables with open vocabularies.

        Args:
          training: Whether the step trains.
          steps: For each replica, a list with the inputs of its features.
        """
        inputs = [feature for features in steps for feature in features]
        with tf.device(self._handle.device):
            evicted = ops.enqueue_keys(
                engine=self._handle,
                training=tf.convert_to_tensor(training, tf.bool),
                **batch_inputs(inputs, of_keys=True),
                **self._keys.arguments(inputs),
            )
            self._keys.report_evicted(self._handle, evicted)
            self._keys.keep_strings(inputs, training)

    def report_evicted(self, table: int, values: Sequence[Any]) -> None:
        """Calls `on_evict` of one table; see `OpenTables.report_table`."""
        self._keys.report_table(table, values)

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        if self.is_pipelined:
            # A forward-only step must read rows with all updates, so the
            # pending update is applied first. A training step reads rows
            # without the pending update.
            self.apply_pending(replica, always=False)
        with tf.device(self._handle.device):
            return ops.dequeue_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                **self._lookup_arguments(),
            )

    def prefetch(self, replica: int):
        """Looks up the next step of a replica, if it is enqueued.

        The next call of `dequeue` returns the result. The engine must be
        pipelined, and the replica must not have applied its current step.
        """
        with tf.device(self._handle.device):
            attrs = self._lookup_arguments()
            del attrs["num_features"]
            return ops.prefetch_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                **attrs,
            )

    def apply(
        self,
        replica: int,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies the gradients of the last dequeued step.

        Args:
          replica: Index of the replica to which the gradients belong.
          gradients: One gradient per feature, with the shape of its
            activations.
          hyperparameters: One float32 vector per table, which starts with the
            learning rate.
        """
        with tf.device(self._handle.device):
            return ops.apply_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                gradients=list(gradients),
                hyperparameters=list(hyperparameters),
                **self._variables_to_update(),
            )

    def open(
        self,
        replica: int,
        features: StepInputs,
        *,
        vocabulary_steps: tf.Tensor | None = None,
    ) -> OpenLookup:
        """Opens a lookup that can receive gradients later.

        Args:
          replica: Index of the replica.
          features: Batch of the replica.
          vocabulary_steps: None, or int64 `[num_tables]`. If the ids of a table
            are rows of keys, the vocabulary step in which the keys got their
            rows, otherwise 0.
        """
        engine = self._captured_handle()
        arguments = {"engine": engine, "replica": tf.cast(replica, tf.int32)}
        with tf.device(self._handle.device):
            # If all tables have closed vocabularies, the batch can be packed.
            # The batch reader unpacks all batches of keys.
            if self._spec.has_open_tables and not isinstance(
                features, packing.PackedIds
            ):
                token, evicted = ops.open_keys(
                    **arguments,
                    **batch_inputs(features, of_keys=True),
                    **self._keys.arguments(features),
                )
                self._keys.report_evicted(engine, evicted)
                self._keys.keep_strings(features, True)
            else:
                token = ops.open_step(
                    **arguments,
                    **batch_inputs(features),
                    vocabulary_steps=tf.zeros([0], tf.int64)
                    if vocabulary_steps is None
                    else vocabulary_steps,
                )
        return OpenLookup(engine, {replica: token})

    def _captured_handle(self) -> tf.Tensor:
        """Returns the handle as a tensor in the current graph."""
        graph = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and hasattr(graph, "capture"):
            return graph.capture(self._handle)
        return self._handle

    def open_rows(
        self, features: Sequence[embedding_inputs.FeatureIds]
    ) -> RowLookup:
        """Opens a lookup whose gradients the caller holds.

        The rows of the lookup stay assigned to their keys until the gradient is
        applied or discarded. The engine must have one replica and one feature.

        Args:
          features: Batch with at most one key per sample.
        """
        engine = self._captured_handle()
        with tf.device(self._handle.device):
            token, rows, evicted = ops.open_rows(
                engine=engine,
                **batch_inputs(features, of_keys=True),
                **self._keys.arguments(features),
            )
            self._keys.report_evicted(engine, evicted)
            self._keys.keep_strings(features, True)
        return RowLookup(engine, token, rows)

    def record_gradient(self, rows: tf.Tensor) -> tf.Tensor:
        """Records the gradient of open lookups.

        Args:
          rows: `[num_rows]` int64, rows of a sparse gradient. Empty if the
            gradient is dense.

        Returns:
          The same rows, which identify the gradient in `apply_recorded`.
        """
        with tf.device(self._handle.device):
            return ops.record_gradient(engine=self._handle, rows=rows)

    def apply_recorded(
        self,
        rows: tf.Tensor,
        gradients: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
        *,
        is_dense: bool,
    ):
        """Applies a gradient that was computed from recorded gradients.

        Args:
          rows: `[num_rows]` int64, the row of each gradient.
          gradients: `[num_rows, dim]` float32. The gradients of equal rows are
            summed.
          hyperparameters: As for `apply`.
          is_dense: Whether `rows` are all rows of the table, in order.
        """
        with tf.device(self._handle.device):
            ops.apply_recorded(
                engine=self._handle,
                replica=tf.constant(0),
                rows=rows,
                gradients=gradients,
                hyperparameters=list(hyperparameters),
                dense=is_dense,
                **self._variables_to_update(),
            )

    def look_up(self, replica: int, lookup: OpenLookup) -> list[tf.Tensor]:
        """Returns the activations of an open lookup, one per feature."""
        with tf.device(self._handle.device):
            return ops.look_up_step(
                engine=lookup.engine,
                replica=tf.cast(replica, tf.int32),
                token=lookup.tokens[replica],
                **self._lookup_arguments(),
            )

    def follow(
        self,
        replica: int,
        lookup: OpenLookup,
        gradients: Sequence[tf.Tensor],
        coordinates: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Stores the gradients of a lookup until they are applied or expire.

        Args:
          replica: Index of the replica of the lookup.
          lookup: The lookup that `open` returned.
          gradients: One gradient per feature, with the shape of its
            activations.
          coordinates: Output of `ops.gradient_coordinates` if the engine gets
            only a part of the gradients. By default, the engine computes the
            coordinates.

        Returns:
          The mark of the gradients, of shape `mark_shape(num_replicas)`. The
          caller sums and scales marks in the same way as gradients, and then
          passes the result to `apply_followed`.
        """
        with tf.device(self._handle.device):
            mark = ops.follow_step(
                engine=lookup.engine,
                replica=tf.cast(replica, tf.int32),
                token=lookup.tokens[replica],
                gradients=list(gradients),
                coordinates=tf.zeros([0])
                if coordinates is None
                else coordinates,
            )
            return mark_of_replica(mark, replica, self._num_replicas)

    def apply_followed(
        self,
        replica: int,
        marks: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies the gradients that the marks of all replicas represent."""
        with tf.device(self._handle.device):
            return ops.apply_followed(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                marks=marks,
                hyperparameters=list(hyperparameters),
                **self._variables_to_update(),
            )

    def apply_pending(self, replica: int = 0, *, always: bool = True):
        """Applies the pending pipelined update, if any.

        Args:
          replica: Index of the calling replica.
          always: Whether the update is always applied. If False, the update is
            applied only if the next step of the replica is forward-only.
        """
        with tf.device(self._handle.device):
            return ops.land_update(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                always=always,
                **self._variables_to_update(),
            )

    def _lookup_arguments(self) -> dict[str, Any]:
        return {
            "shards": tables.handles(self._shards),
            **activation_attrs(self._spec),
        }

    def _variables_to_update(self) -> dict[str, list[tf.Tensor]]:
        return {
            "shards": tables.handles(self._shards),
            "slots": tables.handles(self._slots),
            "rounding_steps": tables.handles(self._rounding_steps),
        }

    def retire(self, why: str):
        """Makes all later calls raise an error that contains `why`.

        If `why` is empty, later calls do not raise an error.

        Raises:
          tf.errors.FailedPreconditionError: If steps are in flight.
        """
        with tf.device(self._handle.device):
            ops.retire_host_engine(engine=self._handle, why=why)

    def record_restore(self) -> None:
        """Counts a restore, if a step compares it with other processes."""

    def record_write(self, table: int, written: key_rows.RowsToWrite) -> None:
        """Records written rows, if a step compares them with other processes.

        Args:
          table: Index of the table.
          written: The keys and their rows.
        """

    def use_records_of(self, previous: Any) -> None:
        """Uses the records that a step compares with other processes.

        Args:
          previous: Engine of the same process before a resize.
        """

    def reset(self):
        """Discards all steps in flight."""
        with tf.device(self._handle.device):
            return ops.reset_host_engine(engine=self._handle)

    def describe(self) -> dict[str, Any]:
        """Returns the counters and the steps in flight of the engine."""
        return counts.describe_counts(self._handle, self._spec)
