"""Tests updates and constraints of tables on servers, without a cluster."""

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap.embedding.configs import optimizer_specs
from tf_layoutmap.embedding.servers import bundles
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace
from tf_layoutmap.layers.base import tables
from tf_layoutmap.sharded import ShardedVariable

ROWS = np.arange(1, 21, dtype=np.float32).reshape([5, 4])


def new_table():
    rule = optimizer_specs.read_optimizer(
        tf.tpu.experimental.embedding.SGD(1.0), table="t"
    )
    shards = [tf.Variable(ROWS[:3]), tf.Variable(ROWS[3:])]
    return tables.ServersTable(ShardedVariable(shards, name="t"), rule)


@pytest.fixture
def table():
    return new_table()


def update(table, ids, value=1.0):
    """Subtracts a value from rows."""
    table.update(
        (),
        tf.constant(ids),
        tf.fill([len(ids), 4], value),
        optimizer="sgd",
        hyperparameters=tf.constant([1.0]),
    )


def halve(rows):
    return rows / 2


def rows_of(table):
    return tf.concat(table._variable.variables, axis=0).numpy()


def test_only_the_rows_of_a_step_are_constrained(table):
    table.constrain(tf.constant([4, 0, 4]), halve)
    expected = ROWS.copy()
    expected[[0, 4]] /= 2
    np.testing.assert_array_equal(rows_of(table), expected)


def test_no_row_is_constrained_without_ids(table):
    table.constrain(tf.zeros([0], tf.int64), halve)
    np.testing.assert_array_equal(rows_of(table), ROWS)


@pytest.mark.parametrize("factor", [1e-3, 0.3, 0.77, 3.0, 1e4, 0.0])
def test_constrained_rows_are_bitwise_equal(table, factor):
    """The difference to the current row cannot be represented exactly."""
    random = np.random.default_rng(0).normal(size=[5, 4]).astype(np.float32)
    table._variable.assign(random)
    table.constrain(tf.range(5), lambda rows: rows * factor)
    np.testing.assert_array_equal(rows_of(table), random * np.float32(factor))


def test_updates_between_the_read_and_the_constraint_are_not_lost(table):
    def halve_after_another_update(rows):
        update(table, [1], 8.0)
        return halve(rows)

    table.constrain(tf.constant([1]), halve_after_another_update)
    np.testing.assert_array_equal(rows_of(table)[1], ROWS[1] / 2 - 8)


def test_a_repeated_closure_completes_the_constraint_and_applies_it_once(table):
    @tf.function
    def closure(numbers, has_constraint):
        ClosureTrace().begin(numbers)
        update(table, [2])
        if has_constraint:
            table.constrain(tf.constant([2]), halve)

    numbers = tf.constant([1, 0], tf.int64)
    # The worker of the first run dies before it sends the constraint.
    closure(numbers, False)
    np.testing.assert_array_equal(rows_of(table)[2], ROWS[2] - 1)
    for _ in range(2):
        closure(numbers, True)
        np.testing.assert_array_equal(rows_of(table)[2], (ROWS[2] - 1) / 2)
    closure(tf.constant([1, 1], tf.int64), True)
    np.testing.assert_array_equal(
        rows_of(table)[2], ((ROWS[2] - 1) / 2 - 1) / 2
    )


def test_reads_and_updates_have_the_order_of_the_program(table):
    @tf.function
    def step():
        before = table._variable.value()
        update(table, [0, 2])
        between = table._variable.value()
        update(table, [0, 2])
        table.constrain(tf.constant([0, 2]), halve)
        return before, between, table._variable.value()

    for _ in range(20):
        start = rows_of(table)
        before, between, after = (one.numpy() for one in step())
        once, twice = start.copy(), start.copy()
        once[[0, 2]] -= 1.0
        twice[[0, 2]] = (once[[0, 2]] - 1.0) / 2
        np.testing.assert_array_equal(before, start)
        np.testing.assert_array_equal(between, once)
        np.testing.assert_array_equal(after, twice)


# The numbers of a closure, and the types of the ops that update rows.
NUMBERS = tf.constant([1, 0], tf.int64)
ONE, SEVERAL = "LayoutMap>ApplyRows", "LayoutMap>ApplyRowsOfBundle"


