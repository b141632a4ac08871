"""Checks the use of host variables in code for a mesh.

Each assignment must either be applied once or raise an error.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh

MESH = mesh_of(batch=2, model=2)
VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)


def on_mesh():
    return to_mesh(VALUES, layout_of(MESH, "batch", "model"))


def function(f):
    return tf.function(f, autograph=False)


@pytest.mark.parametrize(
    "how, wanted",
    [
        ("assign", VALUES),
        ("assign_add", 1 + VALUES),
        ("assign_sub", 1 - VALUES),
    ],
)
def test_eager_assignment_is_applied_once(how, wanted):
    for value in (VALUES, on_mesh()):
        variable = tf.Variable(tf.ones([4, 2]))
        with default_mesh(MESH):
            getattr(variable, how)(value)
        np.testing.assert_array_equal(variable.numpy(), wanted)
        outside = tf.Variable(tf.ones([4, 2]))
        getattr(outside, how)(value)
        np.testing.assert_array_equal(outside.numpy(), wanted)


@pytest.mark.parametrize("how", ["assign", "assign_add", "assign_sub"])
def test_assignment_in_a_mesh_function_raises_and_writes_nothing(how):
    variable = tf.Variable(1.0, name="counter")

    def write(x):
        with tf.name_scope("my_layer"):
            getattr(variable, how)(2.0)
        return x

    with (
        default_mesh(MESH),
        pytest.raises(
            RuntimeError,
            match=rf"`{how}` of tf.Variable 'counter:0' of shape "
            r"\(\), which is on the host, in 'my_layer'.*add_weight",
        ),
    ):
        function(write)(on_mesh())
    assert variable.numpy() == 1


@pytest.mark.parametrize(
    "name, wanted",
    [("AssignAddVariableOp", 4.0), ("AssignSubVariableOp", -2.0)],
)
def test_raw_op_writes_once_or_raises(name, wanted):
    variable = tf.Variable(1.0)

    def write(x):
        getattr(tf.raw_ops, name)(resource=variable.handle, value=3.0)
        return x

    def in_a_branch(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: write(x), lambda: x)

    with default_mesh(MESH):
        for refused in (write, in_a_branch):
            with pytest.raises(
                RuntimeError,
                match="`assign_..._variable_op` "
                "on a variable, which is on the host",
            ):
                function(refused)(on_mesh())
        assert variable.numpy() == 1
        write(None)
    assert variable.numpy() == wanted
    function(write)(VALUES)
    assert variable.numpy() == 2 * wanted - 1


def test_each_step_reads_the_current_value_and_has_gradients():
    variable = tf.Variable(tf.fill([2], 3.0))

    @function
    def step(x):
        with tf.GradientTape() as tape:
            y = x * variable
        return y, tape.gradient(y, variable)

    for factor in (3.0, 5.0):
        with default_mesh(MESH):
            variable.assign([factor] * 2)
            y, gradient = step(on_mesh())
        np.testing.assert_array_equal(to_host(y), VALUES * factor)
        np.testing.assert_array_equal(to_host(gradient), VALUES.sum(0))


def test_functions_for_the_host_write_as_without_a_mesh():
    variable = tf.Variable(0.0)

    def count(x):
        variable.assign_add(1.0)
        return x

    function(count)(VALUES)
    with default_mesh(MESH):
        data = tf.data.Dataset.range(3).map(count)
    assert len(list(data)) == 3
    assert variable.numpy() == 4


def test_mesh_variables_are_written_on_the_mesh():
    with default_mesh(MESH):
        made_there = tf.Variable(to_mesh(VALUES, layout_of(MESH, None, None)))
        function(lambda: made_there.assign_add(made_there))()
        np.testing.assert_array_equal(to_host(made_there), 2 * VALUES)
