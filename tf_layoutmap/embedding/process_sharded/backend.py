"""The backend of `TPUEmbedding` for tables that are sharded over processes.

Each process owns one shard of each table. The engine of a process applies the
steps of all replicas to the rows of this process.

A replica requests rows from the processes that own the rows, and combines the
rows. Later, the replica sends each owner the gradients of the activations that
use the owner's rows. The engine of an owner receives batches that contain only
ids of its own rows. Each id has a gain. The gain is the factor with which the
row of the id contributes to an activation. With `gradient_aggregation="exact"`,
gradients are therefore summed in the same order as in one process with the same
number of replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import processes, replicas, steps, table_store
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import (
    engine,
    process_checks,
)
from tf_layoutmap.embedding.host.backend import HostBackend
from tf_layoutmap.embedding.host.engine import HostEngine, OpenLookup
from tf_layoutmap.embedding.process_sharded import (
    key_exchange,
    shard_keys,
    step_exchange,
    tables,
)
from tf_layoutmap.embedding.processes import Processes
from tf_layoutmap.vocabulary import key_rows, key_tensors


class ProcessShardedLookup(NamedTuple):
    """An open lookup, which can receive gradients.

    Attributes:
      opened: For each replica, the open lookup in the engine of this process.
      step: State of the step in which the processes exchange rows and
        gradients.
      gradients: The gradients of this replica that were computed for the
        lookup. Each element has one gradient per feature.
    """

    opened: list[OpenLookup]
    step: step_exchange.Step
    gradients: list[Sequence[tf.Tensor]]


class ProcessShardedEngine:
    """An engine that applies the steps of all replicas to its local rows.

    Attributes:
      shard_keys: The shards of open vocabularies in this process.
      is_pipelined: Whether each update is applied after the lookup of the next
        step.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        group: Processes,
        *,
        is_pipelined: bool,
        out_of_range: str,
        rounding_seed: int,
        gradient_aggregation: str,
    ):
        """Creates the engine.

        Args:
          spec: Features and unsharded tables.
          variables: Variables that `ProcessStore` created.
          group: The processes.
          is_pipelined: Whether each update is applied after the lookup of the
            next step.
          out_of_range: How out-of-range ids are handled.
          rounding_seed: Seed for rounding the rows of 16-bit tables.
          gradient_aggregation: Order of gradient summation, `"exact"` or
            `"local"`.

        Raises:
          ValueError: If the optimizer of a table does not support the order.
        """
        self._group = group
        local_variables = {
            name: {
                key: embedding_tables.shards_of(variable)[0]
                for key, variable in by_name.items()
            }
            for name, by_name in variables.items()
        }
        rows = [
            variables[table.name][embedding_tables.PARAMETERS]
            for table in spec.tables
        ]
        gradient_order: step_exchange.Order = (
            step_exchange.Exact(spec, group.size)
            if gradient_aggregation == "exact"
            else step_exchange.Folded(
                spec,
                group.size,
                group.rank,
                [row.row_partition.num_shards for row in rows],
            )
        )
        # The engine gets the rows of keys, and no keys.
        spec_of_keys = shard_keys.local_spec_of_keys(
            _local_spec(spec, local_variables, gradient_order.features()),
            [bool(row.rows) for row in rows],
        )
        local_spec = shard_keys.local_spec_of_keys(
            spec_of_keys, [False] * len(rows)
        )
        first_rows = [row.rows.start for row in rows]
        self.shard_keys = shard_keys.ShardKeys(spec_of_keys, local_variables)
        self.is_pipelined = is_pipelined
        self._spec = local_spec
        # The engine of the rows of this process.
        self._local = HostEngine(
            local_spec,
            local_variables,
            num_replicas=group.size,
            is_pipelined=is_pipelined,
            rounding_seed=rounding_seed,
            first_rows=first_rows,
            vocabulary_buckets=self.shard_keys.vocabulary_buckets(),
        )

        def make_keys(plan_attrs: dict[str, Any]) -> key_exchange.KeyExchange:
            return key_exchange.KeyExchange(
                spec,
                variables,
                group,
                self.handle,
                self.shard_keys,
                plan_attrs,
            )

        self._exchange = step_exchange.StepExchange(
            spec,
            local_spec,
            variables,
            group,
            gradient_order,
            out_of_range=out_of_range,
            rounding_seed=rounding_seed,
            make_keys=make_keys if spec.has_open_tables else None,
        )
        self._steps = step_exchange.StepsInFlight()

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the engine of this process."""
        return self._local.handle

    def record_restore(self) -> None:
        """Counts a restore. All processes must restore the same checkpoints."""
        self._exchange.restores.add_one()

    def record_write(self, table: int, written: key_rows.RowsToWrite) -> None:
        """Does nothing, because `write` compares the arguments."""

    def use_records_of(self, previous: ProcessShardedEngine) -> None:
        """Uses the record of restores of the engine before a resize."""
        self._exchange.restores = previous._exchange.restores

    def apply_pending(self) -> None:
        """Applies the pending pipelined update of this process, if any."""
        self._local.apply_pending()

    def retire(self, why: str) -> None:
        """Makes all later calls raise an error; see `HostEngine.retire`."""
        self._local.retire(why)

    def reset(self) -> None:
        """Discards all steps in flight."""
        self._local.reset()

    def enqueue(self, replica: int, training: Any, features: engine.StepInputs):
        """Sends the ids of this replica to the owners of the rows."""
        with tf.control_dependencies(self._check_updates()):
            step, of_training, inputs = self._exchange.plan(training, features)
        for other, received in enumerate(inputs):
            self._local.enqueue(other, of_training[other], received)
        self._steps.enqueue(step)

    def _check_updates(self) -> list[tf.Operation]:
        """Returns a check that the same update is pending in all processes.

        A program can apply the pending update of a process outside of steps,
        for example when it reads `embedding_tables`.
        """
        if not self.is_pipelined:
            return []
        with tf.device(self.handle.device):
            state = ops.describe_host_engine(engine=self.handle)
        counts = self._group.all_gather(state.num_updates[tf.newaxis])
        return process_checks.check_updates(
            tf.ensure_shape(counts, [self._group.size])
        )

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        step = self._steps.dequeue()
        if self.is_pipelined:
            # See `HostEngine.dequeue`. Each process holds the update of its
            # rows back.
            self._local.apply_pending(replica, always=False)
        for other in range(self._group.size):
            with tf.device(self.handle.device):
                ops.pass_step(engine=self.handle, replica=other)
        return self._exchange.fetch(step)

    def apply(
        self,
        replica: int,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies the gradients of this replica and of other processes."""
        received = self._exchange.send_gradients(
            self._steps.take_dequeued(), gradients, hyperparameters
        )
        with tf.control_dependencies(
            self._check_rates([vectors for _, vectors in received])
        ):
            for other, (local_gradients, vectors) in enumerate(received):
                self._local.apply(other, local_gradients, vectors)

    def _check_rates(
        self, hyperparameters: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Operation]:
        """Returns a check that all processes have the same learning rates."""
        return process_checks.check_rates(self._spec, hyperparameters, 1)

    def open(
        self, replica: int, features: engine.StepInputs
    ) -> ProcessShardedLookup:
        """Opens the lookups of this replica and of other processes.

        The keys of each replica are a separate step of the vocabularies, as for
        tables that are not sharded.
        """
        step, _, inputs = self._exchange.plan(True, features, in_one_step=False)
        # The engine gets the rows of keys, and their vocabulary steps. It
        # therefore protects the same rows from eviction as an engine that gets
        # the keys, and releases them after the update.
        steps = step.vocabulary_steps or [None] * len(inputs)
        return ProcessShardedLookup(
            [
                self._local.open(other, received, vocabulary_steps=steps[other])
                for other, received in enumerate(inputs)
            ],
            step,
            [],
        )

    def look_up(
        self, replica: int, lookup: ProcessShardedLookup
    ) -> list[tf.Tensor]:
        """Returns the activations of an open lookup, one per feature."""
        return self._exchange.fetch(lookup.step)

    def look_up_only(self, features: engine.StepInputs) -> list[tf.Tensor]:
        """Returns activations without gradients, one per feature."""
        step, _, _ = self._exchange.plan(False, features)
        return self._exchange.fetch(step)

    def follow(
        self,
        replica: int,
        lookup: ProcessShardedLookup,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Stores the gradients of this replica and of other processes."""
        lookup.gradients[:] = [
            gradient
            for gradient in lookup.gradients
            if all(map(steps.is_accessible, gradient))
        ]
        lookup.gradients.append(gradients)
        # The engine of a process knows only the gradients for its rows. Each
        # replica therefore computes the norm of its mark.
        with tf.device(embedding_tables.HOST):
            coordinates = ops.gradient_coordinates(
                plan=lookup.step.plan,
                gradients=[
                    tensor for each in lookup.gradients for tensor in each
                ],
                num_gradients=len(lookup.gradients),
            )
        received = self._exchange.send_gradients(
            lookup.step, gradients, [coordinates]
        )
        marks = [
            self._local.follow(other, opened, local, vector)
            for other, (opened, (local, (vector,))) in enumerate(
                zip(lookup.opened, received)
            )
        ]
        # The control dependency makes the ops of all replicas run. Each process
        # returns only the mark of its own replica.
        with tf.control_dependencies(marks):
            return tf.identity(marks[replica])

    def apply_followed(
        self,
        replica: int,
        marks: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies the gradients that the marks of all replicas represent."""
        local_values = tf.concat([tf.reshape(marks, [-1]), *hyperparameters], 0)
        gathered = self._group.all_gather(local_values[tf.newaxis])
        size = int(marks.shape.num_elements())
        vectors = [
            step_exchange.split_vector(
                gathered[other, size:],
                [hyperparameter.shape for hyperparameter in hyperparameters],
            )
            for other in range(self._group.size)
        ]
        with tf.control_dependencies(self._check_rates(vectors)):
            for other in range(self._group.size):
                self._local.apply_followed(
                    other,
                    tf.reshape(gathered[other, :size], marks.shape),
                    vectors[other],
                )

    def report_evicted(self, table: int, values: Sequence[Any]) -> None:
        """Calls `on_evict` of one table; see `OpenTables.report_table`."""
        self.shard_keys.report_table(table, values)

    def describe(self) -> dict[str, Any]:
        """Returns the counters and the steps in flight of this process."""
        counts = self._local.describe()
        # The engine counts the ids that this process receives as an owner of
        # rows. These counts differ from the counts of the ids in a batch, so
        # the result does not contain the counts of the engine.
        del counts["features"]
        return counts


def _local_spec(
    spec: config.EmbeddingSpec,
    local_variables: dict[str, dict[str, Any]],
    features: tuple[config.FeatureSpec, ...],
) -> config.EmbeddingSpec:
    """Returns the spec of the engine of one process, for its local rows."""
    return dataclasses.replace(
        spec,
        tables=tuple(
            dataclasses.replace(
                table,
                num_rows=int(
                    local_variables[table.name][
                        embedding_tables.PARAMETERS
                    ].shape[0]
                ),
                combiner="sum",
                quantization=None,
            )
            for table in spec.tables
        ),
        features=features,
    )


class ProcessShardedBackend(HostBackend):
    """A backend in which each process stores one shard of each table."""

    is_sharded: ClassVar[bool] = True

    def __init__(
        self,
        feature_config: Any,
        spec: config.EmbeddingSpec,
        strategy_replicas: replicas.Replicas,
        *,
        partitioner: Any,
        is_pipelined: bool,
        out_of_range: str,
        rounding_seed: int,
        gradient_aggregation: str,
    ):
        """Stores the checked arguments of `TPUEmbedding`.

        Raises:
          NotImplementedError: If a vocabulary keeps strings, or if a process
            has several devices.
          ValueError: If `partitioner` is not None.
        """
        if partitioner is not None:
            raise ValueError(
                "Argument `partitioner` must be None with over_processes="
                '"sharded", where each process has one shard of a table. '
                f"Received: {partitioner!r}."
            )
        self._gradient_aggregation = gradient_aggregation
        self._owners = processes.of_strategy(strategy_replicas.strategy)
        if self._owners.num_local > 1:
            raise NotImplementedError(
                'Argument `over_processes` must be "replicated" if a process '
                "has several devices, because a process that owns a shard must "
                'have one replica. Received: "sharded" with the devices '
                f"{strategy_replicas.strategy.extended.worker_devices}."
            )
        super().__init__(
            feature_config,
            spec,
            strategy_replicas,
            partitioner=None,
            is_pipelined=is_pipelined,
            out_of_range=out_of_range,
            rounding_seed=rounding_seed,
        )

    def _make_store(
        self, partitioner: table_store.Partitioner | None
    ) -> tables.ProcessStore:
        del partitioner
        return tables.ProcessStore(self._owners)

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Creates an engine that reads and updates the variables."""
        self._store = self._store.with_tables(self._spec, variables)
        self.engine = self._make_engine(self._shapes.fix_spec(), variables)

    def _make_engine(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
    ) -> ProcessShardedEngine:
        return ProcessShardedEngine(
            spec,
            variables,
            self._owners,
            is_pipelined=self._is_pipelined,
            out_of_range=self._out_of_range,
            rounding_seed=self._rounding_seed,
            gradient_aggregation=self._gradient_aggregation,
        )

    @property
    def _sharded_engine(self) -> ProcessShardedEngine:
        # `_make_engine` creates no other engine.
        return cast(ProcessShardedEngine, self._started)

    def look_up(self, features: Any, weights: Any) -> list[tf.Tensor]:
        """Returns activations without gradients, one per feature."""
        self._replicas.require_current("call")
        return self._shapes.shape_all_activations(
            self._sharded_engine.look_up_only(
                self._reader.read_features(features, weights)
            )
        )

    def rows_of_ids(
        self, features: Sequence[embedding_inputs.FeatureIds | None]
    ) -> list[tf.Tensor]:
        """Returns the row of each id, one tensor per feature.

        Each id is a separate sample. Features that are None have no samples.
        """
        self._replicas.require_current("gradient")
        samples = []
        for feature_ids in features:
            ids = (
                tf.zeros([0], tf.int64)
                if feature_ids is None
                else feature_ids.ids
            )
            num_ids = tf.size(ids, tf.int64)
            samples.append(
                embedding_inputs.FeatureIds(
                    tf.cast(ids, tf.int64),
                    tf.range(num_ids + 1),
                    num_ids,
                    tf.zeros([0]),
                    kind=key_tensors.INTEGERS
                    if feature_ids is None
                    else feature_ids.kind,
                )
            )
        return self._sharded_engine.look_up_only(samples)
