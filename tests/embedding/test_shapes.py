"""Tests inputs and activations with several sample dimensions."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
Invalid = tf.errors.InvalidArgumentError

ROWS = np.arange(20, dtype=np.float32).reshape(10, 2)


def embedding_of(shape=None, *, length=0, combiner="sum"):
    return tlm.TPUEmbedding(
        tpu.FeatureConfig(
            tpu.TableConfig(
                10,
                2,
                lambda shape: tf.constant(ROWS),
                tpu.SGD(1.0),
                combiner,
                "words",
            ),
            output_shape=shape,
            max_sequence_length=length,
        ),
        None,
    )


def look_up(embedding, value, weights=None):
    """Returns the engine's activations; checks that serving is equal."""
    embedding.enqueue(value, weights, training=False)
    found = embedding.dequeue()
    np.testing.assert_array_equal(embedding(value, weights), found)
    return found.numpy()


def ids_of(*shape):
    return np.random.default_rng(1).integers(0, 10, shape)


def test_dense_samples_keep_their_dimensions():
    ids = ids_of(4, 3, 1)
    np.testing.assert_array_equal(
        look_up(embedding_of(), ids), ROWS[ids[..., 0]]
    )
    ids = ids_of(2, 3, 2, 5)
    np.testing.assert_array_equal(
        look_up(embedding_of(), ids), ROWS[ids].sum(axis=-2)
    )


def test_sparse_samples_keep_their_dimensions():
    dense = ids_of(4, 3, 5)
    dense[dense < 4] = 0
    expected = ROWS[dense].sum(axis=-2) - (
        (dense == 0).sum(axis=-1, keepdims=True) * ROWS[0]
    )
    found = look_up(embedding_of(), tf.sparse.from_dense(dense))
    np.testing.assert_array_equal(found, expected)


def test_sparse_samples_have_weights_in_every_dimension():
    ids = tf.sparse.from_dense([[[1, 2], [3, 0]], [[0, 0], [4, 4]]])
    weights = ids.with_values(tf.constant([1.0, 2.0, 3.0, 4.0, 5.0]))
    found = look_up(embedding_of(), ids, weights)
    np.testing.assert_array_equal(
        found, [[ROWS[1] + 2 * ROWS[2], 3 * ROWS[3]], [[0, 0], 9 * ROWS[4]]]
    )


def test_ragged_samples_fill_the_output_shape():
    ids = tf.ragged.constant([[1], [2, 3], [], [4]])
    found = look_up(embedding_of([2, 2]), ids)
    np.testing.assert_array_equal(
        found, [[ROWS[1], ROWS[2] + ROWS[3]], [[0, 0], ROWS[4]]]
    )


def test_with_fewer_ragged_samples_each_is_a_sequence():
    ids = tf.ragged.constant([[1], [2, 3, 4], []])
    found = look_up(embedding_of([3, 2], combiner="mean"), ids)
    np.testing.assert_array_equal(
        found, [[ROWS[1], [0, 0]], [ROWS[2], ROWS[3]], [[0, 0], [0, 0]]]
    )


def test_a_1d_output_shape_sets_the_number_of_samples():
    embedding = embedding_of([2])
    assert look_up(embedding, tf.constant([1, 2])).shape == (2, 2)
    with pytest.raises(ValueError, match=r"'feature'"):
        embedding.enqueue(tf.constant([1, 2, 3]))


def test_gradients_have_the_shape_of_the_activations():
    embedding = embedding_of()
    ids = ids_of(2, 3, 1)
    embedding.enqueue(ids)
    activations = embedding.dequeue()
    with pytest.raises(ValueError, match=r"Expected shape \(None, 3, 2\)"):
        embedding.apply_gradients(tf.ones([6, 2]))
    embedding.apply_gradients(
        activations * 0
        + tf.constant(np.arange(12, dtype=np.float32).reshape(2, 3, 2))
    )
    expected = ROWS.copy()
    np.subtract.at(expected, ids.ravel(), np.arange(12).reshape(6, 2))
    [table] = embedding.embedding_tables.values()
    np.testing.assert_array_equal(table.numpy(), expected)


def test_truncated_ids_of_an_output_shape_do_not_train():
    embedding = embedding_of([2, 2])
    embedding.enqueue(tf.ragged.constant([[1, 2, 3], []], dtype=tf.int64))
    embedding.apply_gradients(tf.ones_like(embedding.dequeue()))
    [table] = embedding.embedding_tables.values()
    changed = np.any(table.numpy() != ROWS, axis=1)
    assert np.flatnonzero(changed).tolist() == [1, 2]


def test_a_missing_gradient_has_the_shape_of_the_activations(caplog):
    embedding = embedding_of()
    embedding.enqueue(ids_of(2, 3, 1))
    embedding.dequeue()
    embedding.apply_gradients(None)
    assert embedding.stats()["num_updates"] == 1


