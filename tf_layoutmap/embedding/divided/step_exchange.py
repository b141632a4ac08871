"""What the processes of divided tables send each other in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _ops, _tf_private
from tf_layoutmap.embedding.divided import (
    collectives,
    orders,
    steps_in_flight,
)
from tf_layoutmap.embedding.divided.tables import DividedTable
from tf_layoutmap.embedding.host import multi_process_checks, op_arguments
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.variables import tables

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
        group: collectives.Group,
        order: orders.Order,
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
            variables[one.name][tables.PARAMETERS] for one in spec.tables
        ]
        self._group = group
        self._order = order
        cuts = [one.cut for one in self._tables]
        num_shards = [one.num_shards for one in cuts]
        self._plan_attrs = {
            **op_arguments.config_attrs(
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
        self.restores = multi_process_checks.RestoreCounter()
        with tf.init_scope(), tf.device(tables.HOST):
            self._applied = _tf_private.ResourceVariable(
                tf.zeros([_APPLIED_SIZE], tf.int64),
                trainable=False,
                name="applied",
            )

    def plan(
        self,
        training: Any,
        features: op_arguments.StepInputs,
    ) -> tuple[steps_in_flight.Step, list[tf.Tensor], list[Any]]:
        """Tells the owners of rows which ones this replica asks for.

        Args:
          training: Whether gradients will follow.
          features: This replica's batch.

        Returns:
          The step; and by process whether it trains, and the batch that its
          replica has for the rows of this one.
        """
        group = self._group
        with tf.device(tables.HOST):
            found = _ops.plan_exchange(
                **op_arguments.batch_inputs(features),
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
        checks = multi_process_checks.check_restores(heads[:, 1], 1)
        check = _check_errors(group, heads[:, 2] > 0, found.error)
        with tf.control_dependencies([*checks, check]):
            sizes = tf.reshape(heads[:, 3:], [group.size, group.size, 4])
            of_training = tf.unstack(heads[:, 0] > 0)
        words = group.exchange(
            [
                tf.concat(one, 0)
                for one in zip(found.requests, found.contributions)
            ],
            sizes[:, :, orders.REQUEST] + sizes[:, :, orders.CONTRIBUTIONS],
        )
        requests, inputs, num_samples = [], [], []
        for other, received in enumerate(words):
            size = sizes[other, group.rank, orders.REQUEST]
            requests.append(received[:size])
            with tf.device(tables.HOST):
                ids, counts = self._order.read(received[:size], received[size:])
            inputs.append(ids)
            num_samples.append(counts)
        step = steps_in_flight.Step(found.plan, requests, sizes, num_samples)
        return step, of_training, inputs

    def fetch(self, step: steps_in_flight.Step) -> list[tf.Tensor]:
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
            with tf.device(tables.HOST):
                fetched.append(
                    _words(
                        _ops.fetch_rows(
                            shards=shards,
                            applied=self._applied.handle,
                            request=_ops.write_request(
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
            fetched, tf.transpose(step.sizes[:, :, orders.FETCHED])
        )
        with tf.device(tables.HOST):
            return _ops.combine_rows(
                plan=step.plan,
                fetched=[orders.bytes_of(one) for one in received],
                **op_arguments.activation_attrs(self._spec),
            )

    def send_gradients(
        self,
        step: steps_in_flight.Step,
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
        with tf.device(tables.HOST):
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
    group: collectives.Group, is_bad: tf.Tensor, error: tf.Tensor
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
