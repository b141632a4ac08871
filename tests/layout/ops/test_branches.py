"""Checks that branches on a mesh and their gradients match plain TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tests.layout.ops.test_loops import step_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh

MESH = mesh_of(batch=2, model=2)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def cond(x):
    # The gradients of the branches need different intermediate values.
    return tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: tf.sin(x) * tf.exp(x[:, :1]),
        lambda: tf.tanh(tf.matmul(x, x, transpose_b=True))[:, :1] * x,
    )


def nested(x):
    return tf.cond(tf.reduce_sum(x) > 100, lambda: x, lambda: cond(x * 2))


def integers(x):
    # A branch computes a value without a gradient for its own gradient.
    return tf.cond(
        tf.reduce_sum(x) > -100,
        lambda: tf.gather(x, tf.argmax(x, 0), axis=0),
        lambda: tf.tile(x, [2, 1]) * 3,
    )


def case(index, **options):
    def run(x):
        # The index is not known during tracing.
        number = tf.cast(tf.reduce_sum(x) * 0, tf.int32) + index
        return tf.switch_case(
            number,
            {
                1: lambda: tf.sin(x),
                0: lambda: x * 2,
                2: lambda: tf.matmul(x, tf.ones([8, 8])),
            },
            **options,
        )

    return run


PROGRAMS = {
    "cond": cond,
    "other branch": lambda x: cond(-x),
    "nested": nested,
    "integers": integers,
    **{f"case {i}": case(i) for i in (-1, 0, 1, 2, 3)},
    "default": lambda x: case(7, default=lambda: x * 5)(x),
    "static": lambda x: tf.switch_case(
        tf.constant(1), [lambda: x, lambda: x * x]
    ),
}


@pytest.mark.covering(1, 6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_branch_and_gradient_match_plain_tensorflow(name):
    wanted = step_of(PROGRAMS[name])(tf.constant(X))
    with default_mesh(MESH):
        x = to_mesh(X, layout_of(MESH, "batch", None))
        got = step_of(PROGRAMS[name])(x)
    for mine, plain in zip(got, wanted):
        np.testing.assert_allclose(to_host(mine), plain, 1e-5, 1e-5)


def test_gradient_of_a_branch_around_a_model():
    # The tape is outside of the function.
    x = pairs.FEATURES[:8]
    gradients = []
    for make in (pairs.plain, pairs.on_mesh):
        model = make(pairs.dense_model)
        weights = [w.value for w in model.trainable_weights]

        def branch(x, model=model):
            is_positive = tf.reduce_sum(x) > 0
            return tf.cond(is_positive, lambda: model(x), lambda: model(-x))

        with tf.GradientTape() as tape:
            y = tf.function(branch, autograph=False)(x)
            loss = tf.reduce_sum(y * y)
        gradients.append([np.asarray(g) for g in tape.gradient(loss, weights)])
    pairs.assert_alike(*gradients)
