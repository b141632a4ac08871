"""Tests that the class lacks the defects of TensorFlow's ShardedVariable.

The table in docs/guides/sharded_variable.md lists the defects (TensorFlow
2.21). Each row of this table that contains code has one test.
"""

import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.sharded.tables import make_table, placed
from tf_layoutmap.sharded import ShardedVariable


@pytest.fixture
def grid():
    """Returns a [6, 2] float32 array of distinct integers."""
    return np.arange(12, dtype=np.float32).reshape(6, 2)


def everywhere(function):
    return function(), tf.function(function)()


def test_the_first_row_of_each_shard_is_read_correctly(values):
    table = make_table(values[:9], [3, 3, 3])
    for row in (0, 3, 6):
        np.testing.assert_array_equal(table[row], values[row])


def test_sparse_read_keeps_the_order_of_ids(values):
    table = make_table(values, [4, 6])
    for found in everywhere(lambda: table.sparse_read([8, 0, 4, 4, 1, 7])):
        np.testing.assert_array_equal(found, values[[8, 0, 4, 4, 1, 7]])


def test_tf_gather_keeps_the_order_of_ids_of_any_rank(values):
    table = make_table(values, [4, 6])
    for found in everywhere(lambda: tf.gather(table, [[7, 0], [4, 9]])):
        np.testing.assert_array_equal(found, values[[[7, 0], [4, 9]]])


@pytest.mark.parametrize("sizes", [[4, 2, 4], [2, 5, 3], [0, 1, 9]])
def test_lookups_of_uneven_shards_are_correct(values, sizes):
    table = make_table(values, sizes)
    for found in everywhere(
        lambda: tf.nn.embedding_lookup(table, list(range(10)))
    ):
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("placement", ["div", "mod"])
@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_the_v1_lookup_uses_the_placement_of_the_table(
    values, placement, strategy
):
    table = placed(values, placement)
    for found in everywhere(
        lambda: tf.compat.v1.nn.embedding_lookup(
            table, [0, 1, 2, 9], partition_strategy=strategy
        )
    ):
        np.testing.assert_array_equal(found, values[[0, 1, 2, 9]])


def test_every_slice_matches_numpy(grid):
    values = grid[:5]
    table = make_table(values, [2, 2, 1])
    bounds = [None, *range(-7, 8)]
    for start, stop, step in itertools.product(
        bounds, bounds, (-3, -1, 1, 2, 7)
    ):
        np.testing.assert_array_equal(
            table[start:stop:step], values[start:stop:step]
        )


@pytest.mark.parametrize(
    "index",
    [
        (None, slice(0, 2)),
        (None, 1),
        (Ellipsis, slice(0, 1), slice(None)),
        (Ellipsis, 1, slice(None)),
        (slice(0, 0), 0),
    ],
    ids=str,
)
def test_new_axes_and_ellipses_index_the_unsharded_table(grid, index):
    found = make_table(grid, [2, 2, 2])[index]
    assert found.shape == grid[index].shape
    np.testing.assert_array_equal(found, grid[index])


def test_an_ellipsis_before_the_only_axis_indexes_rows():
    np.testing.assert_array_equal(
        make_table(np.arange(6.0), [3, 3])[..., 0:1], [0.0]
    )


@pytest.mark.parametrize("rows", [5, 7], ids=["too small", "too large"])
@pytest.mark.parametrize("placement", ["div", "mod", "columns"])
def test_a_value_with_another_shape_writes_nothing(grid, rows, placement):
    table = placed(grid, placement, 2)
    with pytest.raises(ValueError, match="must have shape"):
        table.assign(np.ones((rows, 2)))
    np.testing.assert_array_equal(table.numpy(), grid)


def test_tensors_lists_and_masks_index_rows(grid):
    table = make_table(grid, [3, 3])
    mask = [True, False, True, False, False, True]
    np.testing.assert_array_equal(table[tf.constant([4, 0])], grid[[4, 0]])
    np.testing.assert_array_equal(
        table[tf.constant(1) : tf.constant(4)], grid[1:4]
    )
    np.testing.assert_array_equal(table[[4, 0]], grid[[4, 0]])
    np.testing.assert_array_equal(table[mask], grid[mask])
    np.testing.assert_array_equal(table[mask, 0], grid[mask, 0])


