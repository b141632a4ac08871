"""The gradient of the weights of ids, while tables train."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

NUM_ROWS, DIM = 10, 3
START = (
    np.random.default_rng(2).standard_normal((NUM_ROWS, DIM)).astype(np.float32)
)
IDS = tf.ragged.constant([[1, 4], [], [7, 7, 2], [0]], dtype=tf.int64)
WEIGHTS = np.array([0.5, -2.0, 3.0, 1.5, 0.25, 0.75], np.float32)
FACTORS = tf.constant(
    np.random.default_rng(3).standard_normal((4, DIM)), tf.float32
)
COMBINERS = ("sum", "mean", "sqrtn")
# The sine of the loss amplifies the rounding errors of large activations.
CLOSE = dict(rtol=1e-4, atol=3e-5)


def start(shape, shard_info=None, dtype=None):
    del shape, shard_info, dtype
    return tf.constant(START)


def layer_of(combiner, trainable=True, **options):
    table = tpu.TableConfig(
        NUM_ROWS, DIM, start, combiner=combiner, name="words"
    )
    layer = tlm.layers.TPUEmbedding(
        {"bag": tpu.FeatureConfig(table), "other": tpu.FeatureConfig(table)},
        tpu.SGD(0.5),
        trainable=trainable,
        **options,
    )
    layer.build()
    return layer


def reference(combiner, weights, rows):
    """Returns activations by a formula in float64."""
    samples = IDS.value_rowids()
    weights = tf.cast(weights, tf.float64)
    terms = tf.gather(tf.cast(rows, tf.float64), IDS.values)
    terms *= weights[:, tf.newaxis]

    def total(values):
        return tf.math.unsorted_segment_sum(values, samples, 4)

    divisor = {
        "sum": tf.ones([4], tf.float64),
        "mean": total(weights),
        "sqrtn": tf.sqrt(total(weights**2)),
    }[combiner]
    # The second sample is empty.
    divisor += tf.constant([0, combiner != "sum", 0, 0], tf.float64)
    return total(terms) / divisor[:, tf.newaxis]


def loss_of(activations):
    return tf.reduce_sum(
        tf.sin(activations) * tf.cast(FACTORS, activations.dtype)
    )


def as_input(form, values):
    ragged = IDS.with_values(values)
    return ragged.to_sparse() if form == "sparse" else ragged


def call(layer, form, weights, **options):
    inputs = {"bag": as_input(form, IDS.values), "other": tf.constant([2, 2])}
    return layer(
        inputs, {"bag": as_input(form, weights), "other": None}, **options
    )


@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_gradients_equal_the_formula(combiner, form):
    layer, kernel = layer_of(combiner), tf.Variable(WEIGHTS)
    optimizer = keras.optimizers.SGD(0.5)
    rows = tf.Variable(tf.constant(START, tf.float64))
    expected_kernel = tf.Variable(WEIGHTS)
    for _ in range(2):
        with tf.GradientTape() as tape:
            found = call(layer, form, kernel * 2.0)
            # A second path to the loss.
            loss = loss_of(found["bag"]) + tf.reduce_sum(kernel**2)
        marks = layer.trainable_variables
        of_marks, of_kernel = tape.gradient(loss, [marks[0].value, kernel])
        optimizer.apply([of_marks], marks)
        kernel.assign_sub(0.1 * of_kernel)
        with tf.GradientTape() as tape:
            expected = reference(combiner, expected_kernel * 2.0, rows)
            loss = loss_of(expected) + tf.cast(
                tf.reduce_sum(expected_kernel**2), tf.float64
            )
        of_rows, of_kernel = tape.gradient(loss, [rows, expected_kernel])
        np.testing.assert_allclose(found["bag"], expected, **CLOSE)
        rows.assign_sub(0.5 * tf.convert_to_tensor(of_rows))
        expected_kernel.assign_sub(0.1 * of_kernel)
        np.testing.assert_allclose(kernel, expected_kernel, **CLOSE)
        np.testing.assert_allclose(
            layer.get_embedding_tables()["words"], rows, **CLOSE
        )


@pytest.mark.parametrize("combiner", COMBINERS)
def test_gradients_equal_those_of_a_layer_that_does_not_train(combiner):
    found = []
    for trainable in (True, False):
        layer, kernel = layer_of(combiner, trainable), tf.Variable(WEIGHTS)
        with tf.GradientTape() as tape:
            loss = loss_of(call(layer, "ragged", kernel)["bag"])
        found.append(tape.gradient(loss, kernel))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_gradients_equal_finite_differences(combiner):
    layer = layer_of(combiner)
    kernel = tf.Variable(WEIGHTS + 0.25)
    with tf.GradientTape() as tape:
        loss = loss_of(call(layer, "ragged", kernel)["bag"])
    found = tape.gradient(loss, kernel).numpy()
    for i in range(len(WEIGHTS)):
        sides = []
        for shift in (1e-3, -1e-3):
            changed = kernel.numpy()
            changed[i] += shift
            sides.append(
                float(loss_of(reference(combiner, tf.constant(changed), START)))
            )
        assert found[i] == pytest.approx(
            (sides[0] - sides[1]) / 2e-3, rel=1e-3, abs=1e-4
        )


@pytest.mark.parametrize(
    "where", ["step", "forward", "forward, first without a tape"]
)
def test_gradients_in_a_function(where):
    layer, kernel = layer_of("mean"), tf.Variable(WEIGHTS)

    def forward(weights):
        return call(layer, "ragged", weights, training=True)["bag"]

    def gradient():
        with tf.GradientTape() as tape:
            loss = loss_of(forward(kernel * 1.0))
        return tape.gradient(loss, kernel)

    expected = gradient()
    if where == "step":
        gradient = tf.function(gradient)
    else:
        forward = tf.function(forward)
        if where != "forward":
            forward(tf.constant(WEIGHTS))
    for _ in range(2):
        np.testing.assert_allclose(gradient(), expected, rtol=1e-6)


def test_rows_are_those_of_the_lookup():
    """A persistent tape computes a gradient after an update."""
    layer, kernel = layer_of("sum"), tf.Variable(WEIGHTS)
    marks = layer.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(call(layer, "ragged", kernel)["bag"])
    expected = tape.gradient(loss, kernel)
    keras.optimizers.SGD().apply(
        tape.gradient(loss, [one.value for one in marks]), marks
    )
    np.testing.assert_array_equal(tape.gradient(loss, kernel), expected)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_ids_outside_of_the_table_have_no_gradient(combiner):
    ids = tf.ragged.constant([[1, -1, 3], [99]], dtype=tf.int64)
    found = []
    for values in ([1, -1, 3], [1, 3]):
        layer = layer_of(combiner, out_of_range="drop")
        inside = ids if len(values) == 3 else tf.ragged.constant([values, []])
        kernel = tf.Variable([0.5, 7.0, 2.0, 1.0][: len(inside.values)])
        if len(values) == 2:
            kernel.assign([0.5, 2.0])
        with tf.GradientTape() as tape:
            out = layer(
                {"bag": inside, "other": tf.constant([2, 2])},
                {"bag": inside.with_values(tf.identity(kernel)), "other": None},
            )["bag"]
            loss = tf.reduce_sum(tf.sin(out) * FACTORS[:2])
        found.append(tape.gradient(loss, kernel).numpy())
    np.testing.assert_allclose(found[0][[0, 2]], found[1], rtol=1e-6)
    assert not found[0][[1, 3]].any()


def test_weights_of_keys_have_a_gradient():
    table = tpu.TableConfig(64, DIM, tf.ones, combiner="mean", name="words")
    layer = tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(table),
        tpu.SGD(0.5),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(64)},
    )
    ids = tf.ragged.constant([[10**12, 5], [-3]], dtype=tf.int64)
    layer.build()
    marks = layer.trainable_variables
    for factors in ([[1.0, 2.0, 3.0]] * 2, FACTORS[:2]):
        kernel = tf.Variable([0.5, 2.0, 1.0])
        with tf.GradientTape() as tape:
            out = layer(ids, ids.with_values(tf.identity(kernel)))
            loss = tf.reduce_sum(out * factors)
        of_marks, of_kernel = tape.gradient(loss, [marks[0].value, kernel])
        rows = layer.embedding(tf.constant([10**12, 5, -3], tf.int64)).numpy()
        mean = (0.5 * rows[0] + 2 * rows[1]) / 2.5
        expected = [
            np.dot(factors[0], rows[0] - mean) / 2.5,
            np.dot(factors[0], rows[1] - mean) / 2.5,
            0,
        ]
        np.testing.assert_allclose(of_kernel, expected, rtol=1e-4, atol=1e-5)
        keras.optimizers.SGD().apply([of_marks], marks)
