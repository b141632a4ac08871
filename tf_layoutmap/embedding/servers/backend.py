"""The backend of `TPUEmbedding` for parameter servers.

`ServersBackend` implements the interface in `tf_layoutmap.embedding.backend`.
Tables are sharded over the servers. In each step, a worker or the coordinator
reads rows from the servers, combines the rows, and sends gradients to the
servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap.embedding import (
    changes,
    replicas,
    resizing,
    steps,
    table_store,
)
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import base_backend, engine
from tf_layoutmap.embedding.servers import (
    closure_trace,
    closures,
    evicted_reports,
    key_editor,
    key_step_ops,
    lookups,
    step_ops,
)
from tf_layoutmap.embedding.servers import tables as server_tables
from tf_layoutmap.vocabulary import kept_strings


class ServersBackend(base_backend.BaseBackend):
    """A backend with tables on servers and steps on workers.

    All calls of a step must be in one function. A worker or the coordinator
    runs this function, reads rows from the servers, and sends gradients to the
    servers.
    """

    _store: server_tables.ServerStore

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
        wire_dtype: str,
    ):
        """Stores the checked arguments of `TPUEmbedding`.

        Raises:
          NotImplementedError: If `is_pipelined` is True, or if `keep_strings`
            of a vocabulary is set.
        """
        if is_pipelined:
            raise NotImplementedError(
                "Argument `pipeline_execution_with_tensor_core` must be False "
                "under ParameterServerStrategy. To read the rows of a step "
                "while the previous step runs, use "
                "tlm.ps.Run(prefetch_steps=1). Received: True."
            )
        kept_strings.check_supported(
            spec.vocabulary_settings,
            "ParameterServerStrategy",
            "rows are assigned to keys on the servers, which receive only the "
            "hashes of strings",
        )
        super().__init__(
            feature_config,
            spec,
            strategy_replicas,
            server_tables.ServerStore(strategy_replicas.strategy, partitioner),
            out_of_range=out_of_range,
            rounding_seed=rounding_seed,
        )
        self._wire_dtype = wire_dtype
        self._modes = steps.StepModes(finds_forward_steps=False)
        self._steps = closures.StepsInFlight()
        self._lookups = lookups.Lookups()
        self._ops: step_ops.StepOps | None = None
        self._evicted: evicted_reports.EvictedReports | None = None

    @property
    def has_row_steps(self) -> bool:
        """Returns False, because the servers hold the rows."""
        return False

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of a sum of marks."""
        return engine.MARK_SHAPE

    @property
    def variable_device(self) -> str:
        """Device of the small variables that a layer's steps use: server 0."""
        return self._store.devices[0]

    @property
    def is_built(self) -> bool:
        """Whether the tables exist."""
        return self._ops is not None

    @property
    def _started(self) -> step_ops.StepOps:
        assert self._ops is not None  # See `start`.
        return self._ops

    @property
    def _key_ops(self) -> key_step_ops.KeyStepOps:
        # Only tables with open vocabularies have `Vocabulary` objects.
        return cast(key_step_ops.KeyStepOps, self._started)

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Creates the object that calls the ops of steps."""
        self._store = self._store.with_tables(self._spec, variables)
        self._ops = self._make_ops(self._shapes.fix_spec(), variables)
        self._evicted = evicted_reports.EvictedReports(
            self._spec, self._ops.servers
        )

    def _make_ops(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
    ) -> step_ops.StepOps:
        kind = (
            key_step_ops.KeyStepOps
            if spec.has_open_tables
            else step_ops.StepOps
        )
        made = kind(
            spec,
            variables,
            out_of_range=self._out_of_range,
            rounding_seed=self._rounding_seed,
            wire_dtype=self._wire_dtype,
        )
        made.create_handles()
        return made

    def enqueue(self, batch: Any, training: Any, name: str | None) -> None:
        """Plans the requests of a batch, and enqueues the step."""
        if not isinstance(training, bool):
            raise ValueError(
                "Argument `training` must be a Python bool under "
                "ParameterServerStrategy, where a step is part of the "
                f"function that enqueues it. Received: {training!r}."
            )
        self._modes.enqueued(name, training)
        if training:
            closure_trace.count_enqueued()
        ((_, inputs),) = batch.steps
        # During tracing, a step is forward-only until `apply` calls `train`.
        plan, requests = self._started.begin(
            inputs,
            None if training and not tf.executing_eagerly() else training,
        )
        self._steps.enqueue(closures.Step(plan, plan, requests, training))

    def dequeue(self, name: str | None) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        step = self._steps.dequeue()
        self._modes.dequeued(name)
        step.fetched = self._started.fetch(step.requests)
        step.plan = self._started.placed(step.plan, step.fetched)
        activations = self._shapes.shape_all_activations(
            self._started.combine(step.plan, step.fetched)
        )
        self._shapes.record_dequeued(0, activations)
        return activations

    def apply(self, gradients: Sequence[Any], name: str | None) -> None:
        """Applies the gradients of the last dequeued step."""
        self._modes.applied(name)
        flat = self._shapes.flat_gradients(0, gradients)
        step = self._steps.take_dequeued()
        self._started.train(step.begun)
        self._started.apply(
            step.plan,
            step.fetched,
            flat,
            steps.hyperparameters(self._spec.tables),
            closure_trace.token_to_apply(self._started.applied_closures),
        )

    def open(
        self,
        features: Any,
        weights: Any,
    ) -> tuple[Any, list[tf.Tensor]]:
        """Looks up a batch independently of `enqueue` and `dequeue`."""
        inputs = self._reader.read_features(features, weights)
        begun, requests = self._started.begin_call(
            inputs,
            self._lookups.earlier(
                self._started.forget if self._started.pins_rows else None
            ),
        )
        fetched = self._started.fetch(requests)
        plan = self._started.placed(begun, fetched)
        activations = self._shapes.shape_all_activations(
            self._started.combine(plan, fetched)
        )
        return self._lookups.open(inputs, begun, plan, fetched), activations

    def follow(
        self,
        lookup: Any,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Stores the gradients of a lookup, and returns their mark."""
        return self._lookups.follow(
            lookup, self._shapes.flat_gradients_of_call(gradients)
        )

    def apply_followed(self, marks: tf.Tensor) -> None:
        """Applies the gradients that a sum of marks represents, in one step."""
        followed = self._lookups.take(marks)
        plan, fetched = followed[0].plan, followed[0].fetched
        gradients = followed[0].gradients
        if len(followed) > 1:
            batch, gradients = lookups.joined(
                followed, self._reader.unpacked_features
            )
            plan, fetched = self._started.join(batch, followed)
        self._started.apply(
            plan,
            fetched,
            gradients,
            steps.hyperparameters(self._spec.tables),
            closure_trace.token_to_apply(self._started.applied_closures),
        )

    def _key_editor(self) -> key_editor.ServerKeyEditor:
        return key_editor.ServerKeyEditor(
            self._store, self.flush, self._key_ops
        )

    def evict_keys(
        self, table: int, keys: tf.Tensor, *, expired: bool
    ) -> tf.Tensor:
        """Evicts keys of an open vocabulary; see `Vocabulary`.

        If `on_evict` raises an error, the keys are evicted. They are reported
        again by the next report.
        """
        evicted = super().evict_keys(table, keys, expired=expired)
        self.report_evicted()
        return evicted

    def report_evicted(self) -> int:
        """Calls `on_evict` with all evicted keys; see `Vocabulary`.

        Inside a `tf.function`, the method does nothing.
        """
        if self._evicted is None or not tf.executing_eagerly():
            return 0
        return self._evicted.report()

    @contextlib.contextmanager
    def _steps_retired(self, call: str, table: str) -> Iterator[None]:
        del call, table
        # Only the eager steps of this thread are known.
        self._check_no_steps("A vocabulary cannot be resized")
        self.report_evicted()
        with self._started.retired():
            yield

    def _resized_steps(
        self,
        resized: resizing.Resized,
        spec: config.EmbeddingSpec,
        variables: table_store.Variables,
    ) -> Callable[[], None]:
        started = self._make_ops(spec, variables)
        reports = evicted_reports.EvictedReports(resized.spec, started.servers)
        for table, values in resized.dropped.items():
            reports.report_dropped(table, values)

        def use_new_steps() -> None:
            self._ops, self._evicted = started, reports

        return use_new_steps

    def watch_changes(self) -> Any:
        """Starts to record which rows are written."""
        started = self._started
        self._changes = changes.Changes(
            self._store,
            [
                started.recorder(server, self._store)
                for server in started.servers
            ],
            started.count_in_flight,
        )
        return self._changes

    def flush(self) -> None:
        """Does nothing, because there is no pending pipelined update."""

    def reset(self) -> None:
        """Discards all eager steps of this thread."""
        last = self._steps.last_of_thread()
        if last is not None and last.training and last.fetched is not None:
            self._started.forget(last.fetched)
        self._steps.reset()

    def describe(self) -> dict[str, Any]:
        """Returns the counters of the servers and the steps of this thread."""
        counts = self._started.count()
        num_pending, awaits = self._steps.describe()
        num_updates = sum(count.num_updates for count in counts.values())
        return {
            "pending": [num_pending],
            "awaiting": [awaits],
            "num_updates": max(count.num_updates for count in counts.values()),
            "poisoned": "",
            "held": False,
            "wire_dtype": self._wire_dtype,
            "staleness": {
                "mean": (
                    sum(count.staleness_sum for count in counts.values())
                    / num_updates
                    if num_updates
                    else 0.0
                ),
                "max": max(count.staleness_max for count in counts.values()),
            },
            "num_repeated": max(
                count.num_repeated for count in counts.values()
            ),
            "servers": {
                device: {"num_updates": count.num_updates}
                for device, count in counts.items()
            },
            "tables": {
                table.name: {
                    "num_bytes": table.num_bytes,
                    "num_slot_bytes": table.num_slot_bytes,
                }
                for table in self._spec.tables
            },
        }

    def before_read(self) -> None:
        """Reports evicted keys, so that no report is older than a checkpoint.

        If the program continues from the checkpoint, the servers no longer have
        earlier reports.
        """
        self.report_evicted()

    def before_async_copy(self) -> None:
        """Reports evicted keys, as `before_read`."""
        self.report_evicted()

    def before_restore(self) -> None:
        """Checks that this thread has no eager step, and reports evicted keys.

        Raises:
          RuntimeError: If steps are in flight.
        """
        self._check_no_steps("A checkpoint cannot be restored")
        self.report_evicted()

    def _check_no_steps(self, problem: str) -> None:
        """Raises a RuntimeError if this thread has eager steps in flight."""
        num_pending, awaits = self._steps.describe()
        if num_pending or awaits:
            raise RuntimeError(
                f"{problem} while steps are in flight; finish the steps, or "
                "call `reset` to discard them. Pending: "
                f"{num_pending}, awaiting gradients: {awaits}."
            )

    def note_restore(self) -> None:
        """Records that all values are replaced."""
        self._count_replacement()