def test_a_table_has_the_methods_of_a_variable(grid):
    table = make_table(grid, [3, 3])
    assert len(table) == 6 and table.trainable
    assert table.device == table.variables[0].device
    assert table.ref() == table.ref() and table.ref().deref() is table
    for full in (table.value(), table.read_value()):
        np.testing.assert_array_equal(full, grid)
    np.testing.assert_array_equal(
        table.gather_nd([[5, 1], [0, 0]]), [grid[5, 1], grid[0, 0]]
    )
    table[1:3].assign(np.zeros((2, 2)))
    table.scatter_nd_add([[5, 1]], [100.0])
    grid[1:3] = 0
    grid[5, 1] += 100
    np.testing.assert_array_equal(table.numpy(), grid)


def test_a_scalar_is_scattered_to_all_columns(grid):
    table = make_table(grid, [3, 3])
    table.scatter_add(tf.IndexedSlices(tf.constant(2.0), [5, 0]))
    grid[[5, 0]] += 2
    np.testing.assert_array_equal(table.numpy(), grid)


def test_empty_shards_support_scatters(grid):
    table = make_table(grid, [0, 2, 0, 4, 0])
    table.scatter_add(tf.IndexedSlices(tf.ones([3, 2]), [5, 2, 0]))
    grid[[5, 2, 0]] += 1
    np.testing.assert_array_equal(table.numpy(), grid)


def test_a_table_is_returned_from_functions_and_carried_in_loops(grid):
    table = make_table(grid, [2, 4])
    np.testing.assert_array_equal(tf.function(lambda: table)(), grid)
    for found in everywhere(
        lambda: tf.while_loop(
            lambda i, t: i < 3,
            lambda i, t: (i + 1, t * 2.0),
            (tf.constant(0), table),
        )[1]
    ):
        np.testing.assert_array_equal(found, grid * 8)

    @tf.function
    def count():
        for i in tf.range(3):
            table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [i]))
        return table

    np.testing.assert_array_equal(count(), grid + (np.arange(6) < 3)[:, None])


def test_numpy_converts_a_table_to_an_array_of_numbers(grid):
    table = make_table(grid, [2, 4])
    assert np.array(table).dtype == np.float32
    np.testing.assert_array_equal(np.array(table), grid)


def test_dense_use_works_in_any_name_scope(grid):
    table = make_table(grid, [2, 4])

    @tf.function
    def double():
        with tf.name_scope("my_embedding_lookup"):
            return table * 2

    np.testing.assert_array_equal(double(), grid * 2)


def test_updates_from_four_threads_are_all_applied():
    table = ShardedVariable.create(np.zeros((50, 8), np.float32), num_shards=4)
    num_calls, ids_per_call = 250, 40

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(num_calls):
            table.scatter_add(
                tf.IndexedSlices(
                    np.ones((ids_per_call, 8), np.float32),
                    rng.integers(0, 50, ids_per_call),
                )
            )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # 1 is added 40,000 times, which is exact in float32.
    np.testing.assert_array_equal(
        table.numpy().sum(axis=0), [4 * num_calls * ids_per_call] * 8
    )


@pytest.mark.exhaustive
def test_an_exported_table_reads_and_writes_the_same_rows(grid, tmp_path):
    # tests/sharded/test_export.py covers every method of a loaded table.
    module = tf.Module()
    module.table = make_table(grid, [4, 2])
    spec = tf.TensorSpec([None], tf.int32)
    module.gather = tf.function(
        lambda ids: tf.gather(module.table, ids), input_signature=[spec]
    )
    module.rows = tf.function(
        lambda: tf.concat([module.table[3:5], module.table[4:5]], axis=0),
        input_signature=[],
    )
    module.add = tf.function(
        lambda ids: module.table.scatter_add(
            tf.IndexedSlices(tf.ones([1, 2]), ids)
        ),
        input_signature=[spec],
    )
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(
        loaded.gather(tf.constant([5, 0, 4])), grid[[5, 0, 4]]
    )
    np.testing.assert_array_equal(loaded.rows(), grid[[3, 4, 4]])
    loaded.add(tf.constant([4]))
    grid[4] += 1
    np.testing.assert_array_equal(loaded.table, grid)


