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

from tf_layoutmap import _ops, _tf_private
from tf_layoutmap.embedding.divided import (
    collectives,
    orders,
    steps_in_flight,
)
from tf_layoutmap.embedding.host import engine as host_engine
from tf_layoutmap.embedding.host import multi_process_checks
from tf_layoutmap.embedding.host.engine import HostEngine
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.variables import tables

# Of the variable `applied` of `FetchRows`, which counts nothing here.
_APPLIED_SIZE = 2054

# Code points of an error that the others are told.
_MESSAGE_SIZE = 400


class DividedLookup(NamedTuple):
    """A lookup that gradients may follow.

    Attributes:
      opened: By replica, the lookup of this process's engine.
      step: What it exchanges.
    """

    opened: list[host_engine.OpenLookup]
    step: steps_in_flight.Step


class DividedEngine(HostEngine):
    """The steps of all replicas on the rows of this process."""

    def __init__(
        self, spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]], group: collectives.Group, *,
        out_of_range: str, rounding_seed: int, order: str,
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
        self._whole_spec = spec
        self._tables = [
            variables[one.name][tables.PARAMETERS] for one in spec.tables]
        cuts = [one.cut for one in self._tables]
        num_shards = [one.num_shards for one in cuts]
        self._order: orders.Order = (
            orders.Exact(spec, group.size) if order == "exact" else
            orders.Folded(spec, group.size, group.rank, num_shards))
        own = {
            name: {key: getattr(one, "block", one)
                   for key, one in by_name.items()}
            for name, by_name in variables.items()}
        super().__init__(
            _own_spec(spec, own, self._order.features()), own,
            num_replicas=group.size, rounding_seed=rounding_seed,
            first_rows=[one.rows.start for one in self._tables])
        self._plan_attrs = {
            **host_engine.config_attrs(
                spec, own, out_of_range=out_of_range,
                rounding_seed=rounding_seed),
            "table_num_shards": num_shards,
            "table_offsets": [row for one in cuts for row in one.offsets],
            "num_owners": group.size,
            "shard_owners": [
                shard for one in num_shards for shard in range(one)]}
        self._steps = steps_in_flight.StepsInFlight()
        self.restores = multi_process_checks.RestoreCounter()
        with tf.init_scope(), tf.device(tables.HOST):
            self._applied = _tf_private.ResourceVariable(
                tf.zeros([_APPLIED_SIZE], tf.int64), trainable=False,
                name="applied")

    def enqueue(self, replica: int, training: Any,
                features: host_engine.StepInputs):
        """Tells the owners of rows the ids of this replica."""
        step, of_training, inputs = self._plan(training, features)
        for other, received in enumerate(inputs):
            super().enqueue(other, of_training[other], received)
        self._steps.enqueue(step)

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        step = self._steps.dequeue()
        for other in range(self._group.size):
            with tf.device(self._handle.device):
                _ops.pass_step(engine=self._handle, replica=other)
        return self._fetch(step)

    def apply(self, replica: int, gradients: Sequence[tf.Tensor],
              hyperparameters: Sequence[tf.Tensor]):
        """Applies this replica's gradients, and those of other processes.

        The hyperparameters of the last replica count, in all processes.
        """
        received, last = self._send_gradients(
            self._steps.take_dequeued(), gradients, hyperparameters)
        for other, own in enumerate(received):
            super().apply(other, own, last)

    def open(self, replica: int,
             features: host_engine.StepInputs) -> DividedLookup:
        """Opens this replica's lookup, and those of other processes."""
        step, _, inputs = self._plan(True, features)
        return DividedLookup(
            [super(DividedEngine, self).open(other, received)
             for other, received in enumerate(inputs)], step)

    def look_up(self, replica: int,
                lookup: DividedLookup) -> list[tf.Tensor]:
        """Returns the activations of an open lookup, one per feature."""
        return self._fetch(lookup.step)

    def look_up_only(
        self, features: host_engine.StepInputs) -> list[tf.Tensor]:
        """Returns activations that nothing follows, one per feature."""
        step, _, _ = self._plan(False, features)
        return self._fetch(step)

    def follow(self, replica: int, lookup: DividedLookup,
               gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Keeps this replica's gradients, and those of other processes."""
        received, _ = self._send_gradients(lookup.step, gradients, [])
        marks = [super(DividedEngine, self).follow(other, opened, own)
                 for other, (opened, own) in enumerate(
                     zip(lookup.opened, received))]
        # In order, and none left out: the others' marks come from there.
        with tf.control_dependencies(marks):
            return tf.identity(marks[replica])

    def apply_followed(self, replica: int, marks: tf.Tensor,
                       hyperparameters: Sequence[tf.Tensor]):
        """Applies what the marks of the replicas of all processes stand for.

        The hyperparameters of the last replica count, in all processes.
        """
        own = tf.concat([tf.reshape(marks, [-1]), *hyperparameters], 0)
        found = self._group.all_gather(own[tf.newaxis])
        size = int(marks.shape.num_elements())
        last = _split(found[-1, size:], [
            one.shape for one in hyperparameters])
        for other in range(self._group.size):
            super().apply_followed(
                other, tf.reshape(found[other, :size], marks.shape), last)

    def describe(self) -> dict[str, Any]:
        """Returns what the engine holds: of the rows of this process."""
        found = super().describe()
        # Of ids as owners get them, which are no counts of batches.
        del found["features"]
        return found

    def _plan(self, training: Any, features: host_engine.StepInputs):
        """Plans a step; also `training` and what to enqueue, by process."""
        group = self._group
        with tf.device(tables.HOST):
            found = _ops.plan_exchange(
                **host_engine.batch_inputs(features),
                training=tf.convert_to_tensor(
                    training if self._order.sends_contributions else False,
                    tf.bool), **self._plan_attrs)
        is_bad = tf.strings.length(found.error) > 0
        heads = tf.ensure_shape(group.all_gather(tf.concat([
            tf.stack([tf.cast(training, tf.int64), self.restores.value(),
                      tf.cast(is_bad, tf.int64)]),
            tf.reshape(found.sizes, [-1])], 0)[tf.newaxis]),
            [group.size, 3 + 4 * group.size])
        checks = multi_process_checks.check_restores(heads[:, 1], 1)
        checks.append(self._check_errors(heads[:, 2] > 0, found.error))
        with tf.control_dependencies(checks):
            sizes = tf.reshape(heads[:, 3:], [group.size, group.size, 4])
            of_training = tf.unstack(heads[:, 0] > 0)
        words = group.exchange(
            [tf.concat(one, 0)
             for one in zip(found.requests, found.contributions)],
            sizes[:, :, orders.REQUEST] + sizes[:, :, orders.CONTRIBUTIONS])
        requests, inputs, num_samples = [], [], []
        for other, received in enumerate(words):
            size = sizes[other, group.rank, orders.REQUEST]
            requests.append(received[:size])
            with tf.device(tables.HOST):
                ids, counts = self._order.read(
                    received[:size], received[size:])
            inputs.append(ids)
            num_samples.append(counts)
        step = steps_in_flight.Step(found.plan, requests, sizes, num_samples)
        return step, of_training, inputs

    def _check_errors(self, is_bad: tf.Tensor, error: tf.Tensor):
        """Raises the error of any process in all of them."""
        group = self._group

        def tell():
            points = tf.strings.unicode_decode(error, "UTF-8")[:_MESSAGE_SIZE]
            points = group.all_gather(tf.pad(
                points, [[0, _MESSAGE_SIZE - tf.size(points)]])[tf.newaxis])
            first = tf.argmax(is_bad)
            points = tf.gather(points, first)
            # An assertion would show quotes with a backslash before each.
            message = tf.strings.regex_replace(tf.strings.unicode_encode(
                tf.boolean_mask(points, points > 0), "UTF-8"), "'", "")
            check = tf.debugging.Assert(False, [tf.strings.join([
                "Process ", tf.strings.as_string(first), ": ", message])])
            with tf.control_dependencies([] if check is None else [check]):
                return tf.constant(True)

        return tf.cond(tf.reduce_any(is_bad), tell, lambda: tf.constant(True))

    def _fetch(self, step: steps_in_flight.Step) -> list[tf.Tensor]:
        """Looks a batch up in rows that their owners send."""
        has_rows = [bool(one.rows) for one in self._tables]
        specs = [one for one, has in zip(self._spec.tables, has_rows) if has]
        shards = [one.block.handle for one in self._tables if one.rows]
        fetched = []
        for request in step.requests:
            with tf.device(tables.HOST):
                fetched.append(_words(_ops.fetch_rows(
                    shards=shards, applied=self._applied.handle,
                    request=_ops.write_request(
                        words=request, num_shards=len(specs)),
                    tables=[one.name for one in specs],
                    dims=[one.dim for one in specs],
                    dtypes=[tf.as_dtype(one.dtype) for one in specs]))
                    if specs else tf.zeros([2], tf.int32))
        # What a process sends are the rows that were asked of it.
        received = self._group.exchange(
            fetched, tf.transpose(step.sizes[:, :, orders.FETCHED]))
        features = self._whole_spec.features
        with tf.device(tables.HOST):
            return _ops.combine_rows(
                plan=step.plan,
                fetched=[orders.bytes_of(one) for one in received],
                num_features=len(features),
                dims=[self._whole_spec.table_of(one).dim for one in features],
                max_sequence_lengths=[
                    one.max_sequence_length for one in features])

    def _send_gradients(
        self, step: steps_in_flight.Step, gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ) -> tuple[list[list[tf.Tensor]], list[tf.Tensor]]:
        """The gradients for this process, by process and feature, and the
        hyperparameters of the last replica."""
        with tf.device(tables.HOST):
            values, sizes = self._order.values(step, gradients)
        head = tf.concat([tf.zeros([0]), *hyperparameters], 0)
        shapes = [one.shape for one in hyperparameters]
        num_head = sum(int(one.num_elements()) for one in shapes)
        received = self._group.exchange(
            [tf.concat([head, one], 0) for one in values], sizes + num_head)
        first = num_head + self._order.num_skipped()
        dims = [self._spec.table_of(one).dim for one in self._spec.features]
        found = [
            [tf.reshape(rows, [-1, dim]) for rows, dim in zip(
                tf.split(one[first:], num_samples * tf.constant(
                    dims, tf.int64), num=len(dims)), dims)]
            for one, num_samples in zip(received, step.num_samples)]
        return found, _split(received[-1][:num_head], shapes)


def _own_spec(spec: config.EmbeddingSpec,
              own: dict[str, dict[str, Any]],
              features: tuple[config.FeatureSpec, ...],
              ) -> config.EmbeddingSpec:
    """What the engine of a process is told: its rows, and ids with gains."""
    return dataclasses.replace(
        spec,
        tables=tuple(dataclasses.replace(
            one, num_rows=int(own[one.name][tables.PARAMETERS].shape[0]),
            combiner="sum", quantization=None) for one in spec.tables),
        features=features)


def _words(message: tf.Tensor) -> tf.Tensor:
    """Bytes four by four, as collectives take them."""
    return tf.bitcast(tf.reshape(message, [-1, 4]), tf.int32)


def _split(values: tf.Tensor, shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Cuts a vector into vectors of known sizes."""
    return [tf.ensure_shape(part, shape) for part, shape in zip(
        tf.split(values, [int(one.num_elements()) for one in shapes]),
        shapes)] if shapes else []
