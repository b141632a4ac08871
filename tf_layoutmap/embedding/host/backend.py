"""Carries the steps of a `TPUEmbedding` out by the host engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_layoutmap.embedding import replicas, tables
from tf_layoutmap.embedding import steps as step_gradients
from tf_layoutmap.embedding.host import (
    batches,
    changes,
    multi_process,
    open_tables,
)
from tf_layoutmap.embedding.host import engine as host_engine
from tf_layoutmap.embedding.host import shapes as host_shapes
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.table_variable import HOST


class HostBackend:
    """The host engine, and what it must be told of each step.

    Attributes:
      engine: The engine; None before `start`.
    """

    is_on_tpu: ClassVar[bool] = False
    mark_shape: ClassVar[tuple[int, ...]] = host_engine.MARK_SHAPE
    # They are cheap and protect memory.
    checks_shapes = True

    def __init__(
        self,
        feature_config: Any,
        spec: config.EmbeddingSpec,
        strategy_replicas: replicas.Replicas,
        *,
        partitioner: tables.Partitioner | None,
        is_pipelined: bool,
        out_of_range: str,
        rounding_seed: int,
    ):
        """Takes the checked arguments of `TPUEmbedding`."""
        self._feature_config = feature_config
        self._spec = spec
        self._replicas = strategy_replicas
        self._partitioner = partitioner
        self._is_pipelined = is_pipelined
        self._out_of_range = out_of_range
        self._rounding_seed = rounding_seed
        self._shapes = host_shapes.StepShapes(spec)
        self._reader = batches.BatchReader(
            feature_config, strategy_replicas, self._shapes
        )
        self._modes = step_gradients.StepModes()
        self.engine: host_engine.HostEngine | None = None
        self._variables: dict[str, dict[str, Any]] = {}
        self._changes: changes.Changes | None = None

    @property
    def variable_device(self) -> str:
        """Where a layer's own small variables are: the host."""
        return HOST

    @property
    def is_built(self) -> bool:
        """Whether the engine is there."""
        return self.engine is not None

    @property
    def _started(self) -> host_engine.HostEngine:
        assert self.engine is not None  # Steps come after `start`.
        return self.engine

    def declare(self, shapes: Any, batch_size: int | None) -> None:
        """Takes the arguments of `build`."""
        self._shapes.samples.declare_arguments(
            self._feature_config, shapes, batch_size
        )

    def create_tables(self) -> dict[str, dict[str, Any]]:
        """Creates the variables of all tables."""
        return tables.create_tables(self._spec, self._partitioner)

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Creates the engine over the variables."""
        options = self._engine_options()
        self._variables = variables
        spec = self._shapes.fix_spec()
        if self._replicas.has_processes:
            multi_process.agree_on_first_values(
                variables, self._replicas.strategy
            )
            self.engine = multi_process.WorkerEngine(
                spec, variables, self._replicas, **options
            )
        else:
            self.engine = host_engine.HostEngine(
                spec,
                variables,
                num_replicas=self._replicas.num_replicas,
                **options,
            )

    def _engine_options(self) -> dict[str, Any]:
        return {
            "is_pipelined": self._is_pipelined,
            "out_of_range": self._out_of_range,
            "rounding_seed": self._rounding_seed,
        }

    def resize(self, table: int, capacity: int) -> Any:
        """Gives a vocabulary another capacity; see `Vocabulary.resize`."""
        self._refuse_in_processes("resize")
        self.flush()
        name = self._spec.tables[table].name
        spec = open_tables.spec_with_capacity(self._spec, table, capacity)
        engine = self._started
        try:
            engine.retire(
                f"The vocabulary of table {name!r} was resized: functions "
                "that were traced before must be traced anew, Keras models be "
                "compiled again, and a tlm.DeltaWriter made of a new base"
            )
        except tf.errors.FailedPreconditionError:
            raise RuntimeError(
                "A vocabulary cannot be resized while steps are in flight; "
                "finish them, or call `reset` to forget them (table "
                f"{name!r})."
            ) from None
        old = self._variables[name]
        try:
            with open_tables.resize_scope(old):
                found = open_tables.resize(spec, table, old, self._partitioner)
                variables = {**self._variables, name: found.variables}
                made = host_engine.HostEngine(
                    open_tables.spec_with_capacity(
                        self._shapes.fix_spec(), table, capacity
                    ),
                    variables,
                    num_replicas=self._replicas.num_replicas,
                    **self._engine_options(),
                )
                # Before the old table is emptied: `on_evict` may raise.
                made.tell_dropped(table, found.dropped)
        except BaseException:
            engine.retire("")
            raise
        self.engine, self._spec, self._variables = made, spec, variables
        self._shapes.take_spec(spec)
        open_tables.empty_variables(old)
        return found

    def _refuse_in_processes(self, method: str) -> None:
        """Refuses what one process might do and another not.

        Raises:
          NotImplementedError: Under a strategy of several processes.
        """
        if self._replicas.has_processes:
            raise NotImplementedError(
                f"`{method}` of a vocabulary must not be called under "
                "MultiWorkerMirroredStrategy: a process that does so alone has "
                "other rows than the others from then on. `ttl_steps` lets "
                "keys go in all of them; tlm.convert_vocabularies gives a "
                "checkpoint another capacity."
            )

    def read(self, features: Any, weights: Any, device: str | None) -> Any:
        """Checks the input of a step; see `TPUEmbedding.enqueue`."""
        return self._reader.read(features, weights, device)

    def enqueue(self, batch: Any, training: Any, name: str | None) -> None:
        """Hands over what `read` returned."""
        if isinstance(batch, batches.BatchOfProcesses):
            # The processes meet in a step, which only a replica can take.
            self._replicas.strategy.run(
                lambda features, weights: self.enqueue(
                    self.read(features, weights, None), training, name
                ),
                (batch.features, batch.weights),
            )
            return
        training = self._modes.enqueued(name, training)
        if self._spec.has_open_tables:
            self._enqueue_keys(batch.steps, training)
            return
        for replica, inputs in batch.steps:
            self._started.enqueue(replica, training, inputs)

    def _enqueue_keys(self, steps: Any, training: Any) -> None:
        """Hands the batches of all replicas over at once.

        A new key's row must not depend on which replica comes first.
        """
        if self._replicas.has_processes:
            for replica, inputs in steps:
                self._started.enqueue(replica, training, inputs)
            return
        if len(steps) == self._replicas.num_replicas:
            self._started.enqueue_keys(
                training, [inputs for _, inputs in steps]
            )
            return
        if self._replicas.current() is None:
            raise ValueError(
                "Argument `device` must be None where tables have open "
                "vocabularies: the batches of all replicas decide together "
                "which keys get rows."
            )
        replicas.merge_replica_steps(
            self._replicas.strategy,
            steps[0][1],
            lambda all_steps, is_training: self._started.enqueue_keys(
                is_training, all_steps
            ),
            training,
        )

    def evict_keys(
        self, table: int, keys: tf.Tensor, *, expired: bool
    ) -> tf.Tensor:
        """Takes rows of keys away; see `OpenTables`."""
        self._refuse_in_processes("evict")
        return self._started.evict_keys(table, keys, expired=expired)

    def watch_changes(self) -> Any:
        """Begins to note which rows are written."""
        if self._replicas.has_processes:
            raise NotImplementedError(
                "Changes of tables cannot be written under a strategy of "
                "several processes, each of which has all tables."
            )
        self._changes = changes.Changes(
            self._spec, self._variables, self._started.handle
        )
        return self._changes

    def dequeue(self, name: str | None) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        replica = self._replicas.require_current("dequeue")
        self._modes.dequeued(name)
        activations = self._shapes.shape_all_activations(
            self._started.dequeue(replica)
        )
        self._shapes.note_dequeued(replica, activations)
        return activations

    def apply(self, gradients: Sequence[Any], name: str | None) -> None:
        """Applies the gradients of the step dequeued last."""
        replica = self._replicas.require_current("apply_gradients")
        self._modes.applied(name)
        flat = self._shapes.flat_gradients(replica, gradients)
        self._started.apply(
            replica, flat, step_gradients.hyperparameters(self._spec.tables)
        )

    def is_in_program(self) -> bool:
        """False: the host has none."""
        return False

    def open(
        self,
        features: Any,
        weights: Any,
    ) -> tuple[Any, list[tf.Tensor]]:
        """Looks up outside of the order of steps.

        Returns:
          The lookup for `follow`, if gradients come; and the activations,
          one per feature.
        """
        replica = self._replicas.require_current("call")
        lookup = self._started.open(
            replica, self._reader.read_features(features, weights)
        )
        return lookup, self._shapes.shape_all_activations(
            self._started.look_up(replica, lookup)
        )

    def follow(
        self,
        lookup: Any,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Keeps the gradients of a lookup; returns their mark."""
        return self._started.follow(
            self._replicas.require_current("gradient"),
            lookup,
            self._shapes.flat_gradients_of_call(gradients),
        )

    def apply_followed(self, marks: tf.Tensor) -> None:
        """Applies the gradients that a sum of marks stands for."""
        self._started.apply_followed(
            self._replicas.require_current("apply"),
            marks,
            step_gradients.hyperparameters(self._spec.tables),
        )

    def flush(self) -> None:
        """Lands the update that pipelining holds back, if there is one."""
        if self._is_pipelined and self.engine is not None:
            self.engine.land()

    def reset(self) -> None:
        """Forgets every step in flight; an update held back lands first."""
        self.flush()
        self._started.reset()

    def describe(self) -> dict[str, Any]:
        """Returns what the engine holds."""
        return self._started.describe()

    def before_read(self) -> None:
        """Lands what pipelining holds back, but while a function is traced."""
        # While a function is traced its reads see what has landed by then;
        # and one that is exported must not hold an op of ours.
        if tf.executing_eagerly():
            self.flush()

    def before_async_copy(self) -> None:
        """Lands what pipelining holds back, in the function that copies too."""
        self.flush()

    def before_restore(self) -> None:
        """Refuses a restore under steps whose gradients belong to old rows.

        Raises:
          RuntimeError: If steps are in flight.
        """
        self.before_read()
        found = self._started.describe()
        if any(found["pending"]) or any(found["awaiting"]):
            raise RuntimeError(
                "A checkpoint cannot be restored while steps are in flight; "
                "finish them, or call `reset` to forget them. Pending by "
                f"replica: {found['pending']}, awaiting gradients: "
                f"{found['awaiting']}."
            )
        if not self._is_pipelined and any(found["open"] + found["followed"]):
            # Lookups without gradients, of rows that are replaced now.
            self._started.reset()

    def note_restore(self) -> None:
        """Counts a restore, which all processes must make."""
        self._note_replaced()
        if self._replicas.has_processes:
            assert isinstance(self.engine, multi_process.WorkerEngine)
            self.engine.restores.add_one()

    def load_variables(self) -> None:
        """Notes it: steps use the variables themselves."""
        self._note_replaced()

    def _note_replaced(self) -> None:
        if self._changes is not None:
            self._changes.num_replaced += 1

    def retrieve_variables(self) -> None:
        """Nothing to do: steps use the variables themselves."""