def optimizer_of(table):
    optimizer = tf.keras.optimizers.Adagrad(0.5)
    optimizer.build(table.variables)
    return optimizer


def train(table, optimizer, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
    optimizer.apply_gradients(
        zip(tape.gradient(loss, table.variables), table.variables)
    )


def test_a_keras_optimizer_and_a_table_share_a_checkpoint(grid, tmp_path):
    table = make_table(grid, [4, 2])
    optimizer = optimizer_of(table)
    train(table, optimizer, [5, 0])
    path = tf.train.Checkpoint(table=table, optimizer=optimizer).write(
        str(tmp_path / "c")
    )
    again = make_table(np.zeros_like(grid), [4, 2])
    other = optimizer_of(again)
    tf.train.Checkpoint(table=again, optimizer=other).read(
        path
    ).assert_consumed()
    for pair in ((table, optimizer), (again, other)):
        train(*pair, [5, 1])
    np.testing.assert_array_equal(again.numpy(), table.numpy())


def test_slots_restore_into_tables_with_other_shards(grid, tmp_path):
    path = tf.train.Checkpoint(
        table=make_table(grid, [2, 2, 2]), slot=make_table(grid + 1, [2, 2, 2])
    ).write(str(tmp_path / "c"))
    # These objects are created after `read`, so their restore is deferred.
    checkpoint = tf.train.Checkpoint()
    checkpoint.read(path)
    checkpoint.table = make_table(np.zeros_like(grid), [3, 3])
    checkpoint.slot = make_table(np.zeros_like(grid), [3, 3])
    np.testing.assert_array_equal(checkpoint.table.numpy(), grid)
    np.testing.assert_array_equal(checkpoint.slot.numpy(), grid + 1)


def test_shard_names_can_be_parsed_by_tf_keras(grid):
    table = ShardedVariable.create(grid, num_shards=3, name="ads")
    assert [v.name for v in table.variables] == [
        f"ads/part_{i}:0" for i in range(3)
    ]


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_tf_keras_optimizers_train_a_table_like_one_variable(grid, kind):
    tf_keras = pytest.importorskip("tf_keras")
    adam = {
        "new": tf_keras.optimizers.Adam,
        "legacy": tf_keras.optimizers.legacy.Adam,
    }[kind]
    # Shards may have any names, but TensorFlow's class requires `.../part_i`.
    table = ShardedVariable(
        [tf.Variable(grid[:4], name="part_of_words"), tf.Variable(grid[4:])]
    )
    full = tf.Variable(grid)
    for one, variables in ((table, table.variables), (full, [full])):
        optimizer = adam(0.5)
        for ids in ([5, 0], [5, 1, 5]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(one, ids) ** 2)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, variables), variables)
            )
    np.testing.assert_allclose(table.numpy(), full.numpy(), rtol=1e-6)


@pytest.mark.parametrize("sizes", [[3, 3], [1, 2, 2, 1], [6]])
def test_tf_keras_slots_restore_into_other_shards(grid, sizes, tmp_path):
    tf_keras = pytest.importorskip("tf_keras")

    def built(values, sizes):
        table = ShardedVariable(
            [
                tf.Variable(part, name=f"words/part_{i}")
                for i, part in enumerate(
                    np.split(values, np.cumsum(sizes)[:-1])
                )
            ]
        )
        optimizer = tf_keras.optimizers.Adam(0.5)
        optimizer.build(table.variables)
        return table, optimizer

    table, optimizer = built(grid, [4, 2])
    train(table, optimizer, [5, 0])
    path = tf.train.Checkpoint(table=table, optimizer=optimizer).write(
        str(tmp_path / "c")
    )
    again, other = built(np.zeros_like(grid), sizes)
    tf.train.Checkpoint(table=again, optimizer=other).read(
        path
    ).assert_existing_objects_matched()
    for pair in ((table, optimizer), (again, other)):
        train(*pair, [5, 1])
    np.testing.assert_array_equal(again.numpy(), table.numpy())


