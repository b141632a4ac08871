"""Loops with an unknown number of steps, which run from the host."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs, unsupported
from tests.layout.meshes import mesh_of
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError
from tf_layoutmap.layout.ops import device_loops

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
AXES = {
    "d1.kernel": (None, "model"),
    "d1.bias": ("model",),
    "d2.kernel": ("model", None),
}


def make():
    return keras.Sequential(
        [
            keras.Input((8,)),
            L.Dense(16, activation="tanh", name="d1"),
            L.Dense(8, name="d2"),
        ]
    )


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlm.layout.LayoutMapWarning)
        yield


def autograph_while(model):
    @tf.function
    def function(x, bound):
        number, y = 0, model(x)
        while tf.reduce_sum(tf.abs(y)) < bound and number < 50:
            y += model(y)
            number += 1
        return {"y": y, "nothing": None, "number": number}

    return function


def two_loops(model):
    @tf.function
    def function(x, bound):
        first = model(x)
        number = 0
        y = first
        while tf.reduce_sum(tf.abs(y)) < bound:
            y += model(y)
            number += 1
        z = model(y)
        while number < 60:
            if tf.reduce_sum(z) > 10.0 * bound:
                break
            z = z * 1.5 + first
            number += 1
        return y, z + first, number

    return function


def over_a_range(model):
    @tf.function
    def function(x, bound):
        total = tf.zeros_like(x)
        for number in tf.range(tf.cast(bound, tf.int32) // 5):
            total += model(x) * tf.cast(number, tf.float32)
        return total

    return function


class Method(tf.Module):
    """Object with a `tf.function` as a method."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @tf.function(
        input_signature=[tf.TensorSpec((4, 8)), tf.TensorSpec(())],
        autograph=False,
    )
    def call(self, x, bound):
        return tf.while_loop(
            lambda y: tf.reduce_sum(tf.abs(y)) < bound,
            lambda y: y + self.model(y),
            (x,),
        )


def method(model):
    # The function holds only a weak reference to its object.
    model.owner = Method(model)
    return model.owner.call


def host(results):
    return keras.tree.map_structure(
        lambda x: (
            x
            if x is None
            else np.asarray(tlm.layout.to_host(x))
            if tlm.layout.mesh.tracing.on_mesh(x)
            else np.asarray(x)
        ),
        results,
    )


MAKERS = [autograph_while, two_loops, over_a_range, method]


