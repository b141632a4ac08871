"""Checks the use of host tensors in computations with mesh tensors.

A host tensor is copied to a mesh once, and the copy is freed later.
"""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.replication import captured_tensors

dtensor = tf.experimental.dtensor

MESH = mesh_of(batch=2, model=2)
X = np.random.default_rng(0).normal(size=(4, 150)).astype(np.float32)
# This tensor is larger than the host tensors that DTensor accepts.
HELD = np.arange(600).reshape(4, 150) % 7


def on_mesh(values=X, axes=("batch", "model")):
    return to_mesh(values, layout_of(MESH, *axes))


@pytest.mark.parametrize("in_a_function", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "uint32",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
    ],
)
def test_host_tensor_may_have_any_dtype(dtype, in_a_function):
    held = tf.cast(HELD, dtype)

    def use(x):
        return x + tf.cast(
            tf.math.real(held) if dtype == "complex64" else held, tf.float32
        )

    x = on_mesh()
    with default_mesh(MESH):
        got = (tf.function(use, autograph=False) if in_a_function else use)(x)
    np.testing.assert_array_equal(to_host(got), use(X).numpy())


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (128,), (129,)])
def test_host_tensor_of_any_size_works_in_nested_functions(shape, dtype):
    held = tf.cast(tf.fill(shape, 3), dtype)
    inner = tf.function(lambda: tf.cast(held, tf.float32), autograph=False)
    with default_mesh(MESH):
        got = tf.function(
            lambda x: x + tf.reduce_sum(inner()), autograph=False
        )(on_mesh())
    np.testing.assert_allclose(
        to_host(got), X + np.sum(held.numpy().astype(np.float32)), 1e-6
    )


@pytest.mark.parametrize(
    "other", [HELD.astype(np.float32), HELD.astype(np.float32).tolist()]
)
def test_arrays_and_lists_are_host_tensors(other):
    with default_mesh(MESH):
        for got in (
            on_mesh() * other,
            other * on_mesh(),
            tf.multiply(on_mesh(), other),
            tf.raw_ops.Mul(x=on_mesh(), y=other),
        ):
            np.testing.assert_array_equal(to_host(got), X * np.float32(other))


def test_list_of_several_host_tensors():
    held = tf.constant(X)
    with default_mesh(MESH):
        got = tf.concat([held, on_mesh(), held], 0)
        total = tf.add_n([held, on_mesh(), held])
    np.testing.assert_array_equal(to_host(got), np.concatenate([X] * 3))
    np.testing.assert_array_equal(to_host(total), X + X + X)


def test_host_tensor_of_strings():
    held = tf.constant(["a", "bc"] * 100)
    with default_mesh(MESH):
        assert tf.strings.length(held).shape == [200]


def test_mesh_of_another_operand_is_used_outside_of_scopes():
    held = tf.constant(HELD, tf.float32)
    got = held * on_mesh(axes=("batch", None))
    np.testing.assert_array_equal(to_host(got), X * np.float32(HELD))
    got = tf.function(lambda x: held * x, autograph=False)(on_mesh())
    np.testing.assert_array_equal(to_host(got), X * np.float32(HELD))


@pytest.mark.parametrize("in_a_function", [False, True])
def test_gradients_flow_to_host_and_mesh_tensors(in_a_function):
    held = tf.constant(HELD, tf.float32)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch([x, held])
            y = tf.reduce_sum(tf.sin(x * held) * held)
        return tape.gradient(y, [x, held])

    wanted = step(tf.constant(X))
    with default_mesh(MESH):
        got = (tf.function(step, autograph=False) if in_a_function else step)(
            on_mesh()
        )
    for mine, plain in zip(got, wanted, strict=True):
        np.testing.assert_allclose(to_host(mine), plain, 1e-5, 1e-5)


def test_outer_tape_watches_tensors_that_a_function_captures():
    held = tf.constant(HELD, tf.float32)
    function = tf.function(
        lambda x: tf.reduce_sum(x * held * held), autograph=False
    )
    with default_mesh(MESH), tf.GradientTape() as tape:
        tape.watch(held)
        y = function(on_mesh())
    np.testing.assert_allclose(
        to_host(tape.gradient(y, held)), 2 * X * HELD, 1e-6
    )


def test_host_tensor_is_copied_once_per_mesh_and_freed():
    other = mesh_of(x=2)
    held = tf.constant(HELD)
    copy = captured_tensors.packed(held, MESH)
    assert tracing.on_mesh(copy)
    assert captured_tensors.packed(held, MESH) is copy
    assert captured_tensors.packed(copy, MESH) is copy
    there = captured_tensors.packed(held, other)
    assert dtensor.fetch_layout(there).mesh == other
    ends = [weakref.ref(one) for one in (held, copy, there)]
    del held, copy, there
    gc.collect()
    assert [end() for end in ends] == [None] * 3


def test_function_fails_once_and_keeps_no_tensor_alive(monkeypatch):
    refusals = []
    refused_input = captured_tensors._refused_input
    monkeypatch.setattr(
        captured_tensors,
        "_refused_input",
        lambda *args: refusals.append(1) or refused_input(*args),
    )

    def run():
        held = tf.constant(HELD, tf.float32)
        function = tf.function(lambda x: x * held, autograph=False)
        with default_mesh(MESH):
            for _ in range(3):
                function(on_mesh())
        return weakref.ref(held)

    end = run()
    assert len(refusals) == 1
    gc.collect()
    assert end() is None


def test_function_may_run_on_several_meshes():
    held = tf.constant(HELD, tf.float32)
    function = tf.function(lambda x: x * held, autograph=False)
    for mesh in (MESH, mesh_of(batch=4), MESH):
        with default_mesh(mesh):
            got = function(to_mesh(X, layout_of(mesh, "batch", None)))
        np.testing.assert_array_equal(to_host(got), X * np.float32(HELD))
    np.testing.assert_array_equal(
        function(tf.constant(X)), X * np.float32(HELD)
    )


def test_only_rejected_tensors_are_copied():
    """Checks that small integer tensors are passed to DTensor unchanged."""
    held, shape = tf.constant(HELD, tf.float32), tf.constant([4, 50, 3])
    with default_mesh(MESH):
        got = tf.function(
            lambda x, shape: tf.reshape(x + held, shape), autograph=False
        )(on_mesh(), shape)
    np.testing.assert_array_equal(
        to_host(got), (X + np.float32(HELD)).reshape(4, 50, 3)
    )
    assert hasattr(held, captured_tensors._COPIES)
    assert not hasattr(shape, captured_tensors._COPIES)


def test_other_errors_are_unchanged_and_functions_run_once():
    with default_mesh(MESH):
        with pytest.raises(tf.errors.InvalidArgumentError, match="Dimensions"):
            tf.matmul(on_mesh(), on_mesh())
        calls = []

        def fails():
            calls.append(1)
            raise NotImplementedError(
                "The op/function Add got a regular tensor for input 0 "
            )

        with (
            tf.device("CPU:0"),
            pytest.raises(tf.errors.OpError, match="regular"),
        ):
            tf.py_function(fails, [], tf.float32)
    assert calls == [1]
