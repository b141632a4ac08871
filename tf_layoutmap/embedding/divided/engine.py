"""The host engine of a process that has a part of each table.

Each process has an engine for the steps of all replicas, over its own rows. A
replica asks the owners of its rows for them, combines them itself, and sends
each owner the gradients of the activations that its rows went into. There the
engine gets them as batches: of each feature the ids that are rows of it, with
their gains. So the sums are those of one process with as many replicas, in the
same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.embedding.divided import (
    collectives,
    orders,
    step_exchange,
    steps_in_flight,
)
from tf_layoutmap.embedding.host import multi_process_checks, op_arguments
from tf_layoutmap.embedding.host.engine import HostEngine, OpenLookup
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.variables import tables


class DividedLookup(NamedTuple):
    """A lookup that gradients may follow.

    Attributes:
      opened: By replica, the lookup of this process's engine.
      step: What it exchanges.
    """

    opened: list[OpenLookup]
    step: steps_in_flight.Step


class DividedEngine(HostEngine):
    """The steps of all replicas on the rows of this process."""

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        group: collectives.Group,
        *,
        out_of_range: str,
        rounding_seed: int,
        order: str,
    ):
        """Creates the engine.

        Args:
          spec: Tables and features, of the whole tables.
          variables: Of `DividedTables`.
          group: The processes.
          out_of_range: What becomes of ids that are no row of their table.
          rounding_seed: Of tables with 16-bit rows.
          order: `"exact"` or `"folded"`.

        Raises:
          ValueError: If a table does not go with the order.
        """
        self._group = group
        own = {
            name: {
                key: getattr(one, "block", one) for key, one in by_name.items()
            }
            for name, by_name in variables.items()
        }
        rows = [variables[one.name][tables.PARAMETERS] for one in spec.tables]
        in_order: orders.Order = (
            orders.Exact(spec, group.size)
            if order == "exact"
            else orders.Folded(
                spec,
                group.size,
                group.rank,
                [one.cut.num_shards for one in rows],
            )
        )
        own_spec = _own_spec(spec, own, in_order.features())
        super().__init__(
            own_spec,
            own,
            num_replicas=group.size,
            rounding_seed=rounding_seed,
            first_rows=[one.rows.start for one in rows],
        )
        self._exchange = step_exchange.StepExchange(
            spec,
            own_spec,
            variables,
            group,
            in_order,
            out_of_range=out_of_range,
            rounding_seed=rounding_seed,
        )
        self._steps = steps_in_flight.StepsInFlight()

    @property
    def restores(self) -> multi_process_checks.RestoreCounter:
        """How many checkpoints this process has restored."""
        return self._exchange.restores

    def enqueue(
        self, replica: int, training: Any, features: op_arguments.StepInputs
    ):
        """Tells the owners of rows the ids of this replica."""
        step, of_training, inputs = self._exchange.plan(training, features)
        for other, received in enumerate(inputs):
            super().enqueue(other, of_training[other], received)
        self._steps.enqueue(step)

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        step = self._steps.dequeue()
        for other in range(self._group.size):
            with tf.device(self._handle.device):
                _ops.pass_step(engine=self._handle, replica=other)
        return self._exchange.fetch(step)

    def apply(
        self,
        replica: int,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies this replica's gradients, and those of other processes.

        The hyperparameters of the last replica count, in all processes.
        """
        received, last = self._exchange.send_gradients(
            self._steps.take_dequeued(), gradients, hyperparameters
        )
        for other, own in enumerate(received):
            super().apply(other, own, last)

    def open(
        self, replica: int, features: op_arguments.StepInputs
    ) -> DividedLookup:
        """Opens this replica's lookup, and those of other processes."""
        step, _, inputs = self._exchange.plan(True, features)
        return DividedLookup(
            [
                super(DividedEngine, self).open(other, received)
                for other, received in enumerate(inputs)
            ],
            step,
        )

    def look_up(self, replica: int, lookup: DividedLookup) -> list[tf.Tensor]:
        """Returns the activations of an open lookup, one per feature."""
        return self._exchange.fetch(lookup.step)

    def look_up_only(
        self, features: op_arguments.StepInputs
    ) -> list[tf.Tensor]:
        """Returns activations that nothing follows, one per feature."""
        step, _, _ = self._exchange.plan(False, features)
        return self._exchange.fetch(step)

    def follow(
        self,
        replica: int,
        lookup: DividedLookup,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Keeps this replica's gradients, and those of other processes."""
        received, _ = self._exchange.send_gradients(lookup.step, gradients, [])
        marks = [
            super(DividedEngine, self).follow(other, opened, own)
            for other, (opened, own) in enumerate(zip(lookup.opened, received))
        ]
        # In order, and none left out: the others' marks come from there.
        with tf.control_dependencies(marks):
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
        own = tf.concat([tf.reshape(marks, [-1]), *hyperparameters], 0)
        found = self._group.all_gather(own[tf.newaxis])
        size = int(marks.shape.num_elements())
        last = step_exchange.split_vector(
            found[-1, size:], [one.shape for one in hyperparameters]
        )
        for other in range(self._group.size):
            super().apply_followed(
                other, tf.reshape(found[other, :size], marks.shape), last
            )

    def describe(self) -> dict[str, Any]:
        """Returns what the engine holds: of the rows of this process."""
        found = super().describe()
        # Of ids as owners get them, which are no counts of batches.
        del found["features"]
        return found


def _own_spec(
    spec: config.EmbeddingSpec,
    own: dict[str, dict[str, Any]],
    features: tuple[config.FeatureSpec, ...],
) -> config.EmbeddingSpec:
    """What the engine of a process is told: its rows, and ids with gains."""
    return dataclasses.replace(
        spec,
        tables=tuple(
            dataclasses.replace(
                one,
                num_rows=int(own[one.name][tables.PARAMETERS].shape[0]),
                combiner="sum",
                quantization=None,
            )
            for one in spec.tables
        ),
        features=features,
    )
