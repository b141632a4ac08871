"""Tests tf_layoutmap.embedding.inputs: input types of the engine."""

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.configs import config

BAG = config.FeatureSpec("ads/clicks", 0, 0)
SEQUENCE = config.FeatureSpec("ads/history", 0, 2)


def sparse(indices, values, shape=(2, 3)):
    return tf.SparseTensor(
        np.reshape(np.array(indices, np.int64), [-1, 2]), values, shape
    )


def test_dense_vector_has_one_id_per_sample():
    found = inputs.read_feature(BAG, tf.constant([4, 5]), None)
    assert found.ids.numpy().tolist() == [4, 5]
    assert found.splits.shape == [0]
    assert found.num_samples == 2
    assert found.weights.shape == [0]


def test_dense_matrix_has_a_row_of_ids_per_sample():
    found = inputs.read_feature(BAG, np.array([[4, 5], [6, 7]]), None)
    assert found.ids.numpy().tolist() == [4, 5, 6, 7]
    assert found.num_samples == 2


def test_sparse_keeps_its_indices_and_its_first_dimension():
    found = inputs.read_feature(
        BAG, sparse([[0, 0], [0, 2]], [4, 5], (3, 3)), None
    )
    assert found.ids.numpy().tolist() == [4, 5]
    assert found.splits.numpy().tolist() == [[0, 0], [0, 2]]
    assert int(found.num_samples) == 3


def test_ragged_keeps_its_row_splits_as_int64():
    ids = tf.ragged.constant([[4, 5], []], row_splits_dtype=tf.int32)
    found = inputs.read_feature(BAG, ids, None)
    assert found.splits.dtype == tf.int64
    assert found.splits.numpy().tolist() == [0, 2, 2]
    assert found.num_samples == 2


def test_weights_become_float32():
    ids = tf.ragged.constant([[4, 5], []], dtype=tf.int64)
    weights = tf.ragged.constant([[1, 2], []], dtype=tf.float64)
    found = inputs.read_feature(BAG, ids, weights)
    assert found.weights.dtype == tf.float32
    assert found.weights.numpy().tolist() == [1, 2]


def test_number_of_samples_is_a_tensor_while_tracing():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def count(ids):
        found = inputs.read_feature(BAG, ids, None)
        assert found.static_num_samples is None
        return found.num_samples

    assert int(count(tf.constant([1, 2, 3], tf.int64))) == 3


def test_ids_of_all_features_have_one_dtype():
    def ids_of(*dtypes):
        features = [
            inputs.read_feature(BAG, tf.constant([1], dtype), None)
            for dtype in dtypes
        ]
        inputs.unify_id_types(features)
        return [one.ids.dtype for one in features]

    assert ids_of(tf.int32, tf.int32) == [tf.int32, tf.int32]
    assert ids_of(tf.int32, tf.int64) == [tf.int64, tf.int64]
    assert ids_of(tf.uint8, tf.int32) == [tf.int64, tf.int64]


@pytest.mark.parametrize("dtype", [tf.float32, tf.uint64, tf.bool])
def test_ids_not_representable_in_int64_raise(dtype):
    with pytest.raises(TypeError, match=rf"'ads/clicks'.*{dtype.name}"):
        inputs.read_feature(BAG, tf.zeros([2], dtype), None)


@pytest.mark.parametrize("value", ["4", 4, None, [4]])
def test_unknown_input_types_raise_with_the_path(value):
    with pytest.raises(ValueError, match="'ads/clicks' is of unknown type"):
        inputs.read_feature(BAG, value, None)


def test_scalar_input_raises():
    with pytest.raises(ValueError, match="'ads/clicks' must"):
        inputs.read_feature(BAG, tf.zeros([], tf.int32), None)


def test_sparse_and_ragged_input_of_wrong_rank_raises():
    with pytest.raises(ValueError, match=r"Sparse input 'ads/clicks'.*rank 2"):
        inputs.read_feature(BAG, tf.SparseTensor([[0]], [1], [2]), None)
    with pytest.raises(ValueError, match=r"Ragged input 'ads/clicks'.*rank 2"):
        inputs.read_feature(BAG, tf.ragged.constant([[[1], []]]), None)


def test_weight_for_dense_input_raises():
    with pytest.raises(ValueError, match="Weight specified for dense input"):
        inputs.read_feature(BAG, tf.constant([1]), tf.constant([1.0]))


def test_weight_of_another_type_than_the_ids_raises():
    ragged = tf.ragged.constant([[1], []])
    with pytest.raises(ValueError, match=r"not match type input.*RaggedTensor"):
        inputs.read_feature(BAG, ragged, sparse([[0, 0]], [1.0]))
    with pytest.raises(ValueError, match=r"not match type input.*SparseTensor"):
        inputs.read_feature(BAG, sparse([[0, 0]], [1]), ragged)