def test_build_sets_static_shapes():
    embedding = embedding_of()
    embedding.build(tf.TensorShape([2, 3, 1]))

    @tf.function(input_signature=[tf.TensorSpec([None, None, 1], tf.int64)])
    def step(ids):
        embedding.enqueue(ids, training=False)
        found = embedding.dequeue()
        assert found.shape == [2, 3, 2]
        return found

    ids = tf.constant(ids_of(2, 3, 1), tf.int64)
    np.testing.assert_array_equal(step(ids), ROWS[ids.numpy()[..., 0]])
    with pytest.raises(Invalid, match="must have 6 samples"):
        step(tf.constant(ids_of(2, 2, 1), tf.int64))


def test_the_first_dimension_can_change():
    embedding = embedding_of()
    for size in (2, 5, 0):
        assert look_up(embedding, ids_of(size, 3, 1)).shape == (size, 3, 2)


def test_other_inner_sizes_raise():
    embedding = embedding_of()
    embedding.enqueue(ids_of(2, 3, 1), training=False)
    for other in (ids_of(2, 4, 1), ids_of(6), ids_of(2, 3, 2, 1)):
        with pytest.raises(ValueError, match="must have samples of shape"):
            embedding.enqueue(other)


def test_unknown_inner_sizes_raise():
    embedding = embedding_of()

    @tf.function(input_signature=[tf.TensorSpec([None, None, 1], tf.int64)])
    def step(ids):
        embedding.enqueue(ids)

    with pytest.raises(ValueError, match="`output_shape`"):
        step(tf.constant(ids_of(2, 3, 1)))


@pytest.mark.parametrize(
    ("shape", "value", "words"),
    [
        (
            [4, 2],
            tf.ragged.constant([[1], [2], [3]]),
            "divides the 8 positions",
        ),
        ([None, 2], tf.ragged.constant([[1], [2]]), "static sizes"),
    ],
)
def test_ragged_inputs_that_do_not_match_the_shape_raise(shape, value, words):
    with pytest.raises(ValueError, match=words):
        embedding_of(shape).enqueue(value)


def test_weights_of_an_output_shape_sequence_raise():
    ids = tf.ragged.constant([[1], [2, 3]])
    with pytest.raises(ValueError, match="no combiner would use it"):
        embedding_of([2, 2]).enqueue(ids, ids.with_values(tf.ones([3])))


# The following tests pass shapes to `build`.

SEQUENCES = [[1, 2, 3], [], [4], [5, 6]]
TRUNCATED = np.zeros([4, 2, 2], np.float32)
TRUNCATED[0], TRUNCATED[2, 0], TRUNCATED[3] = (
    ROWS[[1, 2]],
    ROWS[4],
    ROWS[[5, 6]],
)


@pytest.mark.parametrize(
    "wrap",
    [tf.ragged.constant, lambda ids: tf.ragged.constant(ids).to_sparse()],
    ids=["ragged", "sparse"],
)
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_sequences_fill_the_built_shape(wrap, combiner):
    embedding = embedding_of(length=2, combiner=combiner)
    embedding.build([tf.TensorShape([4, 2, None])])
    np.testing.assert_array_equal(
        look_up(embedding, wrap(SEQUENCES)), TRUNCATED
    )
    # Training is the same if `build` was not called.
    tables = []
    for one in (embedding, embedding_of(length=2, combiner=combiner)):
        one.enqueue(wrap(SEQUENCES))
        one.apply_gradients(2 * one.dequeue() + 1)
        tables.append(next(iter(one.embedding_tables.values())).numpy())
    np.testing.assert_array_equal(*tables)
    assert not np.array_equal(tables[0], ROWS)


def test_dense_sequences_fill_the_built_shape():
    embedding = embedding_of(length=2)
    embedding.build([tf.TensorShape([3, 2, 4])])
    ids = ids_of(3, 3)
    np.testing.assert_array_equal(look_up(embedding, ids), ROWS[ids[:, :2]])
    ids = ids_of(3, 1)
    np.testing.assert_array_equal(
        look_up(embedding, ids)[:, 0], ROWS[ids[:, 0]]
    )


def test_3d_ids_of_a_sequence_feature_are_combined():
    ids = ids_of(2, 3, 2)
    for is_built in (True, False):
        embedding = embedding_of(length=3)
        if is_built:
            embedding.build([tf.TensorShape([2, 3, 2])])
        np.testing.assert_array_equal(
            look_up(embedding, ids), ROWS[ids].sum(axis=2)
        )
        np.testing.assert_array_equal(
            look_up(
                embedding,
                tf.sparse.from_dense(ids + 1).with_values(
                    tf.constant(ids.ravel())
                ),
            ),
            ROWS[ids].sum(axis=2),
        )


def test_another_sequence_length_than_built_raises():
    embedding = embedding_of(length=2)
    embedding.build([tf.TensorShape([4, 3, None])])
    with pytest.raises(ValueError, match=r"shape \['\?', 3\]"):
        embedding.enqueue(tf.ragged.constant(SEQUENCES))


def test_3d_ids_after_a_2d_sequence_raise():
    embedding = embedding_of(length=2)
    embedding.enqueue(tf.ragged.constant(SEQUENCES), training=False)
    with pytest.raises(ValueError, match="must be of rank 2|of shape"):
        embedding.enqueue(ids_of(4, 2, 1))
    assert embedding.dequeue().shape == [4, 2, 2]


