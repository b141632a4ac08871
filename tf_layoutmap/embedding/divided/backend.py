"""Carries the steps of a `TPUEmbedding` out with divided tables."""

# DOC-MERGE: The host engine of a process that has a part of each table.
#
# Each process has an engine for the steps of all replicas, over its own rows. A
# replica asks the owners of its rows for them, combines them itself, and sends
# each owner the gradients of the activations that its rows went into. There the
# engine gets them as batches: of each feature the ids that are rows of it, with
# their gains. So the sums are those of one process with as many replicas, in the
# same order.
#
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import replicas
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.divided import step_exchange
from tf_layoutmap.embedding.divided import tables as divided_tables
from tf_layoutmap.embedding.host import engine, multi_process
from tf_layoutmap.embedding.host.backend import HostBackend
from tf_layoutmap.embedding.host.engine import HostEngine, OpenLookup
from tf_layoutmap.embedding.spec import config


class DividedLookup(NamedTuple):
    """A lookup that gradients may follow.

    Attributes:
      opened: By replica, the lookup of this process's engine.
      step: What it exchanges.
    """

    opened: list[OpenLookup]
    step: step_exchange.Step


class DividedEngine(HostEngine):
    """The steps of all replicas on the rows of this process."""

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        group: divided_tables.Group,
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
        rows = [
            variables[one.name][embedding_tables.PARAMETERS]
            for one in spec.tables
        ]
        in_order: step_exchange.Order = (
            step_exchange.Exact(spec, group.size)
            if order == "exact"
            else step_exchange.Folded(
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
        self._steps = step_exchange.StepsInFlight()

    @property
    def restores(self) -> multi_process.RestoreCounter:
        """How many checkpoints this process has restored."""
        return self._exchange.restores

    def enqueue(self, replica: int, training: Any, features: engine.StepInputs):
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
                ops.pass_step(engine=self._handle, replica=other)
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

    def open(self, replica: int, features: engine.StepInputs) -> DividedLookup:
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

    def look_up_only(self, features: engine.StepInputs) -> list[tf.Tensor]:
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
                num_rows=int(
                    own[one.name][embedding_tables.PARAMETERS].shape[0]
                ),
                combiner="sum",
                quantization=None,
            )
            for one in spec.tables
        ),
        features=features,
    )


class DividedBackend(HostBackend):
    """A `HostBackend` whose process has a part of each table."""

    is_divided: ClassVar[bool] = True

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
        order: str,
    ):
        """Takes the checked arguments of `TPUEmbedding`.

        Raises:
          NotImplementedError: If updates are to wait for the next step, a
            table takes ids as they come, or a process has several devices.
          ValueError: If there is a partitioner.
        """
        if spec.has_open_tables:
            raise NotImplementedError(
                "Argument `vocabularies` must be None with over_processes="
                '"divided": keys have no owners yet. Received: '
                f"{[one.name for one in spec.tables if one.vocabulary]}."
            )
        if is_pipelined:
            raise NotImplementedError(
                "Argument `pipeline_execution_with_tensor_core` must be False "
                'with over_processes="divided". Received: True.'
            )
        if partitioner is not None:
            raise ValueError(
                "Argument `partitioner` must be None with over_processes="
                '"divided", where each process has one shard of a table. '
                f"Received: {partitioner!r}."
            )
        super().__init__(
            feature_config,
            spec,
            strategy_replicas,
            partitioner=None,
            is_pipelined=False,
            out_of_range=out_of_range,
            rounding_seed=rounding_seed,
        )
        self._order = order
        self._group = divided_tables.Group(strategy_replicas.strategy)
        self._tables = divided_tables.DividedTables(
            self._group, strategy_replicas.strategy
        )

    def create_tables(self) -> dict[str, dict[str, Any]]:
        """Creates the variables of this process."""
        return self._tables.create(self._spec)

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Creates the engine over the variables."""
        self._variables = variables
        self.engine = DividedEngine(
            self._shapes.fix_spec(),
            variables,
            self._group,
            out_of_range=self._out_of_range,
            rounding_seed=self._rounding_seed,
            order=self._order,
        )

    def look_up(self, features: Any, weights: Any) -> list[tf.Tensor]:
        """Returns activations that nothing follows, one per feature."""
        self._replicas.require_current("call")
        assert isinstance(self.engine, DividedEngine)
        return self._shapes.shape_all_activations(
            self.engine.look_up_only(
                self._reader.read_features(features, weights)
            )
        )

    def note_restore(self) -> None:
        """Counts a restore, which all processes must make."""
        assert isinstance(self.engine, DividedEngine)
        self.engine.restores.add_one()
