"""The exchange of keys in a step with sharded tables and open vocabularies.

Each process owns complete segments of each vocabulary, with the rows of their
keys. A key belongs to the process that owns its segment. Before a step is
planned, each replica sends the keys of its batch to their owners. The owners
look up the keys, assign rows to new keys, and return the rows. All other parts
of the step are the same as for tables without open vocabularies.

An owner admits the keys of all replicas in the order of a single process: by
feature, replica, sample and position. Therefore each key gets the same row as
in a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import packing
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.embedding.host import engine, open_tables, process_checks
from tf_layoutmap.embedding.process_sharded import shard_keys
from tf_layoutmap.embedding.processes import Processes
from tf_layoutmap.sharded.routing import assertions
from tf_layoutmap.vocabulary import key_tensors, parts
from tf_layoutmap.vocabulary.sharded_numbers import KIND

# Columns of the output `sizes` of `RequestKeys`.
_REQUEST, _NUM_KEYS = range(2)


class KeyPlan(NamedTuple):
    """A step whose keys have rows.

    Attributes:
      planned: Outputs of the op `PlanKeyExchange`.
      error: Error of this process, or an empty string.
      vocabulary_steps: If each replica is a separate step of the vocabularies,
        for each process an int64 tensor `[num_tables]`: the number of the step
        in which this process has admitted the keys of the other process.
        0 for tables without an open vocabulary, and 1 for open tables of which
        this process has no shard. Otherwise empty.
    """

    planned: Any
    error: tf.Tensor
    vocabulary_steps: list[tf.Tensor]


class KeyExchange:
    """The exchange of the keys of an embedding's batches."""

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        group: Processes,
        handle: tf.Tensor,
        own_keys: shard_keys.ShardKeys,
        plan_attrs: dict[str, Any],
    ):
        """Creates the exchange.

        Args:
          spec: Features and unsharded tables.
          variables: Variables of this process, by table and name.
          group: The processes.
          handle: Handle of the engine of this process.
          own_keys: Shards of open tables in this process.
          plan_attrs: Attributes of the op `PlanExchange`.
        """
        self._spec = spec
        self._group = group
        self._handle = handle
        self._own = own_keys
        self._numbers = [
            number
            for number, table in enumerate(spec.tables)
            if table.vocabulary is not None
        ]
        self._known_kinds = [
            variables[spec.tables[open_specs.owner_of(spec, number)].name][
                parts.NUMBERS
            ]
            for number in self._numbers
        ]
        settings = [
            spec.tables[number].vocabulary.settings for number in self._numbers
        ]
        self._attrs = {
            **plan_attrs,
            "open_tables": self._numbers,
            "has_unknown_row": [
                setting.oov_embedding == "trainable" for setting in settings
            ],
        }
        # If no row is free for a key in one process, the other processes undo
        # the step.
        self._keeps_change = any(
            setting.on_full == "error" for setting in settings
        )
        self._reporting = [
            number
            for number, setting in zip(self._numbers, settings)
            if setting.on_evict is not None
        ]
        tables = [
            feature.table
            for feature in spec.features
            if spec.table_of(feature).vocabulary is not None
        ]
        self._request_tables = [
            self._own.numbers.index(table) if table in self._own.numbers else -1
            for table in tables
        ]
        # For each table, its first feature in a request. An index after the
        # last feature represents no feature.
        self._first_features = [
            tables.index(number) if number in tables else len(tables)
            for number in range(len(spec.tables))
        ]

    def plan(
        self,
        training: Any,
        features: engine.StepInputs,
        restores: tf.Tensor,
        *,
        has_contributions: Any,
        in_one_step: bool,
    ) -> KeyPlan:
        """Finds the rows of the keys of all replicas, and plans the step.

        Args:
          training: Whether the vocabularies count keys and assign rows to new
            keys.
          features: Batch of this replica.
          restores: Number of checkpoints that this process has restored.
          has_contributions: Whether the owners of rows receive the ids.
          in_one_step: Whether the keys of all replicas are one step of the
            vocabularies. Otherwise, each replica is a separate step, in the
            order of the replicas.
        """
        group = self._group
        batch = engine.batch_inputs(features, of_keys=True)
        with tf.device(embedding_tables.HOST):
            requested = ops.request_keys(**batch, **self._attrs)
        sizes, kinds = self._agree(training, features, restores, requested)
        requests = group.exchange(
            list(requested.requests), sizes[:, :, _REQUEST]
        )
        rows, error, vocabulary_steps = self._admit(
            training, requests, kinds, in_one_step
        )
        rows = group.exchange(rows, tf.transpose(sizes[:, :, _NUM_KEYS]))
        with tf.device(embedding_tables.HOST):
            planned = ops.plan_key_exchange(
                **batch,
                training=tf.convert_to_tensor(has_contributions, tf.bool),
                rows=rows,
                **{
                    name: value
                    for name, value in self._attrs.items()
                    if name != "num_owners"
                },
            )
        return KeyPlan(
            planned,
            tf.strings.join([error, planned.error]),
            vocabulary_steps,
        )

    def undo(self, why: tf.Tensor) -> tf.Operation | None:
        """Undoes the last admission, if there is one.

        Args:
          why: Error message of the step.

        Returns:
          The operation, or None outside of a graph.
        """
        if not self._own.numbers:
            return None
        return self._own.undo_admissions(self._handle, why)

    def _agree(
        self,
        training: Any,
        features: engine.StepInputs,
        restores: tf.Tensor,
        requested: Any,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers sizes and checks the batches of all processes.

        Returns:
          A tuple of two tensors: sizes `[processes, processes, 2]`, and the
          kind of the keys of each open table.
        """
        group, count = self._group, len(self._numbers)
        # The batch reader unpacks packed batches of keys.
        assert not isinstance(features, packing.PackedIds)
        kinds = [
            open_tables.kind_of_keys(self._spec, number, features)
            for number in self._numbers
        ]
        heads = tf.ensure_shape(
            group.all_gather(
                tf.concat(
                    [
                        tf.stack(
                            [
                                tf.cast(training, tf.int64),
                                restores,
                                tf.cast(
                                    tf.strings.length(requested.error) > 0,
                                    tf.int64,
                                ),
                                *(tf.cast(kind, tf.int64) for kind in kinds),
                                *(
                                    known_kind.local(KIND)
                                    for known_kind in self._known_kinds
                                ),
                            ]
                        ),
                        tf.reshape(requested.sizes, [-1]),
                    ],
                    0,
                )[tf.newaxis]
            ),
            [group.size, 3 + 2 * count + 2 * group.size],
        )
        modes = tf.unstack(heads[:, 0] > 0)
        of_step, known = heads[:, 3 : 3 + count], heads[:, 3 + count :]
        checks = [
            *process_checks.check_restores(heads[:, 1], 1),
            *process_checks.check_modes(modes, 1),
            group.check_errors(heads[:, 2] > 0, requested.error),
            *self._check_kinds(of_step, known[:, :count]),
        ]
        with tf.control_dependencies(checks):
            return (
                tf.reshape(
                    heads[:, 3 + 2 * count :], [group.size, group.size, 2]
                ),
                tf.cast(tf.reduce_max(of_step, 0), tf.int32),
            )

    def _check_kinds(
        self, kinds: tf.Tensor, known: tf.Tensor
    ) -> list[tf.Operation]:
        """Checks that the keys of a table are all integers or all strings.

        Args:
          kinds: `[processes, open tables]` kinds of the keys of the step.
          known: `[processes, open tables]` kinds of the stored keys.
        """
        both = tf.concat([kinds, known], 0)
        highest = tf.reduce_max(both, 0)
        is_same = tf.reduce_all((both == 0) | (both == highest), 0)
        checks: list[tf.Operation] = []
        for place, number in enumerate(self._numbers):
            names = [
                key_tensors.KINDS[kind] for kind in sorted(key_tensors.KINDS)
            ]
            checks += assertions.require(
                is_same[place],
                f"The keys of table {self._spec.tables[number].name!r} must "
                f"all be {names[0]} or all be {names[1]}, in all processes "
                f"and steps. Received: {names[0]} and {names[1]}.",
            )
        return checks

    def _admit(
        self,
        training: Any,
        requests: Sequence[tf.Tensor],
        kinds: tf.Tensor,
        in_one_step: bool,
    ) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
        """Finds the rows of the keys that all processes have requested.

        Returns:
          A tuple of three elements: for each process, the rows of its keys in
          the shards of this process; the error, or an empty string; and the
          vocabulary steps, as in `KeyPlan`.
        """
        steps = (
            [list(requests)]
            if in_one_step
            else [[request] for request in requests]
        )
        rows: list[tf.Tensor] = []
        errors: list[tf.Tensor] = []
        vocabulary_steps: list[tf.Tensor] = []
        kinds = tf.gather(
            kinds,
            tf.constant(
                [self._numbers.index(number) for number in self._own.numbers],
                tf.int32,
            ),
        )
        for step, of_step in enumerate(steps):
            evicted: list[tf.Tensor] = []
            numbers = tf.zeros([len(self._request_tables)], tf.int64)
            if self._own.numbers:
                admitted = self._own.admit_requests(
                    self._handle,
                    training,
                    of_step,
                    kinds,
                    request_tables=self._request_tables,
                    keeps_change=self._keeps_change,
                    num_earlier=step,
                )
                rows += [tf.ensure_shape(row, [None]) for row in admitted.rows]
                errors.append(tf.ensure_shape(admitted.error, []))
                evicted = list(admitted.evicted)
                numbers = admitted.steps
            else:
                rows += [tf.zeros([0], tf.uint32) for _ in of_step]
            errors += [
                self._report(number, self._own.evicted_of(number, evicted))
                for number in (() if training is False else self._reporting)
            ]
            if not in_one_step:
                vocabulary_steps.append(self._steps_of_tables(numbers))
        return (
            rows,
            tf.strings.join([tf.constant(""), *errors]),
            vocabulary_steps,
        )

    def _steps_of_tables(self, steps: tf.Tensor) -> tf.Tensor:
        """Converts the output `steps` of `AdmitRequests`; see `KeyPlan`."""
        # All processes must know whether a table is open, because the update of
        # a lookup ends a lookup of keys in all processes.
        at_least_one = tf.maximum(steps, 1)
        return tf.gather(
            tf.concat([at_least_one, tf.zeros([1], tf.int64)], 0),
            self._first_features,
        )

    def _report(self, table: int, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Calls `on_evict` in the first process, with keys of all processes.

        Args:
          table: Index of the table.
          values: Evicted keys of this process, their rows and the values of
            their slot variables.

        Returns:
          The error message of `on_evict`, or an empty string.
        """
        group = self._group
        sizes = tf.ensure_shape(
            group.all_gather(tf.shape(values[0], tf.int64)), [group.size]
        )
        largest = tf.reduce_max(sizes)
        gathered = []
        for value in values:
            # Collectives do not support 16-bit values. The conversion to
            # float32 and back is exact.
            sent = (
                value if value.dtype == tf.int64 else tf.cast(value, tf.float32)
            )
            padding = [[0, largest + 1 - tf.shape(sent, tf.int64)[0]]]
            padding += [[0, 0]] * (sent.shape.rank - 1)
            # All processes send at least one row, because TensorFlow's op ends
            # the process if all tensors are empty.
            rows = group.all_gather(tf.pad(sent, padding))
            is_key = tf.reshape(tf.sequence_mask(sizes, largest + 1), [-1])
            gathered.append(tf.cast(tf.boolean_mask(rows, is_key), value.dtype))
        if group.rank == 0:
            return self._own.report(table, gathered)
        # The control dependency makes the collectives run.
        with tf.control_dependencies(gathered):
            return tf.constant("")
