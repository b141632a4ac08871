"""Registration of ops with tf.dtensor."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tests.strategies  # noqa: F401  splits the CPU before the first op
from tests.dtensor.test_sharded_rows import on_mesh, to_numpy
from tf_layoutmap import _ops
from tf_layoutmap import dtensor as tlm_dtensor


@pytest.fixture(scope="module")
def mesh():
    return dtensor.create_mesh(
        [("batch", 2), ("model", 2)], devices=[f"CPU:{i}" for i in range(4)])


def test_ops_can_be_registered_with_the_tensorflow_of_this_process():
    assert tlm_dtensor.available()
    assert tlm_dtensor.unavailable_reason() == ""


def test_an_elementwise_op_runs_on_each_part_and_keeps_the_layout(mesh):
    tlm_dtensor.register_op("Expint", "elementwise")
    x = np.linspace(0.1, 2, 32, dtype=np.float32).reshape(4, 8)
    specs = ["batch", "model"]

    @tf.function
    def f(x):
        return tf.math.special.expint(x)

    y = f(on_mesh(x, specs, mesh))
    assert dtensor.fetch_layout(y).sharding_specs == specs
    np.testing.assert_array_equal(
        to_numpy(y, mesh), tf.math.special.expint(x).numpy())


def test_registering_twice_is_fine_and_otherwise_is_refused():
    tlm_dtensor.register_op("Expint", "elementwise")
    with pytest.raises(ValueError, match="is registered with policy"):
        tlm_dtensor.register_op("Expint", "replicated")


def test_what_tensorflow_divides_by_itself_is_left_alone():
    with pytest.raises(RuntimeError, match="'Relu' has an expander"):
        tlm_dtensor.register_op("Relu", "elementwise")


def test_unknown_ops_and_policies_are_refused():
    with pytest.raises(ValueError, match="must be the name of a registered"):
        tlm_dtensor.register_op("NoSuchOp", "elementwise")
    with pytest.raises(ValueError, match="`policy` must be one of"):
        tlm_dtensor.register_op("Expint", "rowwise")


def test_missing_ops_work_on_divided_tensors_once_enabled(mesh):
    enabled = tlm_dtensor.enable_missing_ops()
    assert set(enabled) <= set(tlm_dtensor.policies.MISSING_OPS)
    assert tlm_dtensor.enable_missing_ops() == ()
    assert all(map(_ops.native.has_expander, tlm_dtensor.policies.MISSING_OPS))
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    on_devices = on_mesh(x, ["batch", "model"], mesh)
    segments = on_mesh(np.array([0, 0, 1, 1, 1, 2, 2, 3]), ["batch"], mesh)

    @tf.function
    def f(x, segments):
        return (tf.reverse(x, [0]), tf.roll(x, 1, 0),
                tf.math.segment_sum(x, segments))

    reverse, rolled, summed = f(on_devices, segments)
    np.testing.assert_array_equal(to_numpy(reverse, mesh), x[::-1])
    np.testing.assert_array_equal(to_numpy(rolled, mesh), np.roll(x, 1, 0))
    np.testing.assert_array_equal(
        to_numpy(summed, mesh), np.add.reduceat(x, [0, 2, 5, 7]))
