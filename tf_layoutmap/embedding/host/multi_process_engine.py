"""The host engine under a strategy of several processes.

Each process has all tables and an engine for all replicas. Ids and gradients
of a step are gathered over the processes, and each engine is told those of all
replicas, in one order: so all of them make the same update, and the copies of
a table stay equal to the bit. A replica looks up its own samples only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.embedding.host import (
    multi_process_checks,
    multi_process_gather,
)
from tf_layoutmap.embedding.host.engine import HostEngine, OpenLookup
from tf_layoutmap.embedding.step import feature_inputs
from tf_layoutmap.embedding.step.replicas import Replicas
from tf_layoutmap.embedding.variables import tables
from tf_layoutmap.sharded.routing.shards import known_size

# Values of a table that are made equal at a time.
_CHUNK = 2**22


class WorkerEngine(HostEngine):
    """A `HostEngine` whose steps are those of all processes."""

    def __init__(
        self,
        spec: Any,
        variables: Any,
        strategy_replicas: Replicas,
        **options: Any,
    ):
        """Creates the engine; see `HostEngine`."""
        super().__init__(
            spec,
            variables,
            num_replicas=strategy_replicas.num_replicas,
            # All processes see the same keys go; one tells it.
            tells_evicted=strategy_replicas.is_first_process,
            in_processes=True,
            **options,
        )
        self._replicas = strategy_replicas
        self._num_local = len(
            strategy_replicas.strategy.extended.worker_devices
        )
        self._checks_ids = options.get("out_of_range", "error") == "error"
        self.restores = multi_process_checks.RestoreCounter()

    def enqueue(
        self,
        replica: int,
        training: Any,
        features: Sequence[feature_inputs.FeatureIds],
    ):
        """Hands over this replica's ids, and those of other processes."""
        gathered, checks = self._gather_checked(training, features)
        if self._spec.has_open_tables:
            modes = [mode for mode, _ in gathered]
            # Once all is gathered: an error ends what others still gather.
            with tf.control_dependencies(
                [
                    tensor
                    for _, inputs in gathered
                    for one in inputs
                    for tensor in (one.ids, one.weights)
                ]
            ):
                checks += multi_process_checks.check_modes(
                    modes, self._num_local
                )
            # The first replica of a process hands the step of all over: which
            # rows new keys get depends on the order of all batches.
            if replica % self._num_local == 0:
                with tf.control_dependencies(checks):
                    self.enqueue_keys(modes[0], [one for _, one in gathered])
            return
        with tf.control_dependencies(checks):
            for other in self._replicas.handled_by(replica):
                super().enqueue(other, *gathered[other])

    def _gather_checked(self, training, features):
        """`(training, features)` of each replica, and what must be right."""
        gathered, restores = multi_process_gather.gather_inputs(
            features,
            tf.convert_to_tensor(training, tf.bool),
            self.restores.value(),
            self._replicas.num_replicas,
        )
        checks = multi_process_checks.check_restores(restores, self._num_local)
        for number, (_, inputs) in enumerate(gathered):
            if self._checks_ids:
                checks += multi_process_checks.check_ids(
                    self._spec, inputs, number // self._num_local
                )
        return gathered, checks

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        activations = super().dequeue(replica)
        for other in self._replicas.handled_by(replica):
            if other == replica:
                continue
            with tf.device(self._handle.device):
                _ops.pass_step(engine=self._handle, replica=other)
        return activations

    def apply(
        self,
        replica: int,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies this replica's gradients, and those of other processes.

        The hyperparameters of the last replica count, in all processes.
        """
        gathered = multi_process_gather.gather_gradients(
            gradients, hyperparameters, self._replicas.num_replicas
        )
        _, last = gathered[-1]
        for other in self._replicas.handled_by(replica):
            super().apply(other, gathered[other][0], last)

    def open(
        self,
        replica: int,
        features: Sequence[feature_inputs.FeatureIds],
    ) -> OpenLookup:
        """Opens this replica's lookup, and those of other processes.

        Raises:
          NotImplementedError: If tables have open vocabularies, and this
            process several replicas.
        """
        if self._spec.has_open_tables and self._num_local > 1:
            # They would open the lookups in another order than in other
            # processes, and keys get other rows.
            raise NotImplementedError(
                "A layer with an open vocabulary must have one replica in each "
                "process of a MultiWorkerMirroredStrategy. Received: "
                f"{self._num_local} replicas in this process."
            )
        gathered, checks = self._gather_checked(True, features)
        with tf.control_dependencies(checks):
            opened = [
                super(WorkerEngine, self).open(other, gathered[other][1])
                for other in self._replicas.handled_by(replica)
            ]
        tokens = {
            other: token
            for one in opened
            for other, token in one.tokens.items()
        }
        return OpenLookup(opened[0].engine, tokens)

    def follow(
        self,
        replica: int,
        lookup: OpenLookup,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Keeps this replica's gradients, and those of other processes."""
        gathered = multi_process_gather.gather_gradients(
            gradients, [], self._replicas.num_replicas
        )
        marks = {
            other: super(WorkerEngine, self).follow(
                other, lookup, gathered[other][0]
            )
            for other in lookup.tokens
        }
        # In order, and none left out: the others' marks come from there.
        with tf.control_dependencies(list(marks.values())):
            return tf.identity(marks[replica])

    def apply_followed(
        self,
        replica: int,
        marks: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies what the marks of the replicas of all processes stand for.

        The hyperparameters of the last replica count, in all processes.
        """
        gathered = multi_process_gather.gather_gradients(
            [marks], hyperparameters, self._replicas.num_replicas
        )
        _, last = gathered[-1]
        for other in self._replicas.handled_by(replica):
            super().apply_followed(other, gathered[other][0][0], last)


def agree_on_first_values(
    variables: dict[str, dict[str, Any]],
    strategy: tf.distribute.Strategy,
):
    """Gives the variables of all processes the values of the first one.

    Initializers without a seed give other rows in each process.
    """

    @tf.function
    def broadcast(part: tf.Tensor) -> tf.Tensor:
        def of_replica():
            context = tf.distribute.get_replica_context()
            is_first = context.replica_id_in_sync_group == 0
            return context.all_reduce(
                tf.distribute.ReduceOp.SUM,
                tf.where(is_first, part, tf.zeros_like(part)),
                options=multi_process_gather.options(),
            )

        return strategy.experimental_local_results(strategy.run(of_replica))[0]

    for by_name in variables.values():
        for variable in tables.shards_of(by_name[tables.PARAMETERS]):
            rows_at_once = max(1, _CHUNK // known_size(variable, 1))
            for first in range(0, known_size(variable), rows_at_once):
                part = variable[first : first + rows_at_once]
                variable[first : first + rows_at_once].assign(
                    tf.cast(
                        broadcast(tf.cast(part, tf.float32)), variable.dtype
                    )
                )
