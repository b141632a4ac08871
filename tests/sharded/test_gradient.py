"""A gradient tape returns one gradient for the unsharded table."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.sharded.tables import make_table
from tf_layoutmap._core import ops


def both(function):
    return pytest.mark.parametrize(
        "run",
        [lambda f, *a: f(*a), lambda f, *a: tf.function(f)(*a)],
        ids=["eager", "traced"],
    )(function)


def dense(gradient):
    return tf.convert_to_tensor(gradient).numpy()


@pytest.mark.covering(2)
@both
@pytest.mark.parametrize(
    "loss",
    [
        lambda table: tf.gather(table, [7, 0, 7]) * [[1.0], [2.0], [3.0]],
        lambda table: tf.nn.embedding_lookup(table, [[9, 3]]) ** 2,
        lambda table: table[2:9:3] * 2,
        lambda table: table[::-1] * tf.range(10.0)[:, None],
        lambda table: table[4, 1],
        lambda table: table * table,
        lambda table: table[:4] + tf.gather(table, [9]),
    ],
    ids=["gather", "lookup", "slice", "reverse", "item", "dense", "mixed"],
)
def test_the_gradient_matches_a_single_variable(values, sizes, run, loss):
    def gradient_of(table):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(loss(table))
        return tape.gradient(total, table)

    found = run(lambda: gradient_of(make_table_once()))
    one = tf.Variable(values)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(loss(tf.convert_to_tensor(one)))
    np.testing.assert_array_equal(
        dense(found), dense(tape.gradient(total, one))
    )


@pytest.fixture(autouse=True)
def _one_table(values, sizes):
    # The table is created here, because traced functions must not create
    # variables.
    global make_table_once
    table = make_table(values, sizes)
    make_table_once = lambda: table  # noqa: E731
    yield


@both
def test_the_gradient_of_a_lookup_is_indexed_slices_of_global_rows(
    values, sizes, run
):
    table = make_table(values, sizes)

    def gradient():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(table, [9, 0]))
        return tape.gradient(total, table)

    found = run(gradient)
    assert isinstance(found, tf.IndexedSlices)
    assert sorted(found.indices.numpy()) == [0, 9]
    assert found.dense_shape.numpy().tolist() == [10, 2]


@both
def test_each_shard_has_a_separate_gradient(values, run):
    table = make_table(values, [4, 3, 3])

    def gradients():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(table, [9, 0]))
        return tape.gradient(total, table.variables)

    first, second, third = map(dense, run(gradients))
    assert first[0, 0] == 1 and third[2, 0] == 1
    assert first.sum() == third.sum() == 2 and second.sum() == 0


def test_an_unread_table_has_no_gradient(values, sizes):
    table, other = make_table(values, sizes), tf.Variable(2.0)
    with tf.GradientTape() as tape:
        total = other * 3
    assert tape.gradient(total, [table, other])[0] is None


@both
def test_zeros_of_unconnected_sources_have_their_shapes(values, sizes, run):
    table = make_table(values, sizes)
    others = [tf.Variable(tf.ones([size])) for size in (5, 6, 7)]
    layers = [
        tlm.layers.ShardedEmbedding(6, 2, num_shards=3, optimizer=optimizer)
        for optimizer in (None, "sgd")
    ]
    for layer in layers:
        layer.build()
    sources = [
        table,
        *others,
        *[layer.embeddings for layer in layers],
        *[weight for layer in layers for weight in layer.trainable_weights],
        others[0],
    ]

    def gradients():
        with tf.GradientTape(persistent=True) as tape:
            total = tf.reduce_sum(others[2] * 2)
        zero = tf.UnconnectedGradients.ZERO
        return (
            tape.gradient(total, sources, unconnected_gradients=zero),
            tape.jacobian(
                total, [table, others[1]], unconnected_gradients=zero
            ),
        )

    found, jacobians = run(gradients)
    assert [one.shape for one in found] == [
        tf.TensorShape(one.shape) for one in sources
    ]
    assert [float(tf.reduce_sum(one)) for one in found] == [
        14.0 if one is others[2] else 0.0 for one in sources
    ]
    assert [one.shape for one in jacobians] == [table.shape, [6]]


@both
def test_zeros_of_an_unread_shard_join_the_gradient_of_a_read_shard(run):
    table = make_table(np.ones([10, 2], np.float32), [4, 6])

    def gradient():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(table.variables[1])
        return tape.gradient(total, table, unconnected_gradients="zero")

    assert dense(run(gradient)).sum(axis=1).tolist() == [0.0] * 4 + [2.0] * 6


READS = {
    "lookup": lambda table, ids: tf.nn.embedding_lookup(table, ids),
    "unique": lambda table, ids: table.gather_rows(ids, unique=True),
    "gather_nd": lambda table, ids: tf.gather_nd(table, ids[:, tf.newaxis]),
    "slice": lambda table, ids: table[2:] * tf.cast(ids[0], tf.float32),
    "dense": lambda table, ids: table * tf.cast(ids[0], tf.float32),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("first_with_tape", [False, True])
@pytest.mark.parametrize("read", READS)
def test_a_tape_outside_of_the_function_that_reads_trains_the_table(
    values, sizes, each_route, read, first_with_tape
):
    table, one = make_table(values, sizes), tf.Variable(values)
    forward = tf.function(lambda ids: READS[read](table, ids))
    ids = tf.constant([3, 0])
    if not first_with_tape:
        forward(ids)
    for _ in range(2):
        with tf.GradientTape() as tape:
            found = tf.reduce_sum(forward(ids) ** 2)
        with tf.GradientTape() as stock_tape:
            rows = READS["lookup" if read == "unique" else read](one, ids)
            expected = tf.reduce_sum(rows**2)
        np.testing.assert_array_equal(
            dense(tape.gradient(found, table)),
            dense(stock_tape.gradient(expected, one)),
        )


def test_a_non_trainable_table_is_not_watched(values, sizes):
    table = make_table(values, sizes, trainable=False)
    with tf.GradientTape(persistent=True) as tape:
        unwatched = tf.reduce_sum(tf.gather(table, [3]))
        tape.watch(table)
        watched = tf.reduce_sum(tf.gather(table, [3]))
    assert tape.gradient(unwatched, table) is None
    assert tape.gradient(watched, table).indices.numpy().tolist() == [3]


def test_sgd_with_the_gradient_matches_sgd_on_one_variable(values, sizes):
    table, one = make_table(values, sizes), tf.Variable(values)
    for ids in ([1, 1, 9], [0], [4, 3]):
        for target in (table, one):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(tf.gather(target, ids) ** 2)
            gradient = tape.gradient(total, target)
            target.scatter_sub(
                tf.IndexedSlices(gradient.values * 0.5, gradient.indices)
            )
    np.testing.assert_array_equal(table.numpy(), one.numpy())


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_the_gradient_of_one_shard_does_not_route_ids(dtype):
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    shard = tf.Variable(values)
    weights = np.array([[1, 2], [3, 4], [5, 6]], np.float32)

    @tf.function
    def gradient(ids):
        with tf.GradientTape() as tape:
            tape.watch(shard.handle)
            rows = ops.gather_rows(
                shards=[shard.handle],
                offsets=[0, 6],
                ids=ids,
                placement="div",
                dtype=tf.float32,
                table="words",
            )
            total = tf.reduce_sum(rows * weights)
        return tape.gradient(total, [shard.handle])

    ids = tf.constant([5, 0, 5], dtype)
    (found,) = gradient(ids)
    graph = gradient.get_concrete_function(ids).graph.as_graph_def()
    types = {node.op for node in graph.node}
    for function in graph.library.function:
        types |= {node.op for node in function.node_def}
    assert "LayoutMap>GatherRows" in types
    assert "LayoutMap>RouteIds" not in types
    assert found.indices.dtype == dtype
    np.testing.assert_array_equal(found.indices, ids)
    np.testing.assert_array_equal(found.values, weights)
    assert found.dense_shape.numpy().tolist() == [6, 2]
