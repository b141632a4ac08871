"""Checks that mesh variables can be used in the same way as Keras variables."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap.layout import to_mesh

VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(batch=2, model=2)


@pytest.fixture(
    params=[("model", None), (None, "batch"), (None, None), ("batch", "model")]
)
def variable(request, mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["table"] = layout_of(mesh, *request.param)
    with tlm.layout_map_scope(layout_map):
        created = keras.Variable(VALUE, name="table")
    assert axes_of(created) == request.param
    return created


def test_reading_returns_the_full_value(variable):
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    np.testing.assert_array_equal(np.asarray(variable), VALUE)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), VALUE)
    assert variable.shape == (4, 6) and variable.dtype == "float32"


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "make",
    [
        np.asarray,
        tf.constant,
        lambda x: x.tolist(),
        keras.Variable,
        tf.Variable,
    ],
)
def test_assigning_a_host_value_keeps_the_layout(variable, make):
    before = axes_of(variable)
    variable.assign(make(VALUE * 2))
    np.testing.assert_array_equal(variable.numpy(), VALUE * 2)
    assert axes_of(variable) == before


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "axes", [(None, None), ("model", None), ("batch", "model")]
)
def test_mesh_value_with_any_layout_can_be_assigned(variable, mesh, axes):
    before = axes_of(variable)
    variable.assign(to_mesh(VALUE + 1, layout_of(mesh, *axes)))
    np.testing.assert_array_equal(variable.numpy(), VALUE + 1)
    assert axes_of(variable) == before


def test_assign_add_and_assign_sub_accept_host_values(variable):
    variable.assign_add(VALUE)
    np.testing.assert_array_equal(variable.numpy(), 2 * VALUE)
    variable.assign_sub(tf.constant(VALUE))
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    variable.assign_add(1.0)
    np.testing.assert_array_equal(variable.numpy(), VALUE + 1)


def test_assignment_in_a_function(variable):
    @tf.function
    def double():
        variable.assign(variable * 2.0)
        variable.assign_add(variable)

    double()
    np.testing.assert_array_equal(variable.numpy(), 4 * VALUE)


def test_assigning_a_value_of_another_shape_raises(variable):
    with pytest.raises(ValueError, match="shape"):
        variable.assign(np.zeros((6, 4), np.float32))
    np.testing.assert_array_equal(variable.numpy(), VALUE)


def test_later_writes_to_the_array_do_not_change_the_variable(variable):
    value = VALUE * 3
    variable.assign(value)
    value[:] = -1
    np.testing.assert_array_equal(variable.numpy(), VALUE * 3)


def test_scalar_variable_converts_to_a_number(mesh):
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        scalar = keras.Variable(3, dtype="int32")
    assert int(scalar) == 3 and float(scalar) == 3.0
    assert axes_of(scalar) == ()


def test_arithmetic_with_python_numbers(variable):
    np.testing.assert_array_equal(
        tlm.layout.to_host(variable * 2.0 + 1.0), VALUE * 2 + 1
    )


def test_initializer_may_be_a_string(mesh):
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        ones = keras.Variable("ones", shape=(2, 2))
    np.testing.assert_array_equal(ones.numpy(), np.ones((2, 2)))


def test_default_name_is_the_same_as_without_a_mesh(mesh):
    keras.utils.clear_session()
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        assert keras.Variable(0.0).name == "variable"


def test_deepcopy_raises(variable):
    with pytest.raises(TypeError, match="deepcopy .* is not supported"):
        copy.deepcopy(variable)


def test_copy_of_a_plain_variable_stays_plain(mesh):
    plain = keras.Variable(VALUE)
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        ref = copy.copy(plain)
    assert type(ref) is keras.Variable
    np.testing.assert_array_equal(ref.numpy(), VALUE)


def test_repr_shows_the_value(variable):
    assert "path=table" in repr(variable)
