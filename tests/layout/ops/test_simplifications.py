"""Checks cheaper ops on a mesh: values, gradients, and the ops of the graph."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.ops import simplifications

dtensor = tf.experimental.dtensor

MESH = mesh_of(batch=2, model=2)
MATRIX = [
    (None, None),
    ("batch", None),
    (None, "model"),
    ("model", None),
    ("batch", "model"),
]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def used_ops(function, *arguments):
    """Returns the types of the ops on which the results depend."""
    graph = function.get_concrete_function(*arguments).graph
    todo, seen = [x.op for x in graph.outputs], {}
    while todo:
        op = todo.pop()
        if op.name not in seen:
            seen[op.name] = op.type
            todo += [x.op for x in op.inputs]
    return list(seen.values())


PRODUCTS = {
    "tied weights": lambda x, w: tf.matmul(x, tf.transpose(w)),
    "transposed twice": lambda x, w: tf.matmul(
        tf.transpose(x), tf.transpose(tf.transpose(w)), transpose_a=True
    ),
    "flags": lambda x, w: tf.matmul(
        x, tf.transpose(w), transpose_b=True, transpose_a=True
    ),
    "first operand": lambda x, w: tf.matmul(tf.transpose(w), x),
    "dense layer": lambda x, w: tf.tensordot(
        tf.reshape(x, [2, 2, 4]), tf.transpose(w), 1
    ),
    "not transposed": lambda x, w: tf.matmul(x, tf.transpose(w, [0, 1])),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_transpose_match_plain_tensorflow(name):
    x, w = numbers(4, 4), numbers(4, 4, seed=1)

    def step(x, w):
        with tf.GradientTape() as outer:
            outer.watch(w)
            with tf.GradientTape() as tape:
                tape.watch((x, w))
                loss = tf.reduce_sum(tf.sin(PRODUCTS[name](x * 1.0, w * 1.0)))
            dx, dw = tape.gradient(loss, (x, w))
            penalty = tf.reduce_sum(dx * dx) + tf.reduce_sum(dw * dw)
        return loss, dx, dw, outer.gradient(penalty, w)

    wanted = step(tf.constant(x), tf.constant(w))
    for of_x, of_w in itertools.product(MATRIX, MATRIX):
        with default_mesh(MESH):
            got = tf.function(step, autograph=False)(
                to_mesh(x, layout_of(MESH, *of_x)),
                to_mesh(w, layout_of(MESH, *of_w)),
            )
        for mine, plain in zip(got, wanted):
            np.testing.assert_allclose(
                to_host(mine), plain, 1e-4, 1e-4, err_msg=f"{of_x} {of_w}"
            )


def tied_step(x, w):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.sin(tf.matmul(x * 1.0, tf.transpose(w))))
    return tape.gradient(loss, (x, w))


@pytest.mark.parametrize("is_on_mesh", [True, False])
def test_tied_weights_are_not_copied_on_a_mesh(is_on_mesh):
    x, w = numbers(4, 4), numbers(8, 4, seed=1)
    step = tf.function(tied_step, autograph=False)
    if not is_on_mesh:
        assert "Transpose" in used_ops(step, tf.constant(x), tf.Variable(w))
        return
    layout = layout_of(MESH, "model", None)
    with default_mesh(MESH):
        table = dtensor.DVariable(to_mesh(w, layout))
        ops = used_ops(step, to_mesh(x, layout), table)
    assert ops.count("MatMul") == 3
    assert "Transpose" not in ops


def test_gradient_of_a_transposed_matrix():
    x, w = numbers(4, 8), numbers(6, 8, seed=1)

    def step(x, w):
        transposed = tf.transpose(w)
        with tf.GradientTape() as tape:
            tape.watch(transposed)
            loss = tf.reduce_sum(tf.sin(tf.matmul(x, transposed)))
        return tape.gradient(loss, transposed)

    with default_mesh(MESH):
        got = tf.function(step, autograph=False)(
            to_mesh(x, layout_of(MESH, "batch", None)),
            to_mesh(w, layout_of(MESH, "model", None)),
        )
    np.testing.assert_allclose(to_host(got), step(x, w), 1e-5, 1e-5)


@pytest.mark.parametrize("exponent", [2, 3, 2.0, np.float32(3), 0.5, 4, -2, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_powers_match_plain_tensorflow(exponent, dtype, is_tensor):
    if dtype == "int32" and (exponent < 0 or isinstance(exponent, float)):
        pytest.skip("TensorFlow does not support this power of integers.")
    x = tf.cast(np.abs(numbers(4, 4)) + 1, dtype)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            # Keras converts the exponent to a tensor.
            y = tf.pow(
                x, tf.constant(exponent, dtype) if is_tensor else exponent
            )
        return (y, tape.gradient(y, x)) if x.dtype.is_floating else (y,)

    tolerance = 2e-3 if dtype == "float16" else 1e-6
    function = tf.function(step, autograph=False)
    value = to_mesh(x, layout_of(MESH, "batch", "model"))
    with default_mesh(MESH):
        got = function(value)
        is_product = "Pow" not in used_ops(function, value)
    assert is_product == (dtype != "int32" and exponent in (2, 3))
    for mine, plain in zip(got, step(x)):
        np.testing.assert_allclose(to_host(mine), plain, tolerance)


@pytest.mark.parametrize("is_constant", [False, True])
def test_an_exponent_that_a_tape_watches_has_a_gradient(is_constant):
    def step(x, y):
        y = tf.constant(3.0) if is_constant else y
        with tf.GradientTape() as tape:
            tape.watch(y)
            z = tf.pow(x, y)
        return tape.gradient(z, y)

    layout = layout_of(MESH)
    with default_mesh(MESH):
        got = tf.function(step, autograph=False)(
            to_mesh(np.float32(2), layout), to_mesh(np.float32(3), layout)
        )
    np.testing.assert_allclose(to_host(got), 8 * np.log(2), 1e-6)


def test_tf_gradients_rejects_a_constant_exponent():
    @tf.function(autograph=False)
    def step(x):
        y = tf.constant(2.0)
        return tf.gradients(tf.pow(x, y), y)

    with (
        default_mesh(MESH),
        pytest.raises(ValueError, match=r"constant exponent of tf\.pow"),
    ):
        step(to_mesh(np.float32(2), layout_of(MESH)))


@pytest.mark.parametrize("axes", MATRIX)
def test_argmax_of_shards_is_the_first_position_of_the_maximum(axes):
    x = np.random.default_rng(0).integers(0, 3, (4, 8)).astype(np.float32)
    x[2] = -np.inf

    @tf.function(autograph=False)
    def positions(x):
        with simplifications.shards_argmax():
            return tf.argmax(x, axis=-1, output_type=tf.int32), tf.argmax(x, 1)

    value = to_mesh(x, layout_of(MESH, *axes))
    with default_mesh(MESH):
        got = positions(value)
        assert "ArgMax" not in used_ops(positions, value)
    for one, dtype in zip(got, (np.int32, np.int64)):
        one = np.asarray(to_host(one))
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, np.argmax(x, -1))


def test_argmax_along_other_dimensions_is_unchanged():
    x = numbers(4, 8)

    @tf.function(autograph=False)
    def positions(x):
        with simplifications.shards_argmax():
            return tf.argmax(x, 0)

    with default_mesh(MESH):
        got = positions(to_mesh(x, layout_of(MESH, "batch", "model")))
    np.testing.assert_array_equal(to_host(got), np.argmax(x, 0))


@pytest.mark.parametrize("axes", MATRIX)
@pytest.mark.parametrize("size", [8, 6])
def test_position_of_largest_logit_is_that_of_largest_probability(axes, size):
    x = np.random.default_rng(0).integers(-2, 2, (8, size)).astype(np.float32)
    x[1] = -np.inf
    x[2, 3:] = np.nan
    x[3, 2] = np.inf
    x[4] = [-np.inf, -3, -2, -3, -2, *[-np.inf] * (size - 5)]
    x[5] = [-0.0, *[0.0] * (size - 1)]
    x[6] = np.finfo(np.float32).max
    positions = tf.function(
        lambda x: simplifications.position_of_largest(x, MESH.size)
    )
    layout = layout_of(MESH, *axes)
    with default_mesh(MESH):
        found = to_host(positions(to_mesh(x, layout)))
    assert found.dtype == np.int32
    probabilities = tf.nn.softmax(tf.constant(x))
    np.testing.assert_array_equal(found, tf.argmax(probabilities, -1))


def trained(model, one_hot, metrics):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 8)).astype(np.float32)
    y = rng.integers(0, 4, 24)
    model.compile("sgd", "mse" if one_hot else None, weighted_metrics=metrics)
    if not one_hot:
        model.compile(
            "sgd", "sparse_categorical_crossentropy", weighted_metrics=metrics
        )
    return model.fit(
        x,
        np.eye(4)[y] if one_hot else y,
        batch_size=12,
        shuffle=False,
        verbose=0,
        sample_weight=np.arange(24) / 24,
    ).history


METRICS = {
    "labels": (False, keras.metrics.SparseCategoricalAccuracy, True),
    "one-hot": (True, keras.metrics.CategoricalAccuracy, True),
    "top-k": (False, keras.metrics.SparseTopKCategoricalAccuracy, False),
}


@pytest.mark.parametrize("name", METRICS)
def test_accuracies_do_not_gather_the_classes(name, monkeypatch):
    one_hot, metric, keeps_shards = METRICS[name]
    argmaxes = []
    original = simplifications.shards_argmax
    monkeypatch.setattr(
        simplifications,
        "shards_argmax",
        lambda: argmaxes.append(1) or original(),
    )

    def classifier():
        return keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "tanh", name="d1"),
                keras.layers.Dense(4, "softmax", name="d2"),
            ]
        )

    axes = {"d2.kernel": (None, "model"), "d2.bias": ("model",)}
    plain, model = pairs.plain(classifier), pairs.on_mesh(classifier, axes)
    histories = [trained(one, one_hot, [metric()]) for one in (plain, model)]
    assert bool(argmaxes) == keeps_shards
    for key, values in histories[0].items():
        np.testing.assert_allclose(histories[1][key], values, 1e-5)


def test_tf_gradients_reject_a_skipped_transposition():
    x, w = numbers(4, 4), numbers(4, 4, seed=1)

    def gradient_of(choose):
        def step(x, w):
            matrix = tf.convert_to_tensor(w)
            transposed = tf.transpose(matrix)
            loss = tf.reduce_sum(tf.matmul(x, transposed) ** 2)
            return tf.gradients(loss, choose(matrix, transposed))[0]

        return tf.function(step)

    layout = layout_of(MESH, None, None)
    with default_mesh(MESH):
        inputs = to_mesh(x, layout), dtensor.DVariable(to_mesh(w, layout))
        found = gradient_of(lambda matrix, _: matrix)(*inputs)
        with pytest.raises(ValueError, match="`xs`.*GradientTape"):
            gradient_of(lambda _, transposed: transposed)(*inputs)
    expected = gradient_of(lambda matrix, _: matrix)(x, tf.Variable(w))
    np.testing.assert_allclose(to_host(found), expected, rtol=1e-5)
