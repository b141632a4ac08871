"""Variables on a mesh have names of their own, their handles have not."""

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


def test_the_operation_that_makes_a_handle_is_the_same_for_all_names():
    first, second = variable("first", 1.0), variable("second", 2.0)
    assert (first.name, second.name) == ("first:0", "second:0")
    for one in (first, second):
        assert f'ResourceHandle(name="{mesh_variable.HANDLE_NAME}' in repr(
            one.handle
        )


def test_each_variable_has_a_value_of_its_own():
    second = variable("one", 2.0)

    def with_another():
        first = variable("one", 1.0)
        first.assign_add(first + second)
        with default_mesh(MESH):
            tf.function(lambda: second.assign_sub(first), autograph=False)()
        np.testing.assert_array_equal(to_host(first), [4] * 4)
        return weakref.ref(first)

    end = with_another()
    gc.collect()
    assert end() is None
    np.testing.assert_array_equal(to_host(second), [-2] * 4)


def test_variables_on_the_host_keep_their_name():
    assert "counter" in repr(tf.Variable(1.0, name="counter").handle)
