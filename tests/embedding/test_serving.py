"""Tests tf_layoutmap.embedding.serving: lookups with TensorFlow's own ops."""

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import dense_reference
from tf_layoutmap.embedding import serving
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.sharded import ShardedVariable

tpu = tf.tpu.experimental.embedding

ROWS = np.arange(20, dtype=np.float32).reshape(10, 2)
BAGS = [[1, 2, 1], [], [9]]
WEIGHTS = [[2.0, 3.0, 1.0], [], [4.0]]


def sharded(rows, sizes):
    return ShardedVariable(
        [tf.Variable(part) for part in np.split(rows, np.cumsum(sizes)[:-1])],
        name="words",
    )


def lookup(value, weights=None, *, combiner="sum", length=0, rows=None):
    table = tpu.TableConfig(10, 2, combiner=combiner, name="words")
    feature = tpu.FeatureConfig(table, max_sequence_length=length)
    rows = tf.Variable(ROWS) if rows is None else rows
    return serving.serving_embedding_lookup(
        {"x": value},
        None if weights is None else {"x": weights},
        {table: rows},
        {"x": feature},
    )["x"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [None, [4, 3, 3], [0, 9, 1]])
@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_lookups_equal_the_dense_reference(combiner, weighted, form, sizes):
    ids = tf.ragged.constant(BAGS, dtype=tf.int32)
    weights = tf.ragged.constant(WEIGHTS)
    if form == "sparse":
        ids, weights = ids.to_sparse(), weights.to_sparse()
    found = lookup(
        ids,
        weights if weighted else None,
        combiner=combiner,
        rows=None if sizes is None else sharded(ROWS, sizes),
    )
    bag = dense_reference.Bag(BAGS, WEIGHTS if weighted else None)
    expected = dense_reference.gain_matrix(bag, 10, combiner) @ ROWS
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.shape == [3, 2]


def test_ids_of_a_dense_input_are_combined_along_the_last_dimension():
    assert lookup(tf.constant([1, 2])).numpy().tolist() == [[2, 3], [4, 5]]
    assert lookup(tf.constant([[1], [2]])).numpy().tolist() == [[2, 3], [4, 5]]
    assert lookup(tf.constant([[1, 2], [0, 0]])).numpy().tolist() == [
        [6, 8],
        [0, 2],
    ]
    assert lookup(tf.zeros([2, 0], tf.int32)).numpy().tolist() == [
        [0, 0],
        [0, 0],
    ]


def test_weights_with_sum_zero_give_zeros():
    ids = tf.ragged.constant([[1, 2]])
    weights = tf.ragged.constant([[1.0, -1.0]])
    assert lookup(ids, weights, combiner="mean").numpy().tolist() == [[0, 0]]


@pytest.mark.parametrize("sizes", [None, [4, 3, 3]])
@pytest.mark.parametrize("form", ["ragged", "sparse"])
def test_sequences_are_truncated_and_zero_padded(form, sizes):
    ids = tf.ragged.constant(BAGS, dtype=tf.int64)
    if form == "sparse":
        ids = ids.to_sparse()
    found = lookup(
        ids, length=2, rows=None if sizes is None else sharded(ROWS, sizes)
    )
    matrix = dense_reference.sequence_matrix(dense_reference.Bag(BAGS), 10, 2)
    assert found.numpy().tolist() == (matrix @ ROWS).tolist()
    assert found.shape == [3, 2, 2]


def test_sparse_sequences_keep_their_gaps():
    ids = tf.SparseTensor([[0, 1], [2, 0], [2, 7]], [1, 2, 9], [3, 8])
    assert lookup(ids, length=2).numpy().tolist() == [
        [[0, 0], [2, 3]],
        [[0, 0], [0, 0]],
        [[4, 5], [0, 0]],
    ]


@pytest.mark.parametrize(
    "indices", [[[0, 1], [0, 1]], [[0, 1], [0, 0]], [[0, -1], [0, 0]]]
)
def test_descending_sparse_sequence_positions_raise(indices):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="'x': the positions of a sequence"
    ):
        lookup(tf.SparseTensor(indices, [1, 2], [1, 2]), length=2)


def test_dense_sequences_keep_their_positions():
    found = lookup(tf.constant([[1, 2, 3], [3, 4, 5]]), length=2)
    assert found.numpy().tolist() == [[[2, 3], [4, 5]], [[6, 7], [8, 9]]]


