"""Gradients of `tf.custom_gradient` are TensorFlow's, and freed."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from tests.freed.alive import left_by
from tf_layoutmap import _tf_private
from tf_layoutmap._patches import engine


@pytest.fixture(autouse=True)
def installed():
    engine.ensure("memory")


@tf.custom_gradient
def tripled_gradient(x):
    mean = tf.reduce_mean(x)

    def gradient(dy):
        return 3 * dy * mean

    return tf.identity(x), gradient


def branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tripled_gradient(x),
                   lambda: x)


def loop(x):
    for _ in tf.range(2):
        x = tripled_gradient(x)
    return x


@pytest.mark.parametrize(("make", "expected"), [
    (lambda: tripled_gradient, 6), (lambda: branch, 6), (lambda: loop, 36),
    (lambda: tf.function(tripled_gradient), 6),
    (lambda: tf.recompute_grad(tripled_gradient), 6)])
def test_gradients_are_those_of_tensorflow_and_freed(make, expected):
    gradients = []

    def program():
        x, function = tf.Variable([1.0, 3.0]), make()

        @tf.function
        def gradient():
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(function(x)[0])
            return tape.gradient(y, x)

        gradients.append(gradient().numpy())

    assert not left_by(program)
    np.testing.assert_array_equal(gradients, [[expected, 0]] * 3)


def test_gradients_of_gradients():
    @tf.custom_gradient
    def cube(x):
        return x ** 3, lambda dy: dy * 3 * x ** 2

    @tf.function
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = cube(x)
            first = inner.gradient(y, x)
        return first, outer.gradient(first, x)

    first, then = second(tf.constant(2.0))
    assert (float(first), float(then)) == (12, 12)


def test_a_gradient_is_found_by_its_name_while_its_graph_is_there(tmp_path):
    """So a SavedModel has it."""
    def save():
        module = tf.Module()
        module.call = tf.function(
            tripled_gradient, input_signature=[tf.TensorSpec([2])])
        tf.saved_model.save(
            module, str(tmp_path), options=tf.saved_model.SaveOptions(
                experimental_custom_gradients=True))

    save()
    gc.collect()
    loaded = tf.saved_model.load(str(tmp_path))
    x = tf.constant([1.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded.call(x)
    np.testing.assert_array_equal(tape.gradient(y, x), [6, 6])


def test_nothing_stays_registered():
    def program():
        tf.function(tripled_gradient)(tf.constant([1.0]))

    program()
    gc.collect()
    before = set(_tf_private._gradients.list())
    program()
    gc.collect()
    assert set(_tf_private._gradients.list()) == before


@pytest.mark.parametrize("kind", ["ragged", "number"])
def test_results_of_other_kinds(kind):
    @tf.custom_gradient
    def made(x):
        if kind == "ragged":
            result = tf.RaggedTensor.from_row_lengths(tf.identity(x), [1, 1])
            return result, lambda dy: dy.flat_values * 5
        return [7, tf.identity(x)], lambda _, dy: dy * 5

    def program():
        @tf.function
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.nest.flatten(made(x), expand_composites=True)
                y = next(one for one in y if one.dtype == tf.float32)
            return tape.gradient(y, x)

        np.testing.assert_array_equal(
            gradient(tf.constant([1.0, 2.0])), [5, 5])

    assert not left_by(program)


def test_tensorflow_itself_still_keeps_them():
    """When this fails, TensorFlow is mended: remove the row, and all of it."""
    installed = engine._counts["memory"]
    for _ in range(installed):
        engine.uninstall("memory")
    try:
        left = left_by(lambda: tf.function(tripled_gradient)(
            tf.constant([1.0])))
    finally:
        for _ in range(installed):
            engine.install("memory")
    assert left["FuncGraph"] == 2
