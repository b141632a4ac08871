"""Checks ops whose results depend on positions in the full tensor.

The values and the gradients match plain TensorFlow for every layout.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
FIRST = np.array([[0, 1], [5, 2], [0, 1], [7, 7]])

CASES = {
    "top_k": lambda x: (
        tf.math.top_k(x, 3)[0] * tf.cast(tf.math.top_k(x, 3)[1], tf.float32)
    ),
    "keras top_k": lambda x: keras.ops.top_k(x, 3)[0],
    "sort": lambda x: tf.sort(x, axis=0),
    "gather_nd": lambda x: tf.gather_nd(x, FIRST),
    "gather of a batch": lambda x: tf.gather(
        x, tf.argsort(x)[:, :3], batch_dims=1
    ),
    "take_along_axis": lambda x: keras.ops.take_along_axis(
        x, keras.ops.argmax(x, axis=-1, keepdims=True), axis=-1
    ),
    "scatter_nd": lambda x: tf.scatter_nd(FIRST, x[:4, 0], [8, 8]),
    "reverse": lambda x: tf.reverse(x, [0, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_plain_tensorflow(name):
    # `inner` has a second use, whose layout DTensor propagates into the
    # gradient.
    def step(x, factors):
        with tf.GradientTape() as tape:
            tape.watch(x)
            inner = x * 1.0
            y = CASES[name](inner)
            loss = tf.reduce_sum(tf.sin(y) * factors) + tf.reduce_sum(
                inner * inner
            )
        return y, tape.gradient(loss, x)

    factors = (
        np.random.default_rng(1)
        .normal(size=CASES[name](tf.constant(X)).shape)
        .astype(np.float32)
    )
    wanted = step(tf.constant(X), tf.constant(factors))
    for sizes, axes in (
        (dict(batch=2, model=2), ("batch", "model")),
        (dict(batch=2, model=2), ("batch", None)),
        (dict(batch=1, model=4), (None, "model")),
    ):
        mesh = mesh_of(**sizes)
        with default_mesh(mesh):
            got = tf.function(step, autograph=False)(
                to_mesh(X, layout_of(mesh, *axes)),
                to_mesh(factors, layout_of(mesh, *[None] * factors.ndim)),
            )
        for mine, plain in zip(got, wanted):
            np.testing.assert_allclose(
                to_host(mine), plain, 1e-5, 1e-5, err_msg=str(axes)
            )


# Metrics apply masks in this way. Gradients of masks are not supported.
@pytest.mark.parametrize("axes", [("batch", "model"), ("batch", None)])
def test_boolean_mask_matches_plain_tensorflow(axes):
    def step(x):
        rows = tf.boolean_mask(x, x[:, 0] > 0)
        return (
            tf.reduce_sum(rows**2),
            tf.reduce_sum(tf.concat([rows, x], 0) ** 3),
            tf.reduce_sum(tf.boolean_mask(x, x > 0.5)),
        )

    mesh = mesh_of(batch=2, model=2)
    with default_mesh(mesh):
        got = tf.function(step)(to_mesh(X, layout_of(mesh, *axes)))
    for mine, plain in zip(got, step(tf.constant(X))):
        for part in tf.experimental.dtensor.unpack(mine):
            np.testing.assert_allclose(part, plain, rtol=1e-5)
