"""Tests lookups and updates of several layers that are joined."""

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tf_layoutmap.embedding.configs import optimizer_specs
from tf_layoutmap.embedding.servers import bundles, prefetching
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace
from tf_layoutmap.layers.base import tables
from tf_layoutmap.sharded import ShardedVariable

assert strategies.NUM_DEVICES > 2
NUM_ROWS, DIM, NUM_IDS = 7, 4, 5
FETCH = "LayoutMap>FetchServerRows"
JOINED = "LayoutMap>ApplyAndFetchRows"
APPLY = ("LayoutMap>ApplyRows", "LayoutMap>ApplyRowsOfBundle")


class Layer:
    """A layer with a table on two servers, trained with Adagrad."""

    def __init__(self, number):
        rows = np.random.default_rng(number).normal(size=[NUM_ROWS, DIM])
        shards = []
        for server, part in enumerate([rows[:4], rows[4:]]):
            with tf.device(f"CPU:{server + 1}"):
                shards.append(tf.Variable(part, dtype=tf.float32))
        rule: Any = optimizer_specs.read_optimizer(
            tf.tpu.experimental.embedding.Adagrad(0.3), table="t"
        )
        self.table = tables.ServersTable(
            ShardedVariable(shards, name=f"table_{number}"), rule
        )
        self.slots = [self.table.new_slot(slot) for slot in rule.slots]
        self.is_known = True

    def __call__(self, ids):
        return self.table.look_up(
            ids,
            lambda: self.table.trained(self.slots) if self.is_known else None,
        )

    def train(self, gradient):
        self.table.update(
            self.slots,
            gradient.indices,
            gradient.values,
            optimizer="adagrad",
            hyperparameters=tf.constant([0.3]),
        )

    def values(self):
        variables = [self.table.variable, *self.slots]
        return [tf.concat(one.variables, axis=0).numpy() for one in variables]


def independent(layers, ids):
    """Returns the rows of all layers."""
    return [layer(part) for layer, part in zip(layers, ids, strict=True)]


def train(layers, ids, forward):
    with tf.GradientTape() as tape:
        rows = forward(layers, ids)
        loss = tf.add_n([tf.reduce_sum(one * one) for one in rows])
    gradients = tape.gradient(loss, [layer.table.variable for layer in layers])
    for layer, gradient in zip(layers, gradients, strict=True):
        if gradient is not None:
            layer.train(gradient)
    return rows


class Traced:
    """A traced closure that trains layers."""

    def __init__(
        self, joins, step=train, forward=independent, steps=3, num_layers=3
    ):
        self.layers = [Layer(number) for number in range(num_layers)]
        self.trace = ClosureTrace(joins_calls=joins, bundles_updates=joins)

        @tf.function(
            input_signature=[
                tf.TensorSpec([steps, 2], tf.int64),
                tf.TensorSpec([num_layers, None], tf.int64),
            ]
        )
        def closure(numbers, ids):
            results = []
            for number in range(steps):
                self.trace.begin(numbers[number], may_join=number > 0)
                with bundles.bundled():
                    own_ids = tf.unstack((ids + number) % NUM_ROWS)
                    results.append(step(self.layers, own_ids, forward))
            prefetching.end_steps()
            return results

        self.steps = steps
        self.function = closure.get_concrete_function()
        self.counts = collections.Counter(
            op.type for op in self.function.graph.get_operations()
        )
        self.ids = np.random.default_rng(9).integers(
            0, NUM_ROWS, [num_layers, NUM_IDS]
        )

    def run(self, first=0):
        """Runs the closure, and returns its results and all variables."""
        numbers = [[1, first + number] for number in range(self.steps)]
        results = self.function(tf.constant(numbers, tf.int64), self.ids)
        return [one.numpy() for one in tf.nest.flatten(results)] + [
            value for layer in self.layers for value in layer.values()
        ]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def ids_of_a_result(layers, ids):
    """The ids of the last layer depend on the rows of the first layer."""
    first = layers[0](ids[0])
    second = layers[1](ids[1])
    last = tf.where(tf.reduce_sum(first) > 0, ids[2], ids[2][::-1])
    return [first, second, layers[2](last)]


