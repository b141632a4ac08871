"""Tests writes by index and in batches, conversions and summaries."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.sharded.tables import PLACEMENTS, make_table, placed
from tf_layoutmap.sharded import ShardedVariable

pytestmark = pytest.mark.usefixtures("each_route")
TensorFlowsOwn = tf.__internal__.distribute.ShardedVariable
everywhere = pytest.mark.parametrize("placement", [*PLACEMENTS, "columns"])

INDICES = {
    "row": 3,
    "last": -1,
    "slice": slice(2, 7),
    "step": slice(8, 0, -3),
    "ids": [7, 0, 4],
    "mask": np.arange(10) % 3 == 0,
    "grid": np.arange(30).reshape(10, 3) % 4 == 0,
    "column": (slice(1, 6), 2),
    "block": (slice(1, 6), slice(2, 0, -1)),
    "tail": (Ellipsis, slice(1, 2)),
    "new": (None, slice(0, 3)),
    "item": (4, 1),
    "ids column": ([3, 9], 1),
    "empty": slice(0, 0),
}


@pytest.mark.covering(1, 2)
@everywhere
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_assigning_to_an_index_writes_the_selected_elements(placement, index):
    ref = np.arange(30, dtype=np.float32).reshape(10, 3)
    table = placed(ref, placement)
    part = (
        -np.arange(ref[index].size, dtype=np.float32).reshape(ref[index].shape)
        * 0.5
    )
    assert table[index].assign(part) is table
    ref[index] = part
    np.testing.assert_array_equal(table.numpy(), ref)
    table[index].assign_add(part)
    ref[index] += part
    tf.function(lambda: table[index].assign_sub(2.0) is None)()
    ref[index] -= 2
    np.testing.assert_array_equal(table.numpy(), ref)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "index, value, error, words",
    [
        (slice(2, 4), np.ones((3, 2)), ValueError, r"shape \(2, 2\).*\(3, 2\)"),
        (0, np.ones(3), ValueError, "broadcast"),
        (10, 1.0, IndexError, "outside table 'emb'"),
        ([10], 1.0, tf.errors.InvalidArgumentError, "outside table 'emb'"),
        (
            (np.ones((10, 2), bool), None),
            1.0,
            TypeError,
            "must be the only item",
        ),
    ],
)
def test_a_value_that_does_not_fit_raises_and_writes_nothing(
    values, index, value, error, words
):
    table = make_table(values, [4, 6])
    with pytest.raises(error, match=words):
        table[index].assign(value)
    np.testing.assert_array_equal(table.numpy(), values)


@pytest.mark.covering(2)
@everywhere
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("bad", [[1, 4], [10, 0], [-1, 0]])
def test_an_invalid_index_tuple_writes_nothing(placement, depth, bad):
    values = np.arange(80, dtype=np.float32).reshape(10, 4, 2)
    table = placed(values, placement)
    tuples = np.array([[0] * depth, (bad + [0])[:depth]])
    updates = np.ones((2, *values.shape[depth:]), np.float32)
    for verb in ("add", "sub", "min", "max", "update"):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"Id -?\d+ \(ids\[1\]\) is outside .*'emb'",
        ):
            getattr(table, f"scatter_nd_{verb}")(tuples, updates)
    with pytest.raises(tf.errors.InvalidArgumentError, match="outside"):
        table.gather_nd(tuples)
    np.testing.assert_array_equal(table.numpy(), values)


@pytest.mark.parametrize("indices", [[[0, 0, 0]], np.zeros((2, 0), int), 3])
def test_index_tuples_of_the_wrong_rank_raise(values, indices):
    with pytest.raises(ValueError, match="from 1 to 2 for table 'emb'"):
        make_table(values, [4, 6]).gather_nd(indices)


@pytest.mark.covering(1)
@everywhere
def test_batch_scatters_match_one_variable(placement):
    values = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    for indices, shape in (([3, 0], (2, 3, 2)), ([[2], [0], [1]], (3, 1, 2))):
        table, one = placed(values, placement, 2), tf.Variable(values)
        slices = tf.IndexedSlices(
            -tf.reshape(tf.range(float(np.prod(shape))), shape), indices
        )
        table.batch_scatter_update(slices)
        one.batch_scatter_update(slices)
        np.testing.assert_array_equal(table.numpy(), one.numpy())


@pytest.mark.covering(2)
@everywhere
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_numpy_reads_in_chunks(placement, chunk_rows):
    values = np.arange(30, dtype=np.float32).reshape(10, 3)
    np.testing.assert_array_equal(
        placed(values, placement).numpy(chunk_rows=chunk_rows), values
    )
    with pytest.raises(ValueError, match="`chunk_rows` must be at least 1"):
        placed(values, placement).numpy(chunk_rows=0)


@pytest.mark.covering(1)
@everywhere
def test_the_gradient_matches_one_variable(placement):
    values = np.arange(30, dtype=np.float32).reshape(10, 3)
    table, one = placed(values, placement), tf.Variable(values)
    for loss in (
        lambda t: tf.gather(t, [9, 0, 9]) ** 2,
        lambda t: t * t,
        lambda t: t[2:7] * 3.0,
        lambda t: t[3:] + tf.gather(t, [1]),
    ):
        found = []
        for target in (table, one):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(loss(target))
            found.append(tf.convert_to_tensor(tape.gradient(total, target)))
        np.testing.assert_array_equal(*found)


@pytest.mark.covering(1)
@everywhere
def test_a_function_accepts_any_table(placement):
    values = np.arange(30, dtype=np.float32).reshape(10, 3)
    table = placed(values, placement)

    @tf.function
    def step(table, ids):
        table.scatter_add(tf.IndexedSlices(tf.ones([2, 3]), ids))
        return tf.gather(table, ids)

    np.testing.assert_array_equal(
        step(table, tf.constant([9, 1])), values[[9, 1]] + 1
    )


def test_unique_reads_sum_the_gradients_of_equal_ids(values):
    table = make_table(values, [4, 6])
    with tf.GradientTape() as tape:
        rows = table.gather_rows([[9, 0], [9, 9]], unique=True)
        total = tf.reduce_sum(rows * [1.0, 2.0])
    np.testing.assert_array_equal(rows, values[[[9, 0], [9, 9]]])
    gradient = tape.gradient(total, table)
    assert sorted(gradient.indices.numpy()) == [0, 9]
    np.testing.assert_array_equal(
        tf.convert_to_tensor(gradient).numpy()[9], [3, 6]
    )


def test_tables_convert_from_and_to_tensorflows_class(values, tmp_path):
    theirs = TensorFlowsOwn([tf.Variable(values[:5]), tf.Variable(values[5:])])
    ours = ShardedVariable.from_tf(theirs)
    ours.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [7]))
    np.testing.assert_array_equal(theirs.variables[1][2], values[7] + 1)
    back = ours.to_tf().variables
    assert all(a is b for a, b in zip(back, theirs.variables))
    assert type(ours.to_tf()) is TensorFlowsOwn
    path = tf.train.Checkpoint(table=ours).write(str(tmp_path / "c"))
    tf.train.Checkpoint(table=theirs).read(path).assert_consumed()
    with pytest.raises(TypeError, match="ShardedVariable of TensorFlow"):
        ShardedVariable.from_tf(ours)
    for table in (
        placed(values, "mod"),
        make_table(values, [4, 6]),
        placed(values, "columns", 2),
    ):
        with pytest.raises(ValueError, match="requires placement 'div'"):
            table.to_tf()


def test_a_summary_shows_the_placement_of_the_rows(values):
    table = ShardedVariable.create(
        values, name="ads", devices=["CPU:0", "CPU:1"]
    )
    summary = table.summary()
    assert summary.num_bytes == 80 and summary.placement == "div"
    assert [(s.name, s.rows, s.num_bytes) for s in summary.shards] == [
        ("ads/part_0:0", 5, 40),
        ("ads/part_1:0", 5, 40),
    ]
    for words in ("ads", "div along axis 0", "ads/part_1:0", "CPU:1", "80"):
        assert words in str(summary)


def test_a_class_that_is_not_a_composite_tensor_can_use_the_mixin(values):
    class TPUShardedVariable(tlm.ShardedVariableMixin):
        @property
        def _in_graph_mode(self):
            return self.variables[0]._in_graph_mode

    table = TPUShardedVariable(
        [tf.Variable(values[:4]), tf.Variable(values[4:])], name="emb"
    )
    assert not isinstance(table, tf.__internal__.CompositeTensor)
    np.testing.assert_array_equal(tf.gather(table, [9, 0]), values[[9, 0]])
    np.testing.assert_array_equal(
        tf.nn.embedding_lookup(table, [9, 0]), values[[9, 0]]
    )
    np.testing.assert_array_equal(table * 2, values * 2)
    table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [9]))
    assert table.numpy()[9].tolist() == [19, 20]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(axis=2), ValueError, "`axis` must be at most 1"),
        (dict(placement="round"), ValueError, "`placement` must be one of"),
        (dict(placement=3), TypeError, "`placement` must be one of"),
        (dict(placement=[0, 3, 10]), ValueError, r"requires sizes \[3, 7\]"),
        (dict(placement="div"), ValueError, r"requires sizes \[5, 5\]"),
        (dict(placement="mod"), ValueError, r"requires sizes \[5, 5\]"),
    ],
)
def test_a_placement_that_does_not_fit_the_shards_raises(
    values, options, error, words
):
    with pytest.raises(error, match=words):
        ShardedVariable(
            [tf.Variable(values[:4]), tf.Variable(values[4:])],
            **{"name": "emb", **options},
        )


def test_columns_of_a_shard_are_contiguous(values):
    with pytest.raises(ValueError, match="contiguous along axis 1"):
        ShardedVariable.create(values, num_shards=2, axis=1, placement="mod")