@pytest.mark.parametrize("places", [[0, -1], [4, 0], [0, 0]])
def test_sparse_positions_outside_their_sample_raise(places):
    embedding = embedding_of(length=2)
    embedding.build([tf.TensorShape([4, 2, None])])
    bad = tf.SparseTensor([[0, 0], places], [1, 2], [4, 2])
    with pytest.raises(Invalid, match="inside its shape, and ascend"):
        embedding.enqueue(bad)


@pytest.mark.parametrize("shape", [[2, 2, None], [4, 2, None]])
def test_ragged_samples_fill_the_built_shape(shape):
    embedding = embedding_of()
    embedding.build([tf.TensorShape(shape)])
    found = look_up_only(embedding, tf.ragged.constant(SEQUENCES))
    expected = np.zeros([*shape[:2], 2], np.float32)
    if shape[0] == 2:  # In this case, there are as many samples as positions.
        expected[:] = np.reshape(
            [ROWS[ids].sum(axis=0) for ids in ([1, 2, 3], [], [4], [5, 6])],
            [2, 2, 2],
        )
    else:
        expected[:] = TRUNCATED
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="divides the"):
        embedding.enqueue(tf.ragged.constant([[1], [2], [3]]))


def look_up_only(embedding, value):
    embedding.enqueue(value, training=False)
    return embedding.dequeue().numpy()


@pytest.mark.parametrize("shape", [[1, 1, 1], [3, 4, 1], [3], [2, 4, 2, 1]])
def test_build_with_shapes_of_another_feature_raises(shape):
    embedding = embedding_of([2, 4])
    with pytest.raises(ValueError, match="Inconsistent shape found"):
        embedding.build([tf.TensorShape(shape)])
    # After the failed call, `build` can be called again.
    embedding.build([tf.TensorShape([2, None, None])])
    assert look_up(embedding, ids_of(2, 4, 1)).shape == (2, 4, 2)


def test_build_sets_the_open_sizes_of_the_feature():
    embedding = embedding_of([None, 2])
    embedding.build([tf.TensorShape([3, 2, 1])])
    with pytest.raises(ValueError, match="must have 6 samples"):
        embedding.enqueue(ids_of(2, 2, 1))
    assert look_up_only(embedding, tf.ragged.constant([[1]] * 6)).shape == (
        3,
        2,
        2,
    )


def test_ragged_serving_uses_a_1d_output_shape():
    table = tpu.TableConfig(10, 2, combiner="sum", name="words")
    serve = lambda ids, shape: tlm.serving.serving_embedding_lookup(  # noqa: E731
        ids,
        None,
        {table: tf.constant(ROWS)},
        tpu.FeatureConfig(table, output_shape=shape),
    )
    ids = tf.ragged.constant([[1], [2, 3], [], [4]])
    for shape in ([3], [2]):
        with pytest.raises(ValueError, match="divides the"):
            serve(ids, shape)
    assert serve(ids, [4]).shape == [4, 2]
    # If the input has fewer samples than the shape, each sample is treated as a
    # sequence, as in TensorFlow.
    stock = tpu.serving_embedding_lookup(
        ids,
        None,
        {table: tf.Variable(ROWS)},
        tpu.FeatureConfig(table, output_shape=[8]),
    )
    np.testing.assert_array_equal(serve(ids, [8]), stock)

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int32)])
    def serve_any_size(ids):
        return serve(ids, [4])

    assert serve_any_size(ids).shape == [4, 2]
    with pytest.raises(Invalid):
        serve_any_size(ids[:3])


def test_features_can_have_different_types_and_batch_sizes():
    table = tpu.TableConfig(
        10, 2, lambda shape: tf.constant(ROWS), combiner="sum", name="words"
    )
    embedding = tlm.TPUEmbedding(
        {name: tpu.FeatureConfig(table) for name in "abc"}, tpu.SGD(1.0)
    )
    inputs = {
        "a": tf.ragged.constant([[1, 2], [3]]),
        "b": tf.sparse.from_dense([[4, 5], [6, 0], [7, 0]]),
        "c": ids_of(2, 2, 1),
    }
    embedding.enqueue(inputs)
    found = embedding.dequeue()
    assert [found[name].shape for name in "abc"] == [[2, 2], [3, 2], [2, 2, 2]]
    embedding.apply_gradients(found)


# The following test compares with TensorFlow's class, for inputs that the class
# supports.


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        ([2, 2], tf.ragged.constant([[1], [2, 3], [], [4]])),
        ([3, 2], tf.ragged.constant([[1], [2, 3, 4], []])),
        (None, tf.sparse.from_dense([[[1, 2], [3, 0]], [[0, 0], [4, 4]]])),
    ],
)
def test_lookups_equal_tensorflow_s_serving(shape, value):
    embedding = embedding_of(shape)
    [(config, rows)] = embedding.embedding_tables.items()
    feature = tpu.FeatureConfig(config, output_shape=shape)
    stock = tpu.serving_embedding_lookup(value, None, {config: rows}, feature)
    np.testing.assert_array_equal(look_up(embedding, value), stock)
