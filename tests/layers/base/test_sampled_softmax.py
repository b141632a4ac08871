"""Sampled softmax over open vocabularies, compared with the full softmax."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given
from hypothesis import strategies as st

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

NUM_KEYS, DIM = 30, 4


def full_losses(inputs, vectors, labels):
    """Returns the full softmax losses; `labels` are indices of vectors."""
    logits = np.asarray(inputs, np.float64) @ np.asarray(vectors, np.float64).T
    return (
        np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    )


def full_gradients(inputs, vectors, labels):
    """Returns the gradients of the sum of the full softmax losses."""
    inputs, vectors = np.asarray(inputs), np.asarray(vectors)
    scores = np.exp(inputs @ vectors.T)
    shares = scores / scores.sum(1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    return shares @ vectors, shares.T @ inputs


def sampled_of(keys, expected_counts):
    return tlm.ops.SampledKeys(
        tf.constant(keys, tf.int64),
        tf.constant(keys, tf.int64),
        tf.constant(expected_counts, tf.float32),
    )


def make_layer(layers=tlm.layers, keys=NUM_KEYS, **options):
    """Returns a layer with random rows, and the keys and rows by name."""
    layer = layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(100),
        DIM,
        **{"optimizer": tpu.SGD(1.0), "name": "items", **options},
    )
    layer(np.array([["x"]]))
    draw = np.random.default_rng(0)
    names = [f"item {n}" for n in range(keys)]
    rows = draw.normal(size=[keys, DIM]).astype(np.float32)
    layer.vocabulary.write(names, rows, counts=draw.integers(1, 20, keys))
    return layer, names, rows


@given(data=st.data())
def test_all_keys_as_samples_give_the_full_softmax(data):
    num_keys = data.draw(st.integers(1, 20))
    batch_size = data.draw(st.integers(0, 5))
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    vectors = draw.normal(size=[num_keys, DIM]).astype(np.float32)
    inputs = draw.normal(size=[batch_size, DIM]).astype(np.float32)
    labels = draw.integers(0, num_keys, batch_size)
    found = tlm.ops.sampled_softmax_from_vectors(
        labels,
        inputs,
        vectors[labels],
        vectors,
        sampled_of(np.arange(num_keys), np.ones(num_keys)),
    )
    np.testing.assert_allclose(
        found, full_losses(inputs, vectors, labels), rtol=1e-5, atol=1e-5
    )


def test_gradients_of_all_keys_are_those_of_the_full_softmax():
    draw = np.random.default_rng(0)
    vectors = tf.constant(draw.normal(size=[9, DIM]))
    inputs = tf.constant(draw.normal(size=[5, DIM]))
    labels = np.array([3, 0, 8, 3, 1])
    with tf.GradientTape() as tape:
        tape.watch([vectors, inputs])
        loss = tlm.ops.sampled_softmax_from_vectors(
            labels,
            inputs,
            tf.gather(vectors, labels),
            vectors,
            sampled_of(np.arange(9), np.ones(9)),
        )
    of_inputs, of_vectors = tape.gradient(loss, [inputs, vectors])
    expected_inputs, expected_vectors = full_gradients(inputs, vectors, labels)
    np.testing.assert_allclose(of_inputs, expected_inputs, atol=1e-7)
    np.testing.assert_allclose(
        tf.convert_to_tensor(of_vectors), expected_vectors, atol=1e-7
    )


def test_the_denominator_is_unbiased_for_any_probabilities():
    # The expectation over one sample is a sum over all keys.
    draw = np.random.default_rng(1)
    vectors = draw.normal(size=[9, DIM])
    inputs = draw.normal(size=[5, DIM])
    labels = np.array([3, 0, 8, 3, 1])
    logits = inputs @ vectors.T
    label_logits = logits[np.arange(5), labels]
    for probabilities in (np.ones(9) / 9, draw.dirichlet(np.ones(9))):
        expectation = 0
        for key, probability in enumerate(probabilities):
            losses = tlm.ops.sampled_softmax_from_vectors(
                labels,
                inputs,
                vectors[labels],
                vectors[[key]],
                sampled_of([key], [probability]),
            )
            denominators = np.exp(losses.numpy() + label_logits)
            expectation = expectation + probability * denominators
        np.testing.assert_allclose(
            expectation, np.exp(logits).sum(1), rtol=1e-5
        )


@pytest.mark.parametrize("by", ["count", "uniform"])
def test_many_samples_converge_to_the_full_softmax(by):
    layer, names, rows = make_layer()
    labels = np.array([3, 0, 29, 3])
    queries = np.random.default_rng(2).normal(size=[4, DIM])
    inputs = tf.constant(queries, tf.float32)
    exact_inputs, exact_rows = full_gradients(queries, rows, labels)
    expected = full_losses(queries, rows, labels)
    # The error decreases with the root of the number of samples.
    for num_sampled, tolerance in ((2_000, 0.2), (200_000, 0.02)):
        sampled = tlm.ops.sample_keys(
            layer.vocabulary, num_sampled, distribution=by, seed=[3, 4]
        )
        table = tf.constant(rows)
        index_of = {
            int(key): n for n, key in enumerate(layer.vocabulary.lookup(names))
        }
        index = [index_of[row] for row in sampled.rows.numpy().tolist()]
        with tf.GradientTape() as tape:
            tape.watch([inputs, table])
            loss = tlm.ops.sampled_softmax_from_vectors(
                [names[n] for n in labels],
                inputs,
                tf.gather(table, labels),
                tf.gather(table, index),
                sampled,
            )
        np.testing.assert_allclose(loss, expected, atol=tolerance)
        of_inputs, of_rows = tape.gradient(loss, [inputs, table])
        np.testing.assert_allclose(of_inputs, exact_inputs, atol=tolerance)
        np.testing.assert_allclose(
            tf.convert_to_tensor(of_rows), exact_rows, atol=tolerance
        )


def test_samples_without_the_correction_are_biased():
    # This test shows that the previous test can fail.
    layer, names, rows = make_layer()
    sampled = tlm.ops.sample_keys(layer.vocabulary, 100_000, seed=[3, 4])
    index_of = {
        int(key): n for n, key in enumerate(layer.vocabulary.lookup(names))
    }
    index = [index_of[row] for row in sampled.rows.numpy().tolist()]
    queries = np.random.default_rng(2).normal(size=[4, DIM])
    labels = [3, 0, 29, 3]
    uncorrected = sampled._replace(
        expected_counts=tf.fill([100_000], 100_000 / NUM_KEYS)
    )
    loss = tlm.ops.sampled_softmax_from_vectors(
        [names[n] for n in labels],
        tf.constant(queries, tf.float32),
        rows[labels],
        rows[index],
        uncorrected,
    )
    difference = loss - full_losses(queries, rows, labels)
    assert np.abs(difference).max() > 0.1


@pytest.mark.parametrize(
    "layers", [tlm.layers, tlm.layers.tf_keras], ids=["keras", "tf_keras"]
)
def test_the_loss_of_a_layer_trains_its_rows(layers):
    layer, names, rows = make_layer(layers)
    labels = np.array([3, 0, 29, 3])
    queries = np.random.default_rng(2).normal(size=[4, DIM])
    inputs = tf.constant(queries, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        losses = tlm.ops.sampled_softmax_loss(
            layer,
            [names[n] for n in labels],
            inputs,
            100_000,
            seed=[5, 6],
        )
        loss = tf.reduce_sum(losses)
    np.testing.assert_allclose(
        losses, full_losses(queries, rows, labels), atol=0.02
    )
    weights = layer.trainable_variables
    of_inputs, *gradients = tape.gradient(loss, [inputs, *weights])
    optimizers = (
        keras.optimizers if layers is tlm.layers else (tf_keras.optimizers)
    )
    optimizers.SGD(1.0).apply_gradients(zip(gradients, weights))
    exact_inputs, exact_rows = full_gradients(queries, rows, labels)
    np.testing.assert_allclose(of_inputs, exact_inputs, atol=0.02)
    # The optimizer SGD(1.0) subtracts the gradient. The rarest keys are sampled
    # about 330 times, so the relative error of their gradients is about 5 %.
    after = layer(tf.constant(names)[:, tf.newaxis])[:, 0]
    np.testing.assert_allclose(after, rows - exact_rows, atol=0.06)


def test_a_tower_maps_rows_to_vectors():
    layer, names, rows = make_layer()
    tower = keras.layers.Dense(3)
    tower.build([None, DIM])
    queries = np.random.default_rng(2).normal(size=[2, 3])
    found = tlm.ops.sampled_softmax_loss(
        layer,
        names[:2],
        queries.astype(np.float32),
        100_000,
        transform_fn=tower,
    )
    np.testing.assert_allclose(
        found, full_losses(queries, tower(rows), [0, 1]), atol=0.05
    )


def test_fit_trains_a_model_from_an_empty_vocabulary():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.users = tlm.layers.ShardedEmbedding(
                tlm.vocabulary.OpenVocabulary(100),
                DIM,
                optimizer=tpu.Adagrad(0.3),
            )
            self.items = tlm.layers.ShardedEmbedding(
                tlm.vocabulary.OpenVocabulary(100),
                DIM,
                optimizer=tpu.Adagrad(0.3),
            )

        def call(self, ids):
            return self.users(ids)

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            return tf.reduce_mean(
                tlm.ops.sampled_softmax_loss(self.items, y, y_pred, 20, seed=1)
            )

    draw = np.random.default_rng(0)
    numbers = draw.integers(0, 10, 320)
    users = tf.constant([f"user {n}" for n in numbers])
    items = tf.constant([f"item {n}" for n in numbers])
    model = Model()
    model.users.build([None])
    model.items.build([None])
    model.compile("sgd", run_eagerly=False)
    data = tf.data.Dataset.from_tensor_slices((users, items)).batch(32)

    def step_losses(count):
        return [float(model.train_on_batch(x, y)) for x, y in data.take(count)]

    first = step_losses(10)
    for _ in range(15):
        last = step_losses(10)
    assert model.items.vocabulary.stats()["num_keys"] == 10
    assert np.mean(last) < 0.5 * np.mean(first[1:])
    scores = model.users(users) @ tf.transpose(model.items(items))
    best = tf.gather(items, tf.argmax(scores, axis=1))
    assert np.mean(best.numpy() == items.numpy()) > 0.9


def test_labels_that_are_not_admitted_have_no_loss():
    layer = tlm.layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(100, admission="count", min_count=9),
        DIM,
        optimizer="adagrad",
    )
    layer(np.array([[0]]))
    layer.vocabulary.write([1, 2], np.ones([2, DIM]))
    with tf.GradientTape():
        losses = tlm.ops.sampled_softmax_loss(
            layer, [1, 77], tf.ones([2, DIM]), 10
        )
    assert losses[0] > 0
    assert losses[1] == 0


def test_new_labels_have_rows_in_the_same_step():
    layer, names, _ = make_layer()
    with tf.GradientTape():
        losses = tlm.ops.sampled_softmax_loss(
            layer, [names[0], "new"], tf.ones([2, DIM]), 10
        )
    assert layer.vocabulary.contains("new")
    assert (losses > 0).numpy().all()


def test_padding_is_not_a_label_of_a_masking_layer():
    layer, names, _ = make_layer(mask_zero=True)
    sampled = tlm.ops.sample_keys(layer.vocabulary, 3)
    ids = sampled.ids(["", names[0]])
    assert layer.compute_mask(ids).numpy().tolist() == [False] + [True] * 4
    rows = layer(ids)
    assert not rows[0].numpy().any()
    assert rows[1:].numpy().any(axis=1).all()


def test_mixed_precision_keeps_the_dtype_of_vectors():
    found = tlm.ops.sampled_softmax_from_vectors(
        [0],
        tf.ones([1, DIM], tf.bfloat16),
        tf.ones([1, DIM], tf.bfloat16),
        tf.ones([2, DIM], tf.bfloat16),
        sampled_of([1, 2], [0.5, 2.0]),
    )
    assert found.dtype == tf.bfloat16
    np.testing.assert_allclose(
        tf.cast(found, tf.float32), [np.log(3.5)], rtol=0.02
    )


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"table": 3}, TypeError, "table.*ShardedEmbedding"),
        ({"labels": [["a"]]}, ValueError, "labels.*rank 1"),
        ({"inputs": np.ones([DIM])}, ValueError, "inputs.*rank 2"),
        ({"num_sampled": 0}, ValueError, "num_sampled"),
    ],
)
def test_invalid_arguments_raise(changed, error, message):
    layer, _, _ = make_layer()
    arguments = {
        "table": layer,
        "labels": ["item 1"],
        "inputs": np.ones([1, DIM], np.float32),
        "num_sampled": 5,
        **changed,
    }
    with pytest.raises(error, match=message):
        tlm.ops.sampled_softmax_loss(**arguments)


def test_closed_tables_raise():
    layer = tlm.layers.ShardedEmbedding(9, DIM, optimizer="adagrad")
    layer(np.array([[0]]))
    with pytest.raises(ValueError, match="OpenVocabulary.*input_dim=9"):
        tlm.ops.sampled_softmax_loss(layer, [1], np.ones([1, DIM]), 5)
    with pytest.raises(TypeError, match="StoredKeys.*input_dim=9"):
        layer(sampled_of([1], [1.0]).ids())


def test_results_of_other_samplers_raise():
    with pytest.raises(TypeError, match="sampled.*tlm.ops.sample_keys"):
        tlm.ops.sampled_softmax_from_vectors(
            [1], np.ones([1, 2]), np.ones([1, 2]), np.ones([1, 2]), (1, 2, 3)
        )