def test_dtensor_variables_can_be_shards(grid):
    dtensor = tf.experimental.dtensor
    mesh = dtensor.create_mesh([("x", 1)], devices=["CPU:0"])
    layout = dtensor.Layout.replicated(mesh, rank=2)

    def shard(rows):
        return dtensor.DVariable(dtensor.copy_to_mesh(rows, layout))

    table = ShardedVariable([shard(grid[:4]), shard(grid[4:])])
    np.testing.assert_array_equal(table.numpy(), grid)
    np.testing.assert_array_equal(table[4], grid[4])
    np.testing.assert_array_equal(
        tf.nn.embedding_lookup(table, [5, 0, 4]), grid[[5, 0, 4]]
    )
    table.scatter_add(tf.IndexedSlices(tf.ones([2, 2]), [5, 0]))
    table.scatter_update(tf.IndexedSlices(tf.zeros([1, 2]), [1]))
    grid[[5, 0]] += 1
    grid[1] = 0
    np.testing.assert_array_equal(table.numpy(), grid)


def test_the_tape_returns_one_gradient_for_the_unsharded_table(grid):
    table = make_table(grid, [4, 2])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [5, 0]))
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert sorted(gradient.indices.numpy()) == [0, 5]


def test_a_sharding_callback_splits_the_checkpoint_file(grid, tmp_path):
    table = make_table(grid, [2, 2, 2])
    options = tf.train.CheckpointOptions(
        experimental_sharding_callback=(
            tf.train.experimental.MaxShardSizePolicy(48)
        )
    )
    path = tf.train.Checkpoint(table=table).write(
        str(tmp_path / "c"), options=options
    )
    again = make_table(np.zeros_like(grid), [6])
    tf.train.Checkpoint(table=again).read(path).assert_consumed()
    np.testing.assert_array_equal(again.numpy(), grid)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("bad_id", [-1, 6, 100])
@pytest.mark.parametrize("placement", ["div", "mod", "columns"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_xla_reports_an_invalid_id(grid, bad_id, placement, num_shards):
    table = placed(grid, placement, num_shards)
    read = tf.function(table.sparse_read, jit_compile=True)
    rows = read(tf.constant([1, bad_id])).numpy()
    np.testing.assert_array_equal(rows[0], grid[1])
    assert np.isnan(rows[1]).all()
    for verb in ("add", "sub", "mul", "div", "min", "max", "update"):
        table.assign(grid)
        tf.function(
            lambda ids, verb=verb: (
                getattr(table, f"scatter_{verb}")(
                    tf.IndexedSlices(tf.ones([2, 2]), ids)
                )
                is None
            ),
            jit_compile=True,
        )(tf.constant([1, bad_id]))
        assert np.isnan(table.numpy()[1]).all(), verb
    for verb in ("add", "update") if num_shards == 1 else ():
        table.assign(grid)
        tf.function(
            lambda i, verb=verb: (
                getattr(table, f"scatter_nd_{verb}")(i, [1.0, 1.0]) is None
            ),
            jit_compile=True,
        )(tf.constant([[1, 0], [2, 2]]))
        assert np.isnan(table.numpy()[1, 0]), verb


def test_xla_with_integer_tables_raises(grid):
    table = make_table(grid.astype(np.int32), [4, 2])
    with pytest.raises(TypeError, match="floating.*only NaN can"):
        tf.function(table.sparse_read, jit_compile=True)(tf.constant([1]))
    known = tf.function(lambda: table.sparse_read([5, 0]), jit_compile=True)
    np.testing.assert_array_equal(known(), grid[[5, 0]])
    for bad_id in (6, -1):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=f"Id {bad_id} is out"
        ):
            tf.function(
                lambda bad_id=bad_id: table.sparse_read([bad_id]),
                jit_compile=True,
            )()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("version", ["keras", "tf_keras"])
def test_keras_optimizers_train_the_table_itself(grid, version, traced):
    """Clipping by norm requires the gradient of the full table."""
    optimizers = pytest.importorskip(version).optimizers

    def trained(variable):
        optimizer = optimizers.Adam(0.5, clipnorm=0.1)
        optimizer.build([variable])

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(variable, [5, 1, 5]) ** 2)
            gradient = tape.gradient(loss, variable)
            optimizer.apply_gradients([(gradient, variable)])

        run = tf.function(step, autograph=False) if traced else step
        run()
        run()
        return variable.numpy()

    np.testing.assert_allclose(
        trained(make_table(grid, [4, 2])), trained(tf.Variable(grid)), rtol=1e-6
    )