@pytest.mark.parametrize("sizes", [None, [4, 3, 3]])
def test_inputs_without_ids_give_zeros(sizes):
    rows = None if sizes is None else sharded(ROWS, sizes)
    empty = tf.ragged.constant([[], []], dtype=tf.int64)
    assert lookup(empty, rows=rows).numpy().tolist() == [[0, 0], [0, 0]]
    none = tf.zeros([0], tf.int32)
    assert lookup(none, rows=rows).shape == [0, 2]


@pytest.mark.parametrize("sizes", [None, [4, 3, 3]])
@pytest.mark.parametrize("bad", [-1, 10])
def test_out_of_range_ids_raise_with_names(bad, sizes):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"Feature 'x'.*\[0, 10\).*'words'"
    ):
        lookup(
            tf.constant([0, bad]),
            rows=None if sizes is None else sharded(ROWS, sizes),
        )


def test_unsorted_sparse_input_raises():
    ids = tf.SparseTensor([[1, 0], [0, 0]], [1, 2], [2, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="row-major"):
        lookup(ids)


def test_a_subset_of_the_features_can_be_looked_up():
    table = tpu.TableConfig(10, 2, name="words")
    config = {"a": tpu.FeatureConfig(table), "b": tpu.FeatureConfig(table)}
    found = serving.serving_embedding_lookup(
        {"b": tf.constant([1])}, None, {table: tf.Variable(ROWS)}, config
    )
    assert found["b"].numpy().tolist() == [[2, 3]]


def test_inputs_outside_the_config_raise():
    table = tpu.TableConfig(10, 2, name="words")
    with pytest.raises(ValueError, match=r"\['a'\]. Received: 'z'"):
        serving.serving_embedding_lookup(
            {"z": tf.constant([1])},
            None,
            {table: tf.Variable(ROWS)},
            {"a": tpu.FeatureConfig(table)},
        )


def test_missing_and_misshapen_tables_raise():
    table = tpu.TableConfig(10, 2, name="words")
    config = tpu.FeatureConfig(table)
    with pytest.raises(ValueError, match="Missing: 'words'"):
        serving.serving_embedding_lookup(tf.constant([1]), None, {}, config)
    with pytest.raises(ValueError, match=r"'words' must be .*\[10, 2\]"):
        serving.serving_embedding_lookup(
            tf.constant([1]), None, {table: tf.zeros([9, 2])}, config
        )


def test_a_served_config_can_have_any_optimizer():
    table = tpu.TableConfig(10, 2, optimizer=tpu.Adam(0.1), name="words")
    found = serving.serving_embedding_lookup(
        tf.constant([1]),
        None,
        {table: tf.Variable(ROWS)},
        tpu.FeatureConfig(table),
    )
    assert found.numpy().tolist() == [[2, 3]]


def test_unknown_batch_sizes_are_supported():
    @tf.function(input_signature=[tf.SparseTensorSpec([None, None], tf.int64)])
    def serve(ids):
        found = lookup(ids, rows=tf.constant(ROWS))
        assert found.shape.as_list() == [None, 2]
        return found

    ids = tf.ragged.constant(BAGS, dtype=tf.int64).to_sparse()
    assert serve(ids).numpy().tolist() == [[8, 11], [0, 0], [18, 19]]


def test_gradients_reach_the_table():
    table = tf.Variable(ROWS)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup(tf.ragged.constant(BAGS), rows=table))
    gradient = tf.convert_to_tensor(tape.gradient(loss, table)).numpy()
    assert gradient[:, 0].tolist() == [0, 2, 1, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e25, 1.1e38])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_divisors_outside_of_float32_equal_the_engine(combiner, factor):
    table = tpu.TableConfig(10, 2, tf.ones, combiner=combiner, name="words")
    features = {"x": tpu.FeatureConfig(table)}
    ids = tf.ragged.constant(BAGS, dtype=tf.int64)
    weights = ids.with_values(
        tf.constant(sum(WEIGHTS, []), tf.float32) * np.float32(factor / 4)
    )
    embedding = TPUEmbedding(features, None)
    embedding.enqueue({"x": ids}, {"x": weights}, training=False)
    expected = embedding.dequeue()["x"].numpy()
    found = lookup(
        ids, weights, combiner=combiner, rows=embedding.embedding_tables[table]
    )
    np.testing.assert_array_equal(found, expected)
    assert found[0, 0] > 0.5


def test_weights_of_zero_have_a_finite_gradient():
    ids = tf.ragged.constant(BAGS, dtype=tf.int64)
    weights = tf.Variable(tf.zeros([4]))
    for combiner in ("mean", "sqrtn"):
        with tf.GradientTape() as tape:
            found = lookup(
                ids, ids.with_values(weights * 1.0), combiner=combiner
            )
        assert not tape.gradient(found, weights).numpy().any()