@pytest.mark.covering(1, 4)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("is_in_default_mesh", [False, True])
def test_loop_matches_a_single_device(maker, is_in_default_mesh, no_warning):
    models = pairs.plain(make), pairs.on_mesh(make, AXES)
    plain, function = map(maker, models)
    # With the last bound, no loop runs a step.
    for bound in (20.0, 40.0, 0.0):
        if is_in_default_mesh:
            with tlm.layout.default_mesh(mesh_of(batch=2, model=2)):
                found = function(X, tf.constant(bound))
        else:
            found = function(X, tf.constant(bound))
        expected = host(plain(X, tf.constant(bound)))
        found = host(found)
        keras.tree.assert_same_structure(expected, found)
        for a, b in zip(
            keras.tree.flatten(expected), keras.tree.flatten(found)
        ):
            if a is not None:
                np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_loop_inside_of_a_condition_is_replicated():
    def maker(model):
        @tf.function
        def function(x, bound):
            if bound > 0.0:
                while tf.reduce_sum(x) < bound:
                    x += tf.abs(model(x))
            return x

        return function

    expected = maker(pairs.plain(make))(X, tf.constant(30.0))
    function = maker(pairs.on_mesh(make, AXES))
    with pytest.warns(
        tlm.layout.LayoutMapWarning, match="all weights gathered"
    ):
        found = function(X, tf.constant(30.0))
    np.testing.assert_allclose(np.asarray(found), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("is_in_default_mesh", [False, True])
def test_loop_variable_of_unknown_shape_is_replicated(is_in_default_mesh):
    def maker(model):
        @tf.function
        def function(x, bound):
            y = model(x)
            rows = x[:1]
            while tf.reduce_sum(tf.abs(rows)) < bound:
                tf.autograph.experimental.set_loop_options(
                    shape_invariants=[(rows, tf.TensorShape([None, 8]))]
                )
                rows = tf.concat([rows, y[:1]], 0)
            return tf.reduce_sum(rows, 0)

        return function

    models = pairs.plain(make), pairs.on_mesh(make, AXES)
    plain, function = map(maker, models)
    expected = plain(X, tf.constant(30.0))
    context = (
        tlm.layout.default_mesh(mesh_of(batch=2, model=2))
        if is_in_default_mesh
        else contextlib.nullcontext()
    )
    try:
        with context, warnings.catch_warnings():
            warnings.simplefilter("ignore", tlm.layout.LayoutMapWarning)
            found = host(function(X, tf.constant(30.0)))
    except UnsupportedByDTensorError:
        # DTensor may reject the shapes, but must not return another number.
        return
    np.testing.assert_allclose(found, expected, 1e-5, 1e-5)


class Halves(L.Layer):
    """Layer that splits a dimension that the mesh shards."""

    def call(self, x):
        a, b = unsupported.split(x, 2, axis=-1)
        return tf.concat([a, b], -1)


def test_seeds_of_a_failed_compilation_are_not_used():
    # DTensor cannot compile the step of the loop. The part before the loop has
    # already drawn a number, which the replicated function must draw again.
    def noisy():
        return keras.Sequential(
            [keras.Input((8,)), L.Dense(16, name="d1"), Halves(), L.Dense(8)]
        )

    def maker(model, seed):
        @tf.function
        def function(x, count):
            x += keras.random.normal((4, 8), seed=seed) + model.layers[-1].bias
            number = 0
            while number < count:
                x = model(x) + keras.random.normal((4, 8), seed=seed)
                number += 1
            return x

        return function

    plain = maker(pairs.plain(noisy), keras.random.SeedGenerator(5))
    function = maker(
        pairs.on_mesh(noisy, {"d1.kernel": (None, "model")}),
        keras.random.SeedGenerator(5),
    )
    with pytest.warns(tlm.layout.LayoutMapWarning, match="'function'"):
        found = [function(X, tf.constant(3)) for _ in range(2)]
    for one in found:
        np.testing.assert_allclose(
            np.asarray(one), plain(X, tf.constant(3)), 1e-5, 1e-5
        )


@pytest.mark.parametrize("runs_on_devices", [False, True])
def test_error_of_a_later_step_is_raised_once(runs_on_devices, monkeypatch):
    calls, run = [], device_loops.DeviceLoop.run
    monkeypatch.setattr(
        device_loops.DeviceLoop,
        "run",
        lambda loop, *args: calls.append(1) or run(loop, *args),
    )
    if not runs_on_devices:
        monkeypatch.setattr(device_loops, "can_run_on", lambda mesh: False)
    model = pairs.on_mesh(make, AXES)

    @tf.function(autograph=False)
    def function(x, last):
        # The step after the last row of `x` fails.
        return tf.while_loop(
            lambda number, last, x, y: number < last,
            lambda number, last, x, y: (
                number + 1,
                last,
                x,
                model(y) + tf.gather(x, number)[tf.newaxis],
            ),
            (tf.constant(0), last, x, x),
        )

    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="indices"):
            function(X, tf.constant(6))
    number, *_, found = function(X, tf.constant(4))
    assert int(number) == 4
    expected = X
    for row in X:
        expected = np.asarray(host(model(expected))) + row
    np.testing.assert_allclose(host(found), expected, 1e-4)
    assert bool(calls) == runs_on_devices


def test_body_that_changes_a_shape_raises():
    model = pairs.on_mesh(make, AXES)

    @tf.function(autograph=False)
    def function(x):
        return tf.while_loop(
            lambda y: tf.reduce_sum(y) < 9.0, lambda y: (model(y)[:2],), (x,)
        )[0]

    with pytest.raises(ValueError, match=r"\(4, 8\).*shape \(2, 8\)"):
        function(model(X))


def test_result_of_the_step_must_have_the_structure_of_the_variables():
    model = pairs.on_mesh(make, AXES)

    @tf.function(autograph=False)
    def function(x):
        return tf.while_loop(
            lambda y, z: tf.reduce_sum(y) < 9.0,
            lambda y, z: [model(y)],
            (x, x),
        )[0]

    with pytest.raises(ValueError, match="structure"):
        function(X)
