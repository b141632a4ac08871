"""The host engine under a strategy with several processes.

Each process stores all tables, and has an engine for the steps of all replicas.
`WorkerEngine` gathers the ids and gradients of a step over the processes. Then
`WorkerEngine` passes the ids and gradients of all replicas to the engine of
each process in the same order. Therefore all engines compute the same update,
and the copies of a table remain bitwise identical. A replica looks up only its
own samples.

The checks of ids, modes and restores run on the gathered values, so all
processes raise the same error. Unlike an error of the engine, this error names
the process that passed the value.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import processes, tables
from tf_layoutmap.embedding.host import process_checks
from tf_layoutmap.embedding.host.engine import HostEngine, OpenLookup
from tf_layoutmap.embedding.replicas import Replicas
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import key_rows


class RestoreCounter:
    """A counter of the checkpoints that this process has restored.

    `check_restores` compares the counters of all processes. If only some
    processes restore a checkpoint, their rows differ from the rows of the other
    processes.
    """

    def __init__(self):
        with tf.init_scope(), tf.device(tables.HOST):
            # The variable is local to this process, whatever the strategy in
            # scope.
            self._count = tf_private.ResourceVariable(
                0, dtype=tf.int64, trainable=False, name="num_restores"
            )

    def add_one(self):
        """Counts a restore."""
        self._count.assign_add(1)

    def value(self) -> tf.Tensor:
        """Returns the current count as a tensor."""
        return self._count.read_value()


class WriteRecord:
    """A fingerprint of all rows that this process has written by key.

    `check_writes` compares the fingerprints of all processes. If the processes
    write different rows, their tables differ.
    """

    def __init__(self):
        with tf.init_scope(), tf.device(tables.HOST):
            self._fingerprint = tf_private.ResourceVariable(
                0, dtype=tf.int64, trainable=False, name="written_rows"
            )

    def add(self, table: int, written: key_rows.RowsToWrite):
        """Adds the keys and rows of a write."""
        checksum = zlib.crc32(repr((int(self.value()), table)).encode())
        self._fingerprint.assign(written.checksum(checksum))

    def value(self) -> tf.Tensor:
        """Returns the fingerprint as a tensor."""
        return self._fingerprint.read_value()


# Number of values that describe the input of one feature in a message. The
# values are the form (0 for dense, 1 for ragged, 2 for sparse), the kind of the
# ids, and the numbers of ids, splits, weights and samples.
_NUM_SIZES = 6


# Function that gathers the values of all replicas, such as
# `Processes.all_gather_of_replicas`.
Gather = Callable[[tf.Tensor], tf.Tensor]


def _size(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64)


def _form(feature: embedding_inputs.FeatureIds) -> int:
    if feature.splits.shape.rank == 2:
        return 2
    return 0 if feature.splits.shape[0] == 0 else 1


def gather_inputs(
    all_gather: Gather,
    features: Sequence[embedding_inputs.FeatureIds],
    training: tf.Tensor,
    restores: tf.Tensor,
    writes: tf.Tensor,
    num_replicas: int,
):
    """Gathers the inputs of all replicas on each replica.

    Returns:
      A tuple of three elements: a list with a tuple `(training, features)` for
      each replica, and two `[num_replicas]` tensors with the number of restores
      and the fingerprint of the written rows of each replica.
    """
    sizes = [tf.cast(training, tf.int64), restores, writes]
    for feature in features:
        sizes += [
            tf.constant(_form(feature), tf.int64),
            tf.cast(feature.kind, tf.int64),
            _size(feature.ids),
            _size(feature.splits),
            _size(feature.weights),
            tf.cast(feature.num_samples, tf.int64),
        ]
    sizes = tf.ensure_shape(
        all_gather(tf.stack(sizes)[tf.newaxis]),
        [num_replicas, 3 + _NUM_SIZES * len(features)],
    )
    integers = [
        tf.reshape(tf.cast(values, tf.int64), [-1])
        for feature in features
        for values in (feature.ids, feature.splits)
    ]
    integers = _gathered(all_gather, integers)
    # All processes run the same program. Therefore either all processes have
    # weights for a feature, or no process has weights.
    has_weights = any(feature.weights.shape[0] != 0 for feature in features)
    weights = (
        _gathered(all_gather, [feature.weights for feature in features])
        if has_weights
        else _Reader(tf.zeros([0]))
    )
    gathered = []
    for replica in range(num_replicas):
        inputs = []
        for index, feature in enumerate(features):
            first = 3 + _NUM_SIZES * index
            (form, kind, num_ids, num_splits, num_weights, num_samples) = (
                tf.unstack(sizes[replica, first : first + _NUM_SIZES])
            )
            # A packed batch without samples has the kind 0.
            local_kind = tf.cast(feature.kind, tf.int64)
            checks = [
                tf.debugging.assert_equal(
                    form,
                    tf.constant(_form(feature), tf.int64),
                    f"Feature {index} must be dense in all processes, sparse "
                    "in all or ragged in all.",
                ),
                tf.debugging.Assert(
                    (kind == local_kind) | (kind == 0) | (local_kind == 0),
                    [
                        f"Feature {index} must have integers in all processes, "
                        "or strings in all."
                    ],
                ),
            ]
            with tf.control_dependencies(
                [check for check in checks if check is not None]
            ):
                ids = integers.take(num_ids)
            splits = integers.take(num_splits)
            if _form(feature) == 2:
                splits = tf.reshape(splits, [-1, 2])
            elif _form(feature) == 0:
                splits = tf.zeros([0], tf.int64)
            inputs.append(
                embedding_inputs.FeatureIds(
                    ids,
                    splits,
                    num_samples,
                    weights.take(num_weights),
                    kind=(
                        tf.cast(kind, tf.int32)
                        if tf.is_tensor(feature.kind)
                        else feature.kind
                    ),
                )
            )
        integers.end_replica()
        weights.end_replica()
        gathered.append((tf.cast(sizes[replica, 0], tf.bool), inputs))
    return gathered, sizes[:, 1], sizes[:, 2]


def gather_gradients(
    all_gather: Gather,
    gradients: Sequence[tf.Tensor],
    hyperparameters: Sequence[tf.Tensor],
    num_replicas: int,
):
    """Gathers gradients and hyperparameters of all replicas.

    Returns:
      A list with a tuple `(gradients, hyperparameters)` for each replica.
    """
    rows = all_gather(
        tf.stack([tf.shape(gradient, tf.int64)[0] for gradient in gradients])[
            tf.newaxis
        ]
    )
    values = _gathered(
        all_gather,
        [tf.reshape(tensor, [-1]) for tensor in [*gradients, *hyperparameters]],
    )
    gathered = []
    for replica in range(num_replicas):
        gradients_of_replica = [
            tf.reshape(
                values.take(
                    rows[replica, index]
                    * int(gradient.shape[1:].num_elements())
                ),
                [-1, *gradient.shape[1:]],
            )
            for index, gradient in enumerate(gradients)
        ]
        gathered.append(
            (
                gradients_of_replica,
                [
                    tf.ensure_shape(
                        values.take(known_size(hyperparameter)),
                        hyperparameter.shape,
                    )
                    for hyperparameter in hyperparameters
                ],
            )
        )
        values.end_replica()
    return gathered


def _gathered(all_gather: Gather, vectors: list[tf.Tensor]) -> _Reader:
    """Gathers vectors of all replicas, and returns a reader of the values.

    One element is added to the vectors of each replica, because TensorFlow's op
    ends the process if the vectors of all replicas are empty.
    """
    padding = tf.zeros([1], vectors[0].dtype)
    return _Reader(all_gather(tf.concat([*vectors, padding], 0)))


class _Reader:
    """A reader that returns consecutive slices of gathered vectors."""

    def __init__(self, values: tf.Tensor):
        self._values = values
        self._next = tf.constant(0, tf.int64)

    def take(self, size: tf.Tensor | int) -> tf.Tensor:
        """Returns the next `size` values."""
        size = tf.cast(size, tf.int64)
        values = self._values[self._next : self._next + size]
        self._next += size
        return values

    def end_replica(self) -> None:
        """Skips the added element of a replica, after all its values."""
        self._next += 1


# Maximum number of values of a table in one broadcast.
_CHUNK = 2**22


class WorkerEngine(HostEngine):
    """A `HostEngine` that runs the steps of the replicas of all processes."""

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
            # All processes evict the same keys, so only the first process calls
            # `on_evict`.
            reports_evicted=strategy_replicas.is_first_process,
            in_processes=True,
            **options,
        )
        self._replicas = strategy_replicas
        self._group = processes.of_strategy(strategy_replicas.strategy)
        self._num_local = self._group.num_local
        self._checks_ids = options.get("out_of_range", "error") == "error"
        self.restores = RestoreCounter()
        self.writes = WriteRecord()

    def record_restore(self) -> None:
        """Counts a restore. All processes must restore the same checkpoints."""
        self.restores.add_one()

    def use_records_of(self, previous: Any) -> None:
        """Uses the records of restores and writes of the previous engine."""
        self.restores, self.writes = previous.restores, previous.writes

    def enqueue(
        self,
        replica: int,
        training: Any,
        features: Sequence[embedding_inputs.FeatureIds],
    ):
        """Enqueues the ids of this replica and of other processes."""
        gathered, checks = self._gather_checked(training, features)
        if self._spec.has_open_tables:
            modes = [mode for mode, _ in gathered]
            # The check runs after all collectives have finished, because an
            # error would abort a collective that is still running.
            with tf.control_dependencies(
                [
                    tensor
                    for _, inputs in gathered
                    for feature_ids in inputs
                    for tensor in (feature_ids.ids, feature_ids.weights)
                ]
            ):
                checks += process_checks.check_modes(modes, self._num_local)
            # The rows of new keys depend on the order of all batches. Therefore
            # the first replica of each process enqueues the batches of all
            # replicas as one step.
            if replica % self._num_local == 0:
                with tf.control_dependencies(checks):
                    self.enqueue_keys(
                        modes[0], [inputs for _, inputs in gathered]
                    )
            return
        with tf.control_dependencies(checks):
            for other in self._replicas.handled_by(replica):
                super().enqueue(other, *gathered[other])

    def _gather_checked(self, training, features):
        """Returns gathered `(training, features)` tuples, and the checks."""
        gathered, restores, writes = gather_inputs(
            self._group.all_gather_of_replicas,
            features,
            tf.convert_to_tensor(training, tf.bool),
            self.restores.value(),
            self.writes.value(),
            self._replicas.num_replicas,
        )
        checks = process_checks.check_restores(restores, self._num_local)
        checks += process_checks.check_writes(writes, self._num_local)
        for number, (_, inputs) in enumerate(gathered):
            if self._checks_ids:
                checks += process_checks.check_ids(
                    self._spec, inputs, number // self._num_local
                )
        return gathered, checks

    def record_write(self, table: int, written: key_rows.RowsToWrite) -> None:
        """Records written rows, which all processes must write."""
        self.writes.add(table, written)

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        activations = super().dequeue(replica)
        for other in self._replicas.handled_by(replica):
            if other == replica:
                continue
            with tf.device(self._handle.device):
                ops.pass_step(engine=self._handle, replica=other)
        return activations

    def apply(
        self,
        replica: int,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies the gradients of this replica and of other processes."""
        gathered = gather_gradients(
            self._group.all_gather_of_replicas,
            gradients,
            hyperparameters,
            self._replicas.num_replicas,
        )
        with tf.control_dependencies(self._check_rates(gathered)):
            for other in self._replicas.handled_by(replica):
                super().apply(other, *gathered[other])

    def _check_rates(self, gathered: Sequence[Any]) -> list[tf.Operation]:
        """Returns a check that all replicas have the same learning rates."""
        return process_checks.check_rates(
            self._spec, [vectors for _, vectors in gathered], self._num_local
        )

    def open(
        self,
        replica: int,
        features: Sequence[embedding_inputs.FeatureIds],
    ) -> OpenLookup:
        """Opens the lookups of this replica and of other processes.

        Raises:
          NotImplementedError: If a table has an open vocabulary and this
            process has several replicas.
        """
        if self._spec.has_open_tables and self._num_local > 1:
            # If a process has several replicas, the order in which the replicas
            # open their lookups can differ between processes. A new key would
            # then get different rows in different processes.
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
            for opened_table in opened
            for other, token in opened_table.tokens.items()
        }
        return OpenLookup(opened[0].engine, tokens)

    def follow(
        self,
        replica: int,
        lookup: OpenLookup,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Stores the gradients of this replica and of other processes."""
        gathered = gather_gradients(
            self._group.all_gather_of_replicas,
            gradients,
            [],
            self._replicas.num_replicas,
        )
        marks = {
            other: super(WorkerEngine, self).follow(
                other, lookup, gathered[other][0]
            )
            for other in lookup.tokens
        }
        # The control dependency makes the ops of all replicas run. Each process
        # returns only the mark of its own replica.
        with tf.control_dependencies(list(marks.values())):
            return tf.identity(marks[replica])

    def apply_followed(
        self,
        replica: int,
        marks: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies the gradients that the marks of all replicas represent."""
        gathered = gather_gradients(
            # The sizes are equal in all replicas. Only the method for one
            # replica in each process can be called in a `tf.cond`.
            self._group.all_gather
            if self._num_local == 1
            else self._group.all_gather_of_replicas,
            [marks],
            hyperparameters,
            self._replicas.num_replicas,
        )
        with tf.control_dependencies(self._check_rates(gathered)):
            for other in self._replicas.handled_by(replica):
                (marks_of_other,), vectors = gathered[other]
                super().apply_followed(other, marks_of_other, vectors)


def broadcast_initial_values(
    variables: dict[str, dict[str, Any]],
    strategy: tf.distribute.Strategy,
):
    """Assigns the values of the first process to the tables of all processes.

    Without this assignment, an initializer without a seed would give the
    processes different rows.
    """

    @tf.function
    def broadcast(rows: tf.Tensor) -> tf.Tensor:
        def of_replica():
            context = tf.distribute.get_replica_context()
            is_first = context.replica_id_in_sync_group == 0
            return context.all_reduce(
                tf.distribute.ReduceOp.SUM,
                tf.where(is_first, rows, tf.zeros_like(rows)),
            )

        return strategy.experimental_local_results(strategy.run(of_replica))[0]

    for by_name in variables.values():
        for variable in tables.shards_of(by_name[tables.PARAMETERS]):
            rows_at_once = max(1, _CHUNK // known_size(variable, 1))
            for first in range(0, known_size(variable), rows_at_once):
                rows = variable[first : first + rows_at_once]
                variable[first : first + rows_at_once].assign(
                    tf.cast(
                        broadcast(tf.cast(rows, tf.float32)), variable.dtype
                    )
                )