def two_calls(layers, ids):
    """The first layer is called twice."""
    return [*independent(layers, ids), layers[0](ids[0][:3] // 2)]


def matrix_of_ids(layers, ids):
    """The ids have two dimensions."""
    return [layer(ids[0][:, tf.newaxis]) for layer in layers]


def without_the_last(layers, ids):
    """The last layer is not trained."""
    first, second, last = independent(layers, ids)
    return [first, second, tf.stop_gradient(last)]


@pytest.mark.parametrize(
    ("forward", "num_reads"),
    [
        (independent, 1),
        (ids_of_a_result, 2),
        (two_calls, 1),
        (matrix_of_ids, 1),
        (without_the_last, 1),
    ],
)
def test_joined_layers_equal_separate_layers(forward, num_reads):
    separate = Traced(False, forward=forward)
    joined = Traced(True, forward=forward)
    assert not joined.trace.is_out_of_order
    assert joined.counts["LayoutMap>PlanStep"] <= 6
    # Two servers, three steps. The first step does not join its update.
    assert joined.counts[FETCH] + joined.counts[JOINED] == 6 * num_reads
    assert joined.counts["LayoutMap>FoldGradients"] == 3 * num_reads
    assert_equal(joined.run(), separate.run())
    assert_equal(joined.run(3), separate.run(3))


def test_each_server_gets_one_message_per_step():
    counts = Traced(True).counts
    assert counts[JOINED] == 2  # Only the last two steps join calls.
    assert sum(counts[one] for one in APPLY) == 4
    assert counts[FETCH] == 4


def test_a_repeated_closure_does_not_change_rows():
    traced = Traced(True)
    traced.run()
    before = [layer.values() for layer in traced.layers]
    traced.run()
    for layer, expected in zip(traced.layers, before, strict=True):
        assert_equal(layer.values(), expected)


def test_ids_after_a_variable_that_depends_on_rows_begin_another_read():
    """TensorFlow adds these dependencies at the end of the trace."""
    number = tf.Variable(tf.constant(0, tf.int64))

    def forward(layers, ids):
        first = layers[0](ids[0])
        number.assign(tf.cast(tf.reduce_sum(first) > 0, tf.int64))
        return [first, layers[1](ids[1] * number), layers[2](ids[2])]

    joined, separate = (Traced(one, forward=forward) for one in (True, False))
    assert joined.counts[FETCH] + joined.counts[JOINED] == 12
    assert_equal(joined.run(), separate.run())


def test_a_write_before_the_read_is_created_is_a_conflict():
    def forward(layers, ids):
        rows = independent(layers, ids)
        layers[0].table.variable.variables[0].assign_add(tf.ones([4, DIM]))
        return rows

    assert Traced(True, forward=forward).trace.is_out_of_order


def test_a_read_of_the_program_is_no_conflict():
    def forward(layers, ids):
        rows = independent(layers, ids)
        return [*rows, layers[0].table.variable.sparse_read(ids[0])]

    joined, separate = (
        Traced(one, forward=forward, steps=1) for one in (True, False)
    )
    assert not joined.trace.is_out_of_order
    assert_equal(joined.run(), separate.run())


def test_updates_in_a_branch_follow_the_read():
    def step(layers, ids, forward):
        with tf.GradientTape() as tape:
            rows = forward(layers, ids)
            loss = tf.add_n([tf.reduce_sum(one * one) for one in rows])
        gradients = tape.gradient(
            loss, [layer.table.variable for layer in layers]
        )

        def apply():
            for layer, gradient in zip(layers, gradients, strict=True):
                layer.train(gradient)
            return tf.constant(True)

        tf.cond(loss > 0, apply, lambda: tf.constant(False))
        return rows

    joined, separate = (Traced(one, step=step) for one in (True, False))
    assert not joined.trace.bundles_updates or joined.counts[FETCH]
    assert_equal(joined.run(), separate.run())


def test_an_unknown_rule_requires_another_trace():
    def forward(layers, ids):
        layers[0].is_known = False
        return independent(layers, ids)

    traced = Traced(True, forward=forward, steps=1)
    assert traced.trace.is_out_of_order
    assert traced.trace.renewed().joins_layers
    again = traced.trace.renewed()
    again.miss_rule()
    assert not again.renewed().joins_layers
    # The discarded trace is also correct.
    assert_equal(traced.run(), Traced(False, forward=forward, steps=1).run())


def test_lookups_without_gradients_are_joined():
    def step(layers, ids, forward):
        return forward(layers, ids)

    joined, separate = (Traced(one, step=step) for one in (True, False))
    assert joined.counts[FETCH] == 6
    assert_equal(joined.run(), separate.run())


def test_an_id_outside_of_the_table_is_an_error():
    def forward(layers, ids):
        return independent(layers, [ids[0], ids[1] + NUM_ROWS, ids[2]])

    traced = Traced(True, forward=forward)
    before = [layer.values() for layer in traced.layers]
    with pytest.raises(tf.errors.InvalidArgumentError, match="table_1"):
        traced.run()
    for layer, expected in zip(traced.layers, before, strict=True):
        assert_equal(layer.values(), expected)
