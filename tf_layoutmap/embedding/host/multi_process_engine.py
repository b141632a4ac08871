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
from tf_layoutmap.embedding.host import multi_process_checks
from tf_layoutmap.embedding.host.engine import HostEngine, OpenLookup
from tf_layoutmap.embedding.step import feature_inputs
from tf_layoutmap.embedding.step.replicas import Replicas
from tf_layoutmap.embedding.variables import tables

# How long a process waits for the others, which may be writing a checkpoint.
# One that died is noticed earlier, by its connection.
TIMEOUT_SECONDS = 600

# What a process says of each feature: its form (the rank of its splits, 0 if
# it is dense), ids, splits, weights and samples.
_NUM_SIZES = 5
# Values of a table that are made equal at a time.
_CHUNK = 2**22


class WorkerEngine(HostEngine):
    """A `HostEngine` whose steps are those of all processes."""

    def __init__(self, spec: Any, variables: Any, strategy_replicas: Replicas,
                 **options: Any):
        """Creates the engine; see `HostEngine`."""
        super().__init__(
            spec, variables, num_replicas=strategy_replicas.num_replicas,
            **options)
        self._replicas = strategy_replicas
        self._num_local = len(
            strategy_replicas.strategy.extended.worker_devices)
        self._checks_ids = options.get("out_of_range", "error") == "error"
        self.restores = multi_process_checks.RestoreCounter()

    def enqueue(
        self, replica: int, training: Any,
        features: Sequence[feature_inputs.FeatureIds],
    ):
        """Hands over this replica's ids, and those of other processes."""
        gathered, checks = self._gather_checked(training, features)
        with tf.control_dependencies(checks):
            for other in self._replicas.handled_by(replica):
                super().enqueue(other, *gathered[other])

    def _gather_checked(self, training, features):
        """`(training, features)` of each replica, and what must be right."""
        gathered, restores = _gather_inputs(
            features, tf.convert_to_tensor(training, tf.bool),
            self.restores.value(), self._replicas.num_replicas)
        checks = multi_process_checks.check_restores(restores, self._num_local)
        for number, (_, inputs) in enumerate(gathered):
            if self._checks_ids:
                checks += multi_process_checks.check_ids(
                    self._spec, inputs, number // self._num_local)
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
        self, replica: int, gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies this replica's gradients, and those of other processes.

        The hyperparameters of the last replica count, in all processes.
        """
        gathered = _gather_gradients(
            gradients, hyperparameters, self._replicas.num_replicas)
        _, last = gathered[-1]
        for other in self._replicas.handled_by(replica):
            super().apply(other, gathered[other][0], last)

    def open(
        self, replica: int, features: Sequence[feature_inputs.FeatureIds],
    ) -> OpenLookup:
        """Opens this replica's lookup, and those of other processes."""
        gathered, checks = self._gather_checked(True, features)
        with tf.control_dependencies(checks):
            opened = [super(WorkerEngine, self).open(other, gathered[other][1])
                      for other in self._replicas.handled_by(replica)]
        tokens = {other: token for one in opened
                  for other, token in one.tokens.items()}
        return OpenLookup(opened[0].engine, tokens)

    def follow(
        self, replica: int, lookup: OpenLookup,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Keeps this replica's gradients, and those of other processes."""
        gathered = _gather_gradients(
            gradients, [], self._replicas.num_replicas)
        marks = {other: super(WorkerEngine, self).follow(
            other, lookup, gathered[other][0]) for other in lookup.tokens}
        # In order, and none left out: the others' marks come from there.
        with tf.control_dependencies(list(marks.values())):
            return tf.identity(marks[replica])

    def apply_followed(
        self, replica: int, marks: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies what the marks of the replicas of all processes stand for.

        The hyperparameters of the last replica count, in all processes.
        """
        gathered = _gather_gradients(
            [marks], hyperparameters, self._replicas.num_replicas)
        _, last = gathered[-1]
        for other in self._replicas.handled_by(replica):
            super().apply_followed(other, gathered[other][0][0], last)


def agree_on_first_values(
    variables: dict[str, dict[str, Any]], strategy: tf.distribute.Strategy,
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
                options=_options())
        return strategy.experimental_local_results(
            strategy.run(of_replica))[0]

    for by_name in variables.values():
        for variable in tables.shards_of(by_name[tables.PARAMETERS]):
            rows_at_once = max(1, _CHUNK // int(variable.shape[1]))
            for first in range(0, int(variable.shape[0]), rows_at_once):
                part = variable[first:first + rows_at_once]
                variable[first:first + rows_at_once].assign(tf.cast(
                    broadcast(tf.cast(part, tf.float32)), variable.dtype))


def _options() -> tf.distribute.experimental.CommunicationOptions:
    return tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=TIMEOUT_SECONDS)


def _all_gather(values: tf.Tensor) -> tf.Tensor:
    """The vectors, or rows, of all replicas after each other."""
    context = tf.distribute.get_replica_context()
    return context.all_gather(values, axis=0, options=_options())


def _size(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64)


def _form(feature: feature_inputs.FeatureIds) -> int:
    if feature.splits.shape.rank == 2:
        return 2
    return 0 if feature.splits.shape[0] == 0 else 1


def _gather_inputs(features, training, restores, num_replicas: int):
    """`(training, features)` and restores of each replica, on all replicas.
    """
    sizes = [tf.cast(training, tf.int64), restores]
    for one in features:
        sizes += [tf.constant(_form(one), tf.int64), _size(one.ids),
                  _size(one.splits), _size(one.weights),
                  tf.cast(one.num_samples, tf.int64)]
    sizes = tf.ensure_shape(
        _all_gather(tf.stack(sizes)[tf.newaxis]),
        [num_replicas, 2 + _NUM_SIZES * len(features)])
    whole = [tf.reshape(tf.cast(part, tf.int64), [-1])
             for one in features for part in (one.ids, one.splits)]
    whole = _Reader(_all_gather(tf.concat(whole, 0)))
    # Whether there are weights is part of the program, which is one.
    has_weights = any(one.weights.shape[0] != 0 for one in features)
    weights = _Reader(_all_gather(tf.concat(
        [one.weights for one in features], 0)) if has_weights
        else tf.zeros([0]))
    found = []
    for replica in range(num_replicas):
        inputs = []
        for index, one in enumerate(features):
            first = 2 + _NUM_SIZES * index
            form, num_ids, num_splits, num_weights, num_samples = tf.unstack(
                sizes[replica, first:first + _NUM_SIZES])
            check = tf.debugging.assert_equal(
                form, tf.constant(_form(one), tf.int64),
                f"Feature {index} must have the same form, dense, sparse or "
                "ragged, in all processes.")
            with tf.control_dependencies([] if check is None else [check]):
                ids = whole.take(num_ids)
            splits = whole.take(num_splits)
            if _form(one) == 2:
                splits = tf.reshape(splits, [-1, 2])
            elif _form(one) == 0:
                splits = tf.zeros([0], tf.int64)
            inputs.append(feature_inputs.FeatureIds(
                ids, splits, num_samples, weights.take(num_weights)))
        found.append((tf.cast(sizes[replica, 0], tf.bool), inputs))
    return found, sizes[:, 1]


def _gather_gradients(gradients, hyperparameters, num_replicas: int):
    """`(gradients, hyperparameters)` of each replica, on all replicas."""
    rows = _all_gather(tf.stack(
        [tf.shape(one, tf.int64)[0] for one in gradients])[tf.newaxis])
    values = _Reader(_all_gather(tf.concat(
        [tf.reshape(one, [-1]) for one in [*gradients, *hyperparameters]],
        0)))
    found = []
    for replica in range(num_replicas):
        of_replica = [
            tf.reshape(values.take(rows[replica, index] * int(
                one.shape[1:].num_elements())), [-1, *one.shape[1:]])
            for index, one in enumerate(gradients)]
        found.append((of_replica, [
            tf.ensure_shape(values.take(int(one.shape[0])), one.shape)
            for one in hyperparameters]))
    return found


class _Reader:
    """Takes one piece after the other from a vector."""

    def __init__(self, values: tf.Tensor):
        self._values = values
        self._next = tf.constant(0, tf.int64)

    def take(self, size: tf.Tensor | int) -> tf.Tensor:
        """Returns the next `size` values."""
        size = tf.cast(size, tf.int64)
        piece = self._values[self._next:self._next + size]
        self._next += size
        return piece
