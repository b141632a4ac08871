"""Tests tables in TensorFlow's control flow, transformations and compilers.

Each result must be bitwise identical to the result of one `tf.Variable`.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.sharded.tables import placed
from tf_layoutmap.sharded import ShardedVariable

IDS = tf.constant([[1, 5], [9, 1]])
SCALE = tf.constant([1.0, 2.0])


def on_devices(values, sizes=(4, 3, 3)):
    """Returns a table whose shards alternate between two logical CPUs."""
    shards, start = [], 0
    for number, size in enumerate(sizes):
        with tf.device(f"CPU:{number % 2}"):
            shards.append(tf.Variable(values[start : start + size]))
        start += size
    return ShardedVariable(shards, name="emb")


TABLES = {
    "one shard": lambda values: placed(values, "div", 1),
    "div": lambda values: placed(values, "div"),
    "mod": lambda values: placed(values, "mod"),
    "columns": lambda values: placed(values, "columns", 2),
    "devices": on_devices,
    "devices, one without rows": lambda values: on_devices(
        values, (0, 4, 6, 0)
    ),
}


@pytest.fixture(params=TABLES)
def table(request, values):
    return TABLES[request.param](values)


def look_up(table, ids=IDS):
    return tf.gather(table, ids) * SCALE


def is_true():
    return tf.constant(1) > 0


CONTROL_FLOW = {
    "cond": lambda t: tf.cond(
        is_true(), lambda: look_up(t), lambda: 2 * look_up(t, IDS + 0)
    ),
    "cond, no lookup": lambda t: tf.cond(
        is_true(), lambda: tf.ones([2, 2, 2]), lambda: look_up(t)
    ),
    "cond, lookup": lambda t: tf.cond(
        is_true(), lambda: look_up(t), lambda: tf.ones([2, 2, 2])
    ),
    "cond, dense": lambda t: tf.cond(
        is_true(),
        lambda: look_up(t),
        lambda: tf.ones([2, 2, 2]) * tf.reduce_sum(tf.convert_to_tensor(t)),
    ),
    "cond in cond": lambda t: tf.cond(
        is_true(),
        lambda: tf.cond(
            is_true(), lambda: look_up(t), lambda: tf.zeros([2, 2, 2])
        ),
        lambda: 2 * look_up(t),
    ),
    "switch_case": lambda t: tf.switch_case(
        tf.constant(1),
        [
            lambda: look_up(t),
            lambda: 3 * look_up(t),
            lambda: tf.zeros([2, 2, 2]),
        ],
    ),
    "while": lambda t: tf.while_loop(
        lambda i, _: i < 3,
        lambda i, total: (i + 1, total + look_up(t, (IDS + i) % 10)),
        [0, tf.zeros([2, 2, 2])],
    )[1],
    "map_fn": lambda t: tf.map_fn(
        lambda ids: look_up(t, ids), IDS, fn_output_signature=tf.float32
    ),
    "vectorized_map": lambda t: tf.vectorized_map(
        lambda ids: look_up(t, ids), IDS
    ),
    "vectorized_map of scalars": lambda t: tf.vectorized_map(
        lambda row: tf.gather(t, row), IDS[:, 0]
    ),
}


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_values_and_gradients_match_one_variable(name, values, table):
    @tf.function
    def run(target):
        with tf.GradientTape() as tape:
            found = CONTROL_FLOW[name](target)
            loss = tf.reduce_sum(found**2)
        return found, tf.convert_to_tensor(tape.gradient(loss, target))

    for found, expected in zip(run(table), run(tf.Variable(values))):
        np.testing.assert_array_equal(found, expected)


def test_vectorized_map_works_with_a_table_without_rows():
    empty = on_devices(np.zeros([0, 2], np.float32), (0, 0))
    found = tf.vectorized_map(
        lambda ids: tf.gather(empty, ids), tf.zeros([4, 0], tf.int32)
    )
    assert found.shape == [4, 0, 2]


@pytest.mark.covering(1, 2)
def test_gradients_can_be_computed_inside_branches(values, table):
    @tf.function
    def run(target):
        def gradient():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(look_up(target))
            found = tape.gradient(loss, target)
            return tf.IndexedSlices(
                found.values,
                tf.cast(found.indices, tf.int64),
                found.dense_shape,
            )

        return tf.convert_to_tensor(
            tf.cond(
                is_true(),
                gradient,
                lambda: tf.IndexedSlices(
                    tf.zeros([0, 2]),
                    tf.zeros([0], tf.int64),
                    tf.constant([10, 2]),
                ),
            )
        )

    np.testing.assert_array_equal(run(table), run(tf.Variable(values)))


@pytest.mark.covering(1, 1)
def test_gradients_can_be_computed_inside_vectorized_map(values, table):
    def gradient_of_one(target, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up(target, ids) ** 2)
        return tf.convert_to_tensor(tape.gradient(loss, target))

    @tf.function
    def run(target):
        return tf.vectorized_map(lambda ids: gradient_of_one(target, ids), IDS)

    np.testing.assert_array_equal(run(table), run(tf.Variable(values)))


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("only", [None, 0])
def test_forward_mode_returns_the_rows_of_the_tangents(
    values, table, only, traced
):
    """Watches all shards, or only the shard `only`."""
    rows = {
        number: index
        for number, index in enumerate(
            np.split(
                np.arange(10),
                np.cumsum([shard.shape[0] for shard in table.variables])[:-1],
            )
        )
    }
    if table.axis == 1 or table.partition.placement == "mod":
        rows = None
    watched = range(len(table.variables)) if only is None else [only]
    full = np.zeros_like(values)
    tangents = []
    for number in watched:
        part = (
            np.random.default_rng(number)
            .integers(1, 9, table.variables[number].shape)
            .astype(np.float32)
        )
        tangents.append(tf.constant(part))
        if rows is not None:
            full[rows[number]] = part
        elif table.axis == 1:
            full[:, number : number + 1] = part
        else:
            full[number :: len(table.variables)] = part

    def products():
        with tf.autodiff.ForwardAccumulator(
            [table.variables[number] for number in watched], tangents
        ) as accumulator:
            found = [
                look_up(table),
                table[2:9],
                tf.convert_to_tensor(table) * 3.0,
            ]
        return [
            accumulator.jvp(
                one, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            for one in found
        ]

    found = tf.function(products)() if traced else products()
    for one, expected in zip(
        found, [look_up(tf.constant(full)), full[2:9], full * 3]
    ):
        np.testing.assert_array_equal(one, expected)


SPECS = [tf.TensorSpec(None, tf.int32), tf.TensorSpec(None, tf.float32)]


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("verb", ["add", "min", "update"])
def test_scatters_accept_tensors_of_unknown_rank(verb, values, table):
    one = tf.Variable(values)
    for target in (table, one):

        @tf.function(input_signature=SPECS)
        def scatter(ids, updates, target=target):
            getattr(target, f"scatter_{verb}")(tf.IndexedSlices(updates, ids))

        scatter(tf.constant([1, 9]), tf.constant([[5.0, 6.0], [7.0, 8.0]]))
        scatter(tf.constant([2, 0]), tf.constant(4.0))
        scatter(tf.constant(3), tf.constant([3.0, 4.0]))
        scatter(IDS + [[0, 0], [-5, -1]], tf.ones([2, 2, 2]))
    np.testing.assert_array_equal(table.numpy(), one.numpy())
    with pytest.raises(tf.errors.InvalidArgumentError):

        @tf.function(input_signature=SPECS)
        def bad(ids, updates):
            table.scatter_add(tf.IndexedSlices(updates, ids))

        bad(tf.constant([1, 9]), tf.ones([2, 2, 2]))
    np.testing.assert_array_equal(table.numpy(), one.numpy())


USES = {
    "gather": lambda t: tf.gather(t, IDS),
    "slice": lambda t: t[2:9],
    "all": lambda t: tf.convert_to_tensor(t) * 2,
    "scatter_add": lambda t: (
        t.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [1])) and None
    ),
    "scatter_nd_add": lambda t: t.scatter_nd_add([[1, 1]], [1.0]) and None,
}


@pytest.mark.parametrize("name", USES)
def test_xla_with_shards_on_several_devices_raises(name, values):
    table = on_devices(values)
    with pytest.raises(ValueError, match="'emb' must be on one device.*XLA"):
        tf.function(lambda: USES[name](table), jit_compile=True)()
    np.testing.assert_array_equal(table.numpy(), values)


def test_xla_supports_shards_on_one_device(values):
    table = placed(values, "div")
    found = tf.function(lambda: tf.gather(table, IDS), jit_compile=True)()
    np.testing.assert_array_equal(found, values[IDS.numpy()])
