"""What the processes of divided tables send each other in a step."""

# DOC-MERGE: The steps of one embedding between `enqueue` and `apply_gradients`.
#
# What a process knows of a step are tensors of the function being traced.
#
# DOC-MERGE: In which order the gradients of a row are summed, and so what travels.
#
# exact    ids with their gains, and gradients of activations: an owner sums
#          what all replicas contribute in the order feature, replica,
#          sample, position, as one process with as many replicas does
# folded   one gradient for each unique row of a replica, summed there: an
#          owner adds those of the replicas up, in another order
#
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import steps
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.divided import tables as divided_tables
from tf_layoutmap.embedding.divided.tables import DividedTable
from tf_layoutmap.embedding.host import engine, multi_process
from tf_layoutmap.embedding.spec import config


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch on its way.

    Attributes:
      plan: Of `PlanExchange`.
      requests: By process, the rows that it wants of this one.
      sizes: `[processes, processes, 4]` int64: by sender and owner, those of
        `PlanExchange`.
      num_samples: By process and feature, `[num_features]` int64 each: the
        activations whose gradients this process gets.
    """

    plan: tf.Tensor
    requests: list[tf.Tensor]
    sizes: tf.Tensor
    num_samples: list[tf.Tensor]


class StepsInFlight(steps.StepQueues[Step]):
    """Queues of steps, one for each function that is traced."""

    def __init__(self):
        """Starts without steps."""
        super().__init__(
            "With tables that are divided among processes, the calls of a "
            "step are made in one tf.function."
        )


# Numbers of each pair of processes: the columns of `sizes` of `PlanExchange`.
REQUEST, CONTRIBUTIONS, FETCHED, GRADIENTS = range(4)

# Words of 4 bytes before the rows that an owner sends, and before the type and
# the counts of rows of what `FoldGradients` writes.
_FETCHED_HEADER = 2
_APPLY_HEADER = 8


class Order(Protocol):
    """What an order decides.

    Attributes:
      sends_contributions: Whether owners are told ids with their gains.
    """

    sends_contributions: bool

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns the features of the engine of an owner."""
        ...

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[embedding_inputs.FeatureIds], tf.Tensor]:
        """Reads what a process has sent, for an `enqueue` of its replica.

        Returns:
          What it enqueues, and by feature the number of samples, int64.
        """
        ...

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns what each owner gets of the gradients of a step.

        Args:
          step: The step.
          gradients: Shaped as the activations, one per feature.

        Returns:
          By owner a vector of floats; and by sender and owner its size.
        """
        ...

    def num_skipped(self) -> int:
        """Returns how many floats precede the gradients for this owner."""
        ...


class Exact:
    """Contributions travel as they are."""

    sends_contributions = True

    def __init__(self, spec: config.EmbeddingSpec, num_owners: int):
        """Takes tables and features, and how many processes there are."""
        self._spec = spec
        self._num_owners = num_owners

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns all features, without sequences: gains say it all."""
        return tuple(
            dataclasses.replace(one, max_sequence_length=0)
            for one in self._spec.features
        )

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[embedding_inputs.FeatureIds], tf.Tensor]:
        """Reads contributions; see `Order`."""
        del request
        found = ops.read_contributions(
            words=contributions, num_features=len(self._spec.features)
        )
        return [
            embedding_inputs.FeatureIds(*one)
            for one in zip(
                found.ids,
                found.splits,
                tf.unstack(found.num_samples),
                found.weights,
            )
        ], found.num_samples

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns gradients of activations; see `Order`."""
        return ops.split_gradients(
            plan=step.plan,
            gradients=list(gradients),
            num_owners=self._num_owners,
        ), step.sizes[:, :, GRADIENTS]

    def num_skipped(self) -> int:
        """None."""
        return 0


class Folded:
    """One gradient of each unique row travels."""

    sends_contributions = False

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        num_owners: int,
        rank: int,
        num_shards: Sequence[int],
    ):
        """Takes tables and features, and who has which.

        Args:
          spec: Tables and features.
          num_owners: Processes.
          rank: The number of this one.
          num_shards: Of each table: the first processes have one each.

        Raises:
          ValueError: If a rule takes one step per contribution.
        """
        for table in spec.tables:
            if table.optimizer and not table.optimizer.accumulates:
                raise ValueError(
                    'Argument `order` must be "exact" where an optimizer '
                    "takes one step for each gradient of a row. Received: "
                    '"folded" with use_gradient_accumulation=False (table '
                    f"{table.name!r})."
                )
        self._spec = spec
        self._num_owners = num_owners
        self._rank = rank
        self._num_shards = num_shards
        # Sums do not depend on them; those of the update go another way.
        self._hyperparameters = [
            [1.0, *one.optimizer.constants] if one.optimizer else []
            for one in spec.tables
        ]

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns one for each table."""
        return tuple(
            config.FeatureSpec(one.name, number, 0)
            for number, one in enumerate(self._spec.tables)
        )

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[embedding_inputs.FeatureIds], tf.Tensor]:
        """Reads the unique rows of a request; see `Order`."""
        del contributions
        has_rows = [self._rank < one for one in self._num_shards]
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
        none = (tf.zeros([0], tf.uint32), tf.constant(0, tf.int64))
        found = [next(rows) if has else none for has in has_rows]
        return [
            embedding_inputs.FeatureIds(
                tf.cast(ids, tf.int64),
                tf.zeros([0], tf.int64),
                size,
                tf.zeros([0]),
            )
            for ids, size in found
        ], tf.stack([size for _, size in found])

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns sums of gradients; see `Order`."""
        fetched = step.sizes[:, :, FETCHED]
        messages = ops.fold_gradients(
            plan=step.plan,
            gradients=list(gradients),
            hyperparameters=[
                tf.constant(one, tf.float32) for one in self._hyperparameters
            ],
            token=tf.constant([0, -1, 0], tf.int64),
            # Their sizes are what is looked at.
            fetched=[
                tf.zeros([4 * fetched[self._rank, owner]], tf.uint8)
                for owner in range(self._num_owners)
            ],
        )
        sizes = (
            fetched
            - _FETCHED_HEADER
            + tf.constant(
                [self._num_constants(one) for one in range(self._num_owners)],
                tf.int64,
            )
        )
        # Owners know the rows, which follow.
        return [
            _floats(
                one,
                4
                * (
                    _APPLY_HEADER
                    + 1
                    + sum(owner < count for count in self._num_shards)
                ),
                sizes[self._rank, owner],
            )
            for owner, one in enumerate(messages)
        ], sizes

    def num_skipped(self) -> int:
        """The hyperparameters of the tables of this process."""
        return self._num_constants(self._rank)

    def _num_constants(self, owner: int) -> int:
        return sum(
            len(values)
            for values, count in zip(self._hyperparameters, self._num_shards)
            if owner < count
        )


def exchanged_bytes(words: tf.Tensor) -> tf.Tensor:
    """Returns a vector of int32 as the bytes that it was made of."""
    return tf.reshape(tf.bitcast(words, tf.uint8), [-1])


def _floats(message: tf.Tensor, first: int, size: tf.Tensor) -> tf.Tensor:
    """Returns `size` floats of a message, from byte `first` on."""
    return tf.bitcast(
        tf.reshape(message[first : first + 4 * size], [-1, 4]), tf.float32
    )


# Of the variable `applied` of `FetchRows`, which counts nothing here.
_APPLIED_SIZE = 2054

# Code points of an error that the others are told.
_MESSAGE_SIZE = 400


class StepExchange:
    """Asks the owners of rows for them, and sends them gradients.

    Attributes:
      restores: How many checkpoints this process has restored.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        own_spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        group: divided_tables.Group,
        order: Order,
        *,
        out_of_range: str,
        rounding_seed: int,
    ):
        """Prepares the steps of an engine.

        Args:
          spec: Tables and features, of the whole tables.
          own_spec: Those of the engine of this process.
          variables: Of `DividedTables`.
          group: The processes.
          order: In which the gradients of a row are summed.
          out_of_range: What becomes of ids that are no row of their table.
          rounding_seed: Of tables with 16-bit rows.
        """
        self._spec = spec
        self._own_spec = own_spec
        self._tables: list[DividedTable] = [
            variables[one.name][embedding_tables.PARAMETERS]
            for one in spec.tables
        ]
        self._group = group
        self._order = order
        cuts = [one.cut for one in self._tables]
        num_shards = [one.num_shards for one in cuts]
        self._plan_attrs = {
            **engine.config_attrs(
                spec,
                variables,
                out_of_range=out_of_range,
                rounding_seed=rounding_seed,
            ),
            "table_num_shards": num_shards,
            "table_offsets": [row for one in cuts for row in one.offsets],
            "num_owners": group.size,
            "shard_owners": [
                shard for one in num_shards for shard in range(one)
            ],
        }
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
    ) -> tuple[Step, list[tf.Tensor], list[Any]]:
        """Tells the owners of rows which ones this replica asks for.

        Args:
          training: Whether gradients will follow.
          features: This replica's batch.

        Returns:
          The step; and by process whether it trains, and the batch that its
          replica has for the rows of this one.
        """
        group = self._group
        with tf.device(embedding_tables.HOST):
            found = ops.plan_exchange(
                **engine.batch_inputs(features),
                training=tf.convert_to_tensor(
                    training if self._order.sends_contributions else False,
                    tf.bool,
                ),
                **self._plan_attrs,
            )
        is_bad = tf.strings.length(found.error) > 0
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
                        tf.reshape(found.sizes, [-1]),
                    ],
                    0,
                )[tf.newaxis]
            ),
            [group.size, 3 + 4 * group.size],
        )
        checks = multi_process.check_restores(heads[:, 1], 1)
        check = _check_errors(group, heads[:, 2] > 0, found.error)
        with tf.control_dependencies([*checks, check]):
            sizes = tf.reshape(heads[:, 3:], [group.size, group.size, 4])
            of_training = tf.unstack(heads[:, 0] > 0)
        words = group.exchange(
            [
                tf.concat(one, 0)
                for one in zip(found.requests, found.contributions)
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
        step = Step(found.plan, requests, sizes, num_samples)
        return step, of_training, inputs

    def fetch(self, step: Step) -> list[tf.Tensor]:
        """Looks a batch up in rows that their owners send."""
        own = [
            one
            for one in zip(self._own_spec.tables, self._tables)
            if one[1].rows
        ]
        specs = [spec for spec, _ in own]
        shards = [table.block.handle for _, table in own]
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
                            tables=[one.name for one in specs],
                            dims=[one.dim for one in specs],
                            dtypes=[tf.as_dtype(one.dtype) for one in specs],
                        )
                    )
                    if specs
                    else tf.zeros([2], tf.int32)
                )
        # What a process sends are the rows that were asked of it.
        received = self._group.exchange(
            fetched, tf.transpose(step.sizes[:, :, FETCHED])
        )
        with tf.device(embedding_tables.HOST):
            return ops.combine_rows(
                plan=step.plan,
                fetched=[exchanged_bytes(one) for one in received],
                **engine.activation_attrs(self._spec),
            )

    def send_gradients(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ) -> tuple[list[list[tf.Tensor]], list[tf.Tensor]]:
        """Sends gradients to the owners of the rows that were looked up.

        Args:
          step: Of the lookup.
          gradients: By feature, shaped as the activations.
          hyperparameters: Vectors that are sent with them.

        Returns:
          The gradients for the rows of this process, by process and feature;
          and the hyperparameters of the last replica.
        """
        with tf.device(embedding_tables.HOST):
            values, sizes = self._order.values(step, gradients)
        head = tf.concat([tf.zeros([0]), *hyperparameters], 0)
        shapes = [one.shape for one in hyperparameters]
        num_head = sum(int(one.num_elements()) for one in shapes)
        received = self._group.exchange(
            [tf.concat([head, one], 0) for one in values], sizes + num_head
        )
        first = num_head + self._order.num_skipped()
        spec = self._own_spec
        dims = [spec.table_of(one).dim for one in spec.features]
        found = [
            [
                tf.reshape(rows, [-1, dim])
                for rows, dim in zip(
                    tf.split(
                        one[first:],
                        num_samples * tf.constant(dims, tf.int64),
                        num=len(dims),
                    ),
                    dims,
                )
            ]
            for one, num_samples in zip(received, step.num_samples)
        ]
        return found, split_vector(received[-1][:num_head], shapes)


