"""The messages that processes exchange in a step with sharded tables.

`StepExchange` requests rows from the processes that own the rows, and sends
gradients to these processes. The contents of the messages depend on the order
in which the gradients of a row are summed:

exact Messages contain ids with their gains, and gradients of activations. An
owner sums the contributions of all replicas in the order of a single process:
by feature, replica, sample and position.

local Each replica sums the gradients of each of its unique rows, and sends one
gradient per unique row. An owner adds the sums of the replicas, so the
summation order differs from "exact".

`StepsInFlight` stores the steps of one embedding between `enqueue` and
`apply_gradients`. The state of a step consists of tensors in the graph of the
traced function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import steps
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import engine, multi_process, process_checks
from tf_layoutmap.embedding.process_sharded import key_exchange
from tf_layoutmap.embedding.process_sharded.tables import ProcessShardedTable
from tf_layoutmap.embedding.processes import Processes


@dataclasses.dataclass(frozen=True)
class Step:
    """A step in flight.

    Attributes:
      plan: Output `plan` of the op `PlanExchange`.
      requests: The request that this process has received from each process.
      sizes: `[processes, processes, 4]` int64 tensor. Element `[i, j]` contains
        the sizes that `PlanExchange` returned in process `i` for owner `j`.
      num_samples: For each process, an `[num_features]` int64 tensor with the
        number of gradients that this process receives from the process for each
        feature.
      vocabulary_steps: For each process, the vocabulary steps in which this
        process has admitted its keys, or empty; see `KeyPlan`.
    """

    plan: tf.Tensor
    requests: list[tf.Tensor]
    sizes: tf.Tensor
    num_samples: list[tf.Tensor]
    vocabulary_steps: list[tf.Tensor]


class StepsInFlight(steps.StepQueues[Step]):
    """The queues of steps, one for each traced function."""

    def __init__(self):
        """Creates empty queues."""
        super().__init__(
            "With tables that are sharded over processes, all calls of a step "
            "must be made in one tf.function."
        )


# Columns of the output `sizes` of `PlanExchange`. The output `sizes` has a row
# for each pair of processes.
REQUEST, CONTRIBUTIONS, FETCHED, GRADIENTS = range(4)

# Sizes, in 4-byte words, of the header that precedes the rows in the reply of
# an owner, and of the header that precedes the type and the row counts in a
# message of `FoldGradients`.
_FETCHED_HEADER = 2
_APPLY_HEADER = 8


class Order(Protocol):
    """The interface of `Exact` and `Folded`, the orders of gradient summation.

    Attributes:
      sends_contributions: Whether owners receive the id and the gain of each
        contribution to an activation.
    """

    sends_contributions: bool

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns the features of an owner's engine."""
        ...

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[embedding_inputs.FeatureIds], tf.Tensor]:
        """Converts the message of a process to inputs for the owner's engine.

        Returns:
          The inputs for `enqueue`, and an int64 tensor with the number of
          samples of each feature.
        """
        ...

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the gradients that a step sends to each owner.

        Args:
          step: The step.
          gradients: One gradient per feature, with the shape of its
            activations.

        Returns:
          A vector of floats for each owner, and an int64 tensor with the sizes
          of these vectors by sender and owner.
        """
        ...

    def num_skipped(self) -> int:
        """Returns the number of floats before the gradients in a message."""
        ...


class Exact:
    """The order in which a replica sends all gradients without summing them."""

    sends_contributions = True

    def __init__(self, spec: config.EmbeddingSpec, num_owners: int):
        """Creates the order for tables, features and a number of processes."""
        self._spec = spec
        self._num_owners = num_owners

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns all features, with their sequence lengths set to 0."""
        return tuple(
            dataclasses.replace(feature, max_sequence_length=0)
            for feature in self._spec.features
        )

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[embedding_inputs.FeatureIds], tf.Tensor]:
        """Converts ids and gains to inputs of the engine; see `Order`."""
        del request
        batch = ops.read_contributions(
            words=contributions, num_features=len(self._spec.features)
        )
        return [
            embedding_inputs.FeatureIds(*arguments)
            for arguments in zip(
                batch.ids,
                batch.splits,
                tf.unstack(batch.num_samples),
                batch.weights,
            )
        ], batch.num_samples

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the gradients of activations by owner; see `Order`."""
        return ops.split_gradients(
            plan=step.plan,
            gradients=list(gradients),
            num_owners=self._num_owners,
        ), step.sizes[:, :, GRADIENTS]

    def num_skipped(self) -> int:
        """Returns 0."""
        return 0


class Folded:
    """The order in which a replica sends one summed gradient per unique row."""

    sends_contributions = False

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        num_owners: int,
        rank: int,
        num_shards: Sequence[int],
    ):
        """Creates the order for tables, features and processes.

        Args:
          spec: Tables and features.
          num_owners: Number of processes.
          rank: Index of this process.
          num_shards: Number of shards of each table. If a table has fewer
            shards than there are processes, only the first processes have a
            shard.

        Raises:
          ValueError: If an optimizer applies each gradient of a row separately.
        """
        for table in spec.tables:
            if table.optimizer and not table.optimizer.accumulates:
                raise ValueError(
                    'Argument `gradient_aggregation` must be "exact" if an '
                    "optimizer applies each gradient of a row separately. "
                    'Received: "local" with use_gradient_accumulation=False '
                    f"(table {table.name!r})."
                )
        self._spec = spec
        self._num_owners = num_owners
        self._rank = rank
        self._num_shards = num_shards
        # `FoldGradients` requires hyperparameters, but the sums do not depend
        # on their values. `StepExchange` sends the hyperparameters of the
        # update separately.
        self._hyperparameters = [
            [1.0, *table.optimizer.constants] if table.optimizer else []
            for table in spec.tables
        ]

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns one feature for each table."""
        return tuple(
            config.FeatureSpec(table.name, number, 0)
            for number, table in enumerate(self._spec.tables)
        )

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[embedding_inputs.FeatureIds], tf.Tensor]:
        """Converts the unique rows of a request to inputs; see `Order`."""
        del contributions
        has_rows = [self._rank < count for count in self._num_shards]
        count = sum(has_rows)
        sizes = tf.cast(request[:count], tf.int64)
        rows = iter(
            zip(
                tf.split(request[count:], sizes, num=count),
                tf.unstack(sizes, num=count),
            )
            if count
            else ()
        )
        no_rows = (tf.zeros([0], tf.uint32), tf.constant(0, tf.int64))
        rows_of_tables = [next(rows) if has else no_rows for has in has_rows]
        return [
            embedding_inputs.FeatureIds(
                tf.cast(ids, tf.int64),
                tf.zeros([0], tf.int64),
                size,
                tf.zeros([0]),
            )
            for ids, size in rows_of_tables
        ], tf.stack([size for _, size in rows_of_tables])

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the summed gradients by owner; see `Order`."""
        fetched = step.sizes[:, :, FETCHED]
        messages = ops.fold_gradients(
            plan=step.plan,
            gradients=list(gradients),
            hyperparameters=[
                tf.constant(hyperparameter, tf.float32)
                for hyperparameter in self._hyperparameters
            ],
            token=tf.constant([0, -1, 0], tf.int64),
            next=[],
            fetched=[],
            num_servers=self._num_owners,
        )
        sizes = (
            fetched
            - _FETCHED_HEADER
            + tf.constant(
                [
                    self._num_constants(owner)
                    for owner in range(self._num_owners)
                ],
                tf.int64,
            )
        )
        # The process sends only the hyperparameters and the gradients of a
        # message. The process omits the row numbers that follow the gradients,
        # because the owner has already received these row numbers in the
        # request.
        return [
            _floats(
                message,
                4
                * (
                    _APPLY_HEADER
                    + 1
                    + sum(owner < count for count in self._num_shards)
                ),
                sizes[self._rank, owner],
            )
            for owner, message in enumerate(messages)
        ], sizes

    def num_skipped(self) -> int:
        """Returns the number of hyperparameters that precede the gradients."""
        return self._num_constants(self._rank)

    def _num_constants(self, owner: int) -> int:
        return sum(
            len(values)
            for values, count in zip(self._hyperparameters, self._num_shards)
            if owner < count
        )


# Function that creates the exchange of keys from the attributes of the op
# `PlanExchange`.
MakeKeyExchange = Callable[[dict[str, Any]], key_exchange.KeyExchange]


def exchanged_bytes(words: tf.Tensor) -> tf.Tensor:
    """Converts an int32 vector from `_words` to bytes."""
    return tf.reshape(tf.bitcast(words, tf.uint8), [-1])


def _floats(message: tf.Tensor, first: int, size: tf.Tensor) -> tf.Tensor:
    """Returns `size` floats of a message, starting at byte `first`."""
    return tf.bitcast(
        tf.reshape(message[first : first + 4 * size], [-1, 4]), tf.float32
    )


# Size of the variable `applied`. The op `FetchRows` requires this variable, but
# this backend does not use its value.
_APPLIED_SIZE = 2054


class StepExchange:
    """An exchange of requests, rows and gradients between processes.

    Attributes:
      restores: Counter of the checkpoints that this process has restored.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        local_spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        group: Processes,
        order: Order,
        *,
        out_of_range: str,
        rounding_seed: int,
        make_keys: MakeKeyExchange | None = None,
    ):
        """Creates the exchange for the steps of an engine.

        Args:
          spec: Features and unsharded tables.
          local_spec: Tables and features of this process's engine.
          variables: Variables that `ProcessStore` created.
          group: The processes.
          order: Order in which the gradients of a row are summed.
          out_of_range: How out-of-range ids are handled.
          rounding_seed: Seed for rounding the rows of 16-bit tables.
          make_keys: Function that creates the exchange of keys from the
            attributes of the op `PlanExchange`, or None if no table has an open
            vocabulary.
        """
        self._spec = spec
        self._local_spec = local_spec
        self._tables: list[ProcessShardedTable] = [
            variables[table.name][embedding_tables.PARAMETERS]
            for table in spec.tables
        ]
        self._group = group
        self._order = order
        partitions = [table.row_partition for table in self._tables]
        num_shards = [partition.num_shards for partition in partitions]
        self._plan_attrs = {
            **engine.config_attrs(
                spec,
                variables,
                out_of_range=out_of_range,
                rounding_seed=rounding_seed,
            ),
            "table_placements": [
                partition.placement for partition in partitions
            ],
            "table_num_shards": num_shards,
            "table_offsets": [
                row for partition in partitions for row in partition.offsets
            ],
            "num_owners": group.size,
            "shard_owners": [
                shard for num_shard in num_shards for shard in range(num_shard)
            ],
        }
        self._keys = None if make_keys is None else make_keys(self._plan_attrs)
        self.restores = multi_process.RestoreCounter()
        with tf.init_scope(), tf.device(embedding_tables.HOST):
            self._applied = tf_private.ResourceVariable(
                tf.zeros([_APPLIED_SIZE], tf.int64),
                trainable=False,
                name="applied",
            )

    def plan(
        self,
        training: Any,
        features: engine.StepInputs,
        *,
        in_one_step: bool = True,
    ) -> tuple[Step, list[tf.Tensor], list[Any]]:
        """Sends the requests of this replica to the owners of the rows.

        Args:
          training: Whether the step receives gradients.
          features: Batch of this replica.
          in_one_step: Whether the keys of all replicas are one step of the
            vocabularies; see `KeyExchange.plan`.

        Returns:
          A tuple of three elements:

          - The step.
          - A list that contains, for each process, whether its step receives
            gradients.
          - A list that contains, for each process, the part of its batch that
            uses rows of this process.
        """
        group = self._group
        exchange_plan, error, vocabulary_steps = self._make_plan(
            training, features, in_one_step
        )
        is_bad = tf.strings.length(error) > 0
        heads = tf.ensure_shape(
            group.all_gather(
                tf.concat(
                    [
                        tf.stack(
                            [
                                tf.cast(training, tf.int64),
                                self.restores.value(),
                                tf.cast(is_bad, tf.int64),
                            ]
                        ),
                        tf.reshape(exchange_plan.sizes, [-1]),
                    ],
                    0,
                )[tf.newaxis]
            ),
            [group.size, 3 + 4 * group.size],
        )
        checks = process_checks.check_restores(heads[:, 1], 1)
        check = group.check_errors(
            heads[:, 2] > 0, error, self._keys and self._keys.undo
        )
        with tf.control_dependencies([*checks, check]):
            sizes = tf.reshape(heads[:, 3:], [group.size, group.size, 4])
            of_training = tf.unstack(heads[:, 0] > 0)
        words = group.exchange(
            [
                tf.concat(parts, 0)
                for parts in zip(
                    exchange_plan.requests, exchange_plan.contributions
                )
            ],
            sizes[:, :, REQUEST] + sizes[:, :, CONTRIBUTIONS],
        )
        requests, inputs, num_samples = [], [], []
        for other, received in enumerate(words):
            size = sizes[other, group.rank, REQUEST]
            requests.append(received[:size])
            with tf.device(embedding_tables.HOST):
                ids, counts = self._order.read(received[:size], received[size:])
            inputs.append(ids)
            num_samples.append(counts)
        step = Step(
            exchange_plan.plan, requests, sizes, num_samples, vocabulary_steps
        )
        return step, of_training, inputs

    def _make_plan(
        self, training: Any, features: engine.StepInputs, in_one_step: bool
    ) -> key_exchange.KeyPlan:
        """Returns the plan of a batch."""
        if self._keys is not None:
            return self._keys.plan(
                training,
                features,
                self.restores.value(),
                # The engine of an owner pins the rows of a forward-only step
                # only if it receives their ids.
                has_contributions=self._order.sends_contributions,
                in_one_step=in_one_step,
            )
        with tf.device(embedding_tables.HOST):
            planned = ops.plan_exchange(
                **engine.batch_inputs(features),
                training=tf.convert_to_tensor(
                    training if self._order.sends_contributions else False,
                    tf.bool,
                ),
                **self._plan_attrs,
            )
        return key_exchange.KeyPlan(planned, planned.error, [])

    def fetch(self, step: Step) -> list[tf.Tensor]:
        """Fetches the rows of a batch, and returns the activations."""
        with_rows = [
            pair
            for pair in zip(self._local_spec.tables, self._tables)
            if pair[1].rows
        ]
        specs = [spec for spec, _ in with_rows]
        shards = [table.block.handle for _, table in with_rows]
        fetched = []
        for request in step.requests:
            with tf.device(embedding_tables.HOST):
                fetched.append(
                    _words(
                        ops.fetch_rows(
                            shards=shards,
                            applied=self._applied.handle,
                            request=ops.write_request(
                                words=request, num_shards=len(specs)
                            ),
                            tables=[spec.name for spec in specs],
                            dims=[spec.dim for spec in specs],
                            dtypes=[tf.as_dtype(spec.dtype) for spec in specs],
                        )
                    )
                    if specs
                    else tf.zeros([2], tf.int32)
                )
        # In `sizes`, the first axis is the requesting process and the second
        # axis is the owner. `exchange` expects the sender first. Owners send
        # the rows, so the axes are swapped.
        received = self._group.exchange(
            fetched, tf.transpose(step.sizes[:, :, FETCHED])
        )
        with tf.device(embedding_tables.HOST):
            return ops.combine_rows(
                plan=step.plan,
                fetched=[exchanged_bytes(part) for part in received],
                **engine.activation_attrs(self._spec),
            )

    def send_gradients(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ) -> list[tuple[list[tf.Tensor], list[tf.Tensor]]]:
        """Sends gradients to the owners of the rows that were looked up.

        Args:
          step: Step of the lookup.
          gradients: One gradient per feature, with the shape of its
            activations.
          hyperparameters: Vectors that are sent in the same messages as the
            gradients.

        Returns:
          For each sending process, a tuple of two elements: the gradients for
          the rows of this process, one per feature, and the hyperparameters.
        """
        with tf.device(embedding_tables.HOST):
            values, sizes = self._order.values(step, gradients)
        head = tf.concat([tf.zeros([0]), *hyperparameters], 0)
        shapes = [hyperparameter.shape for hyperparameter in hyperparameters]
        num_head = sum(int(shape.num_elements()) for shape in shapes)
        received = self._group.exchange(
            [tf.concat([head, value], 0) for value in values], sizes + num_head
        )
        first = num_head + self._order.num_skipped()
        spec = self._local_spec
        dims = [spec.table_of(feature).dim for feature in spec.features]
        return [
            (
                [
                    tf.reshape(rows, [-1, dim])
                    for rows, dim in zip(
                        tf.split(
                            values[first:],
                            num_samples * tf.constant(dims, tf.int64),
                            num=len(dims),
                        ),
                        dims,
                    )
                ],
                split_vector(values[:num_head], shapes),
            )
            for values, num_samples in zip(received, step.num_samples)
        ]


def _words(message: tf.Tensor) -> tf.Tensor:
    """Converts bytes to int32 words, because collectives support int32."""
    return tf.bitcast(tf.reshape(message, [-1, 4]), tf.int32)


def split_vector(values: tf.Tensor, shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Splits a vector into vectors with known shapes."""
    return (
        [
            tf.ensure_shape(part, shape)
            for part, shape in zip(
                tf.split(
                    values, [int(shape.num_elements()) for shape in shapes]
                ),
                shapes,
            )
        ]
        if shapes
        else []
    )