def traced_bundle(step):
    """Traces a step whose updates are bundled.

    Returns:
      The concrete function of a closure, the types of its ops that update rows,
      and whether its order is wrong.
    """
    trace = ClosureTrace(bundles_updates=True)

    @tf.function(input_signature=[tf.TensorSpec([2], tf.int64)])
    def closure(numbers):
        trace.begin(numbers)
        with bundles.bundled():
            return step()

    traced = closure.get_concrete_function()
    types = [
        op.type
        for op in traced.graph.get_operations()
        if op.type in (ONE, SEVERAL)
    ]
    return traced, types, trace.is_out_of_order


def test_updates_of_several_tables_are_one_op():
    several = [new_table() for _ in range(3)]

    def step():
        for number, one in enumerate(several):
            update(one, [number, 4], number + 1.0)

    traced, types, has_conflict = traced_bundle(step)
    assert types == [SEVERAL]
    assert not has_conflict
    for _ in range(2):  # The second call repeats the closure.
        traced(NUMBERS)
        for number, one in enumerate(several):
            expected = ROWS.copy()
            expected[[number, 4]] -= number + 1
            np.testing.assert_array_equal(rows_of(one), expected)


def test_an_update_of_one_table_is_not_bundled(table):
    traced, types, has_conflict = traced_bundle(lambda: update(table, [1]))
    assert types == [ONE]
    assert not has_conflict
    traced(NUMBERS)
    np.testing.assert_array_equal(rows_of(table)[1], ROWS[1] - 1)


def test_reads_before_updates_are_no_conflict():
    several = [new_table() for _ in range(2)]

    def step():
        found = [one._variable.sparse_read(tf.constant([2])) for one in several]
        for one in several:
            update(one, [2])
        return found

    traced, types, has_conflict = traced_bundle(step)
    assert types == [SEVERAL]
    assert not has_conflict
    for found in traced(NUMBERS):
        np.testing.assert_array_equal(found, ROWS[2:3])
    for one in several:
        np.testing.assert_array_equal(rows_of(one)[2], ROWS[2] - 1)


def test_constraints_follow_their_updates():
    several = [new_table() for _ in range(2)]

    def step():
        for one in several:
            update(one, [2])
            one.constrain(tf.constant([2]), halve)

    traced, _, has_conflict = traced_bundle(step)
    assert not has_conflict
    traced(NUMBERS)
    for one in several:
        np.testing.assert_array_equal(rows_of(one)[2], (ROWS[2] - 1) / 2)


def reads_the_table(one, other):
    update(one, [1])
    update(other, [1])
    return one._variable.read_value()


def reads_in_a_branch(one, other):
    update(one, [1])
    update(other, [1])
    return tf.cond(
        tf.reduce_sum(tf.random.uniform([])) >= 0,
        one._variable.read_value,
        lambda: tf.zeros([5, 4]),
    )


def updates_in_a_branch(one, other):
    update(one, [1])
    tf.cond(
        tf.reduce_sum(tf.random.uniform([])) >= 0,
        lambda: update(other, [1]),
        lambda: None,
    )


@pytest.mark.parametrize(
    "step", [reads_the_table, reads_in_a_branch, updates_in_a_branch]
)
def test_ops_that_follow_an_update_are_a_conflict(step):
    several = [new_table() for _ in range(2)]
    _, _, has_conflict = traced_bundle(lambda: step(*several))
    assert has_conflict


@pytest.mark.parametrize(
    ("rule", "constants"),
    [
        ("momentum", [0.9, 1.0]),
        ("rmsprop", [0.9, 1e-3]),
        ("adam", [0.9, 0.99, 1e-3, 0.0, 1.0]),
    ],
)
def test_rules_of_the_models_optimizer_equal_a_table_on_the_host(
    rule, constants
):
    slots = [
        optimizer_specs.SlotSpec(name, 0.0)
        for name in ("first", "second")[: 2 if rule == "adam" else 1]
    ]
    spec = optimizer_specs.OptimizerSpec(
        rule, 0.0, tuple(slots), tuple(constants)
    )
    ids, gradients = tf.constant([1, 4, 1]), tf.reshape(tf.range(12.0), [3, 4])
    found = []
    for table in (
        new_table().with_rule(spec),
        tables.HostTable(new_table().variable).with_rule(spec),
    ):
        created = [table.new_slot(slot) for slot in slots]
        for _ in range(2):
            table.constrain(ids, lambda rows: rows - rows * 0.1)
            table.update(
                created,
                ids,
                gradients,
                optimizer=rule,
                hyperparameters=tf.constant([0.1, *constants]),
            )
        found.append(rows_of(table))
    np.testing.assert_allclose(*found, rtol=1e-6)