def _check_errors(
    group: divided_tables.Group, is_bad: tf.Tensor, error: tf.Tensor
) -> tf.Tensor:
    """Raises the error of any process in all of them."""

    def tell():
        points = tf.strings.unicode_decode(error, "UTF-8")[:_MESSAGE_SIZE]
        points = group.all_gather(
            tf.pad(points, [[0, _MESSAGE_SIZE - tf.size(points)]])[tf.newaxis]
        )
        first = tf.argmax(is_bad)
        points = tf.gather(points, first)
        # An assertion would show quotes with a backslash before each.
        message = tf.strings.regex_replace(
            tf.strings.unicode_encode(
                tf.boolean_mask(points, points > 0), "UTF-8"
            ),
            "'",
            "",
        )
        check = tf.debugging.Assert(
            False,
            [
                tf.strings.join(
                    ["Process ", tf.strings.as_string(first), ": ", message]
                )
            ],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.constant(True)

    return tf.cond(tf.reduce_any(is_bad), tell, lambda: tf.constant(True))


def _words(message: tf.Tensor) -> tf.Tensor:
    """Bytes four by four, as collectives take them."""
    return tf.bitcast(tf.reshape(message, [-1, 4]), tf.int32)


def split_vector(values: tf.Tensor, shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Cuts a vector into vectors of known sizes."""
    return (
        [
            tf.ensure_shape(part, shape)
            for part, shape in zip(
                tf.split(values, [int(one.num_elements()) for one in shapes]),
                shapes,
            )
        ]
        if shapes
        else []
    )
