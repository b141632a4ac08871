"""The backend of `TPUEmbedding` for the host engine.

`HostBackend` implements the interface in `tf_layoutmap.embedding.backend`. The
backend reads batches, reshapes activations and gradients, and passes steps to
the engine. The backend also applies a pending pipelined update before tables
are saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.embedding import (
    changes,
    processes,
    replicas,
    table_store,
)
from tf_layoutmap.embedding import steps as step_gradients
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import (
    base_backend,
    step_strings,
)
from tf_layoutmap.embedding.host import engine as host_engine
from tf_layoutmap.embedding.host.key_editor import EngineKeyEditor
from tf_layoutmap.embedding.host.step_engine import StepEngine
from tf_layoutmap.embedding.table_store import TableStore
from tf_layoutmap.vocabulary import kept_strings, key_rows

if TYPE_CHECKING:
    from tf_layoutmap.embedding import resizing


class HostBackend(base_backend.BaseBackend):
    """A backend that runs the steps of a `TPUEmbedding` on the host engine.

    Attributes:
      engine: The engine; None before `start`.
    """

    def __init__(
        self,
        feature_config: Any,
        spec: config.EmbeddingSpec,
        strategy_replicas: replicas.Replicas,
        *,
        partitioner: table_store.Partitioner | None,
        is_pipelined: bool,
        out_of_range: str,
        rounding_seed: int,
    ):
        """Stores the checked arguments of `TPUEmbedding`.

        Raises:
          NotImplementedError: If there are several processes, and a vocabulary
            keeps strings.
        """
        if strategy_replicas.has_processes:
            kept_strings.check_supported(
                spec.vocabulary_settings,
                "MultiWorkerMirroredStrategy",
                "the processes exchange the hashes of all keys, and TensorFlow "
                "has no collective for strings",
            )
        self._replicas = strategy_replicas
        super().__init__(
            feature_config,
            spec,
            strategy_replicas,
            self._make_store(partitioner),
            out_of_range=out_of_range,
            rounding_seed=rounding_seed,
        )
        self._is_pipelined = is_pipelined
        self._modes = step_gradients.StepModes()
        self.engine: StepEngine | None = None
        # The learning rates of a step, if the process has several replicas.
        self._rates: step_gradients.RatesOfReplicas | None = None

    def _make_store(
        self, partitioner: table_store.Partitioner | None
    ) -> TableStore:
        """Creates the store of the tables."""
        group = None
        if self._replicas.has_processes:
            group = processes.of_strategy(self._replicas.strategy)
        return table_store.HostStore(partitioner, group)

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of a sum of marks of all replicas."""
        return host_engine.mark_shape(self._replicas.num_replicas)

    @property
    def variable_device(self) -> str:
        """Device of the small variables that a layer's steps use: the host."""
        return HOST

    @property
    def is_built(self) -> bool:
        """Whether the engine exists."""
        return self.engine is not None

    @property
    def _started(self) -> StepEngine:
        # Steps require the engine, which `start` creates.
        assert self.engine is not None
        return self.engine

    @property
    def _host_engine(self) -> host_engine.HostEngine:
        # Only the engine of sharded tables has another class. The backend of
        # sharded tables does not use this property.
        return cast(host_engine.HostEngine, self._started)

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Creates an engine that reads and updates the variables."""
        self.strings: Mapping[str, kept_strings.KeptStrings] = (
            step_strings.create_stores(self._spec, variables)
        )
        self._store = self._store.with_tables(self._spec, variables)
        spec = self._shapes.fix_spec()
        if self._replicas.has_processes:
            from tf_layoutmap.embedding.host import multi_process

            multi_process.broadcast_initial_values(
                variables, self._replicas.strategy
            )
        self.engine = self._make_engine(spec, variables)
        if self._replicas.num_local > 1:
            self._rates = step_gradients.RatesOfReplicas(spec.tables, HOST)

    def _make_engine(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
    ) -> StepEngine:
        """Creates an engine; the other processes create equal engines."""
        options: dict[str, Any] = {
            "is_pipelined": self._is_pipelined,
            "out_of_range": self._out_of_range,
            "rounding_seed": self._rounding_seed,
            "strings": self.strings,
        }
        if self._replicas.has_processes:
            from tf_layoutmap.embedding.host import multi_process

            return multi_process.WorkerEngine(
                spec, variables, self._replicas, **options
            )
        return host_engine.HostEngine(
            spec,
            variables,
            num_replicas=self._replicas.num_replicas,
            **options,
        )

    @contextlib.contextmanager
    def _steps_retired(self, call: str, table: str) -> Iterator[None]:
        engine = self._started
        try:
            with processes.failing_together(self._store.group, call):
                self.flush()
                self._retire_for_resize(table)
            yield
        except BaseException:
            engine.retire("")
            raise

    def _retire_for_resize(self, table: str) -> None:
        try:
            self._started.retire(
                f"The vocabulary of table {table!r} was resized: functions "
                "that were traced before the resize must be traced again, "
                "Keras models must be compiled again, and a "
                "tlm.deltas.DeltaWriter must be created again with a new base"
            )
        except tf.errors.FailedPreconditionError:
            raise RuntimeError(
                "A vocabulary cannot be resized while steps are in flight; "
                "finish the steps, or call `reset` to discard them (table "
                f"{table!r})."
            ) from None

    def _resized_steps(
        self,
        resized: resizing.Resized,
        spec: config.EmbeddingSpec,
        variables: table_store.Variables,
    ) -> Callable[[], None]:
        engine = self._make_engine(spec, variables)
        # The next step compares the records with the other processes.
        engine.use_records_of(self._started)
        for table, values in resized.dropped.items():
            engine.report_evicted(table, values)

        def use_new_steps() -> None:
            self.engine = engine
            step_strings.use_variables(self.strings, resized.variables)

        return use_new_steps

    def enqueue(self, batch: Any, training: Any, name: str | None) -> None:
        """Enqueues a batch that `read` returned."""
        if batch.unread is not None:
            # The step runs collectives over the processes. TensorFlow supports
            # these collectives only in replica context.
            self._replicas.strategy.run(
                lambda features, weights: self.enqueue(
                    self.read(features, weights, None), training, name
                ),
                batch.unread,
            )
            return
        training = self._modes.enqueued(name, training)
        if self._spec.has_open_tables:
            self._enqueue_keys(batch.steps, training)
            return
        for replica, inputs in batch.steps:
            self._started.enqueue(replica, training, inputs)

    def _enqueue_keys(self, steps: Any, training: Any) -> None:
        """Enqueues the batches of all replicas as one step of the engine.

        A single step assigns rows to new keys in a fixed order, which does not
        depend on the order in which the replicas run.
        """
        if self._replicas.has_processes:
            for replica, inputs in steps:
                self._started.enqueue(replica, training, inputs)
            return
        if len(steps) == self._replicas.num_replicas:
            self._host_engine.enqueue_keys(
                training, [inputs for _, inputs in steps]
            )
            return
        if self._replicas.current() is None:
            raise ValueError(
                "Argument `device` must be None if tables have open "
                "vocabularies, because rows are assigned to keys from the "
                "batches of all replicas together."
            )
        replicas.merge_replica_steps(
            self._replicas.strategy,
            steps[0][1],
            lambda all_steps, is_training: self._host_engine.enqueue_keys(
                is_training, all_steps
            ),
            training,
        )

    def _key_editor(self) -> EngineKeyEditor:
        return EngineKeyEditor(self._store, self.flush, self._started)

    def write_rows(
        self, table: int, written: key_rows.RowsToWrite
    ) -> tuple[Any, int]:
        """Writes the rows of keys of an open vocabulary; see `Vocabulary`."""
        rows = super().write_rows(table, written)
        self._started.record_write(table, written)
        return rows

    def watch_changes(self) -> Any:
        """Starts to record which rows are written."""
        self._changes = changes.Changes(
            self._store,
            [changes.recorder_of_engine(self._started.handle, self._store)],
        )
        return self._changes

    def dequeue(self, name: str | None) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        replica = self._replicas.require_current("dequeue")
        self._modes.dequeued(name)
        activations = self._shapes.shape_all_activations(
            self._started.dequeue(replica)
        )
        self._shapes.record_dequeued(replica, activations)
        return activations

    def apply(self, gradients: Sequence[Any], name: str | None) -> None:
        """Applies the gradients of the last dequeued step."""
        replica = self._replicas.require_current("apply_gradients")
        self._modes.applied(name)
        flat = self._shapes.flat_gradients(replica, gradients)
        self._started.apply(replica, flat, self._hyperparameters(replica))

    def open(
        self,
        features: Any,
        weights: Any,
    ) -> tuple[Any, list[tf.Tensor]]:
        """Looks up a batch independently of `enqueue` and `dequeue`.

        Returns:
          A tuple of the lookup and the activations, one per feature. The caller
          passes the lookup to `follow` if there are gradients.
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
        """Stores the gradients of a lookup, and returns their mark."""
        return self._started.follow(
            self._replicas.require_current("gradient"),
            lookup,
            self._shapes.flat_gradients_of_call(gradients),
        )

    def apply_followed(self, marks: tf.Tensor) -> None:
        """Applies the gradients that a sum of marks represents."""
        replica = self._replicas.require_current("apply")
        self._started.apply_followed(
            replica, marks, self._hyperparameters(replica)
        )

    def _hyperparameters(self, replica: int) -> list[tf.Tensor]:
        if self._rates is None:
            return step_gradients.hyperparameters(self._spec.tables)
        return self._rates.hyperparameters(
            self._spec.tables, is_first=self._replicas.is_first_here(replica)
        )

    @property
    def has_row_steps(self) -> bool:
        """Whether lookups can return the rows of keys; see `open_rows`."""
        return (
            not self._is_pipelined
            and not self._replicas.has_processes
            and self._replicas.num_replicas == 1
        )

    def open_rows(self, features: Any) -> host_engine.RowLookup:
        """Opens a lookup whose gradients the caller holds."""
        # The reader unpacks packed batches of keys.
        inputs: Any = self._reader.read_features(features, None)
        return self._host_engine.open_rows(inputs)

    def record_gradient(self, rows: tf.Tensor) -> tf.Tensor:
        """Records the gradient of open lookups; see `HostEngine`."""
        return self._host_engine.record_gradient(rows)

    def apply_recorded(
        self, rows: tf.Tensor, gradients: tf.Tensor, *, is_dense: bool
    ) -> None:
        """Applies a gradient of recorded gradients; see `HostEngine`."""
        self._host_engine.apply_recorded(
            rows,
            gradients,
            step_gradients.hyperparameters(self._spec.tables),
            is_dense=is_dense,
        )

    def flush(self) -> None:
        """Applies the pending pipelined update, if any."""
        if self._is_pipelined and self.engine is not None:
            self.engine.apply_pending()

    def reset(self) -> None:
        """Applies the pending pipelined update and discards steps in flight."""
        self.flush()
        self._started.reset()

    def describe(self) -> dict[str, Any]:
        """Returns the counters and the steps in flight of the engine."""
        return self._started.describe()

    def before_read(self) -> None:
        """Applies the pending pipelined update, but not during tracing."""
        # In a traced function, the update would add an op of this package to
        # the graph. An exported function must not contain ops of this package,
        # so a traced function reads the rows without the pending update.
        if tf.executing_eagerly():
            self.flush()

    def before_async_copy(self) -> None:
        """Applies the pending pipelined update, also during tracing."""
        self.flush()

    def before_restore(self) -> None:
        """Checks that there are no steps in flight.

        Gradients of steps in flight belong to rows that the restore replaces.

        Raises:
          RuntimeError: If steps are in flight.
        """
        self.before_read()
        counts = self._started.describe()
        if any(counts["pending"]) or any(counts["awaiting"]):
            raise RuntimeError(
                "A checkpoint cannot be restored while steps are in flight; "
                "finish the steps, or call `reset` to discard them. Pending "
                f"by replica: {counts['pending']}, awaiting gradients: "
                f"{counts['awaiting']}."
            )
        self._discard_lookups(counts)

    def note_restore(self) -> None:
        """Counts a restore. All processes must restore the same checkpoints."""
        self._count_replacement()
        self._started.record_restore()

    def load_variables(self) -> None:
        """Records that all values were replaced."""
        super().load_variables()
        if self.engine is not None and self._spec.vocabulary_settings:
            self._discard_lookups(self.engine.describe())

    def _discard_lookups(self, counts: dict[str, Any]) -> None:
        """Discards lookups of replaced rows, also if they were applied."""
        if self._is_pipelined or any(counts["pending"] + counts["awaiting"]):
            return
        # Applied lookups are not counted. A lookup that fails discards them.
        if any(counts["open"] + counts["followed"]) or not counts["poisoned"]:
            self._started.reset()
