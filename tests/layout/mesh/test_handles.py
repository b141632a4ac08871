"""Checks that a mesh variable's handle does not contain its name."""

import gc
import weakref

import numpy as np
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.mesh import variable as mesh_variable

MESH = mesh_of(batch=2, model=2)


def variable(name, value):
    return tf.experimental.dtensor.DVariable(
        to_mesh([value] * 4, layout_of(MESH, "batch")), name=name
    )


def test_handles_of_all_names_are_created_by_the_same_op():
    first, second = variable("first", 1.0), variable("second", 2.0)
    assert (first.name, second.name) == ("first:0", "second:0")
    for one in (first, second):
        assert f'ResourceHandle(name="{mesh_variable.HANDLE_NAME}' in repr(
            one.handle
        )


def test_each_variable_has_a_separate_value():
    second = variable("one", 2.0)

    def read_beside_another():
        first = variable("one", 1.0)
        first.assign_add(first + second)
        with default_mesh(MESH):
            tf.function(lambda: second.assign_sub(first), autograph=False)()
        np.testing.assert_array_equal(to_host(first), [4] * 4)
        return weakref.ref(first)

    end = read_beside_another()
    gc.collect()
    assert end() is None
    np.testing.assert_array_equal(to_host(second), [-2] * 4)


def test_host_variables_keep_their_name():
    assert "counter" in repr(tf.Variable(1.0, name="counter").handle)