def test_weight_for_a_sequence_feature_raises():
    ids = tf.ragged.constant([[1], []])
    with pytest.raises(ValueError, match="sequence feature 'ads/history'"):
        inputs.read_feature(SEQUENCE, ids, tf.cast(ids, tf.float32))


def test_weights_at_other_positions_than_the_ids_raise():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="the same indices as"
    ):
        inputs.read_feature(
            BAG,
            sparse([[0, 0], [1, 0]], [1, 2]),
            sparse([[0, 0], [0, 1]], [1.0, 2.0]),
        )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="the same row_splits"
    ):
        inputs.read_feature(
            BAG,
            tf.ragged.constant([[1], [2, 3]]),
            tf.ragged.constant([[1.0, 2.0], [3.0]]),
        )


def test_another_number_of_weights_than_ids_raises():
    with pytest.raises(
        ValueError, match=r"one weight for each id.*\(2,\).*\(1,\)"
    ):
        inputs.read_feature(
            BAG, sparse([[0, 0], [0, 1]], [1, 2]), sparse([[0, 0]], [1.0])
        )


def test_non_numeric_weights_raise():
    with pytest.raises(TypeError, match="must be numbers"):
        inputs.read_feature(BAG, sparse([[0, 0]], [1]), sparse([[0, 0]], ["a"]))


def test_weights_are_checked_in_a_function():
    @tf.function
    def places(ids, weights):
        return inputs.read_feature(BAG, ids, weights).splits

    ids = tf.ragged.constant([[1], [2, 3]])
    places(ids, tf.ragged.constant([[1.0], [2.0, 3.0]]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="ads/clicks"):
        places(ids, tf.ragged.constant([[1.0, 2.0], [3.0]]))


@pytest.mark.parametrize(
    ("ids", "advice"),
    [
        (["a"], r"Received: string. With `vocabularies=\{table: tlm.voc"),
        (
            [1.0],
            r"Received: float32. Convert integral values with tf.cast\(ids",
        ),
    ],
)
def test_ids_of_wrong_dtype_raise_with_a_remedy(ids, advice):
    with pytest.raises(TypeError, match=advice):
        inputs.read_feature(BAG, tf.constant(ids), None)


def test_the_inputs_of_an_op_need_few_ops_per_feature():
    @tf.function(
        input_signature=[
            [
                tf.TensorSpec([None], tf.int64),
                tf.RaggedTensorSpec([None, None], tf.int32),
                tf.TensorSpec([None, 2], tf.int64),
                tf.TensorSpec([None], tf.int64),
            ]
        ]
    )
    def combined(values):
        read = [
            inputs.read_feature(config.FeatureSpec("words", 0, 0), value, None)
            for value in values
        ]
        return inputs.combine(read)

    ragged = tf.ragged.constant([[5], [], [6, 7]], dtype=tf.int32)
    three, two = tf.range(3, dtype=tf.int64), tf.range(2, dtype=tf.int64)
    result = combined([three, ragged, tf.ones([3, 2], tf.int64), two])
    assert result["num_samples"].numpy().tolist() == [3, 3, 3, 2]
    assert [one.shape[0] for one in result["splits"]] == [0, 4, 0, 0]
    assert [one.numpy().tolist() for one in result["ids"]] == [
        [0, 1, 2],
        [5, 6, 7],
        [1] * 6,
        [0, 1],
    ]
    graph = combined.get_concrete_function().graph
    (sizes,) = (op for op in graph.get_operations() if op.type == "ShapeN")
    assert len(sizes.inputs) == 4
    weights = [one.op.inputs[0] for one in graph.outputs[-4:]]
    assert len({one.name for one in weights}) == 1


def test_a_checked_number_of_samples_is_used():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def combined(value):
        feature = config.FeatureSpec("words", 0, 0)
        read = [inputs.read_feature(feature, value, None) for _ in range(2)]
        read[0].num_samples = tf.constant(9, tf.int64)
        return inputs.combine(read)["num_samples"]

    assert combined(tf.range(3, dtype=tf.int64)).numpy().tolist() == [9, 3]


def test_features_of_both_id_types_are_combined():
    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.int32),
            tf.RaggedTensorSpec([None, None], tf.int64),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def combined(*values):
        feature = config.FeatureSpec("words", 0, 0)
        return inputs.combine(
            [inputs.read_feature(feature, value, None) for value in values]
        )["num_samples"]

    ragged = tf.ragged.constant([[5], []], dtype=tf.int64)
    sizes = combined(tf.range(3), ragged, tf.range(4, dtype=tf.int64))
    assert sizes.numpy().tolist() == [3, 2, 4]
