"""Tests the patch that makes TensorFlow's optimizers write their config."""

import google.protobuf
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.tpu import optimization_parameters_pb2

from tf_layoutmap._core import patches
from tf_layoutmap.emulation import tpu_answers

tpu = tf.tpu.experimental.embedding
Parameters = optimization_parameters_pb2.OptimizationParameters
PROTOBUF = tuple(int(n) for n in google.protobuf.__version__.split(".")[:2])


def write(optimizer):
    parameters = Parameters()
    optimizer._set_optimization_parameters(parameters)
    return parameters


@pytest.mark.skipif(
    PROTOBUF < (7, 34), reason="this protobuf version accepts a bool"
)
def test_without_the_patch_stock_optimizers_raise():
    with pytest.raises(TypeError, match="low_dimensional_packing_status"):
        write(tpu.SGD(0.1))


@pytest.mark.parametrize(
    "optimizer", [tpu.SGD, tpu.Adagrad, tpu.AdagradMomentum, tpu.Adam, tpu.FTRL]
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_with_the_patch_stock_optimizers_write_all_fields(optimizer, is_packed):
    one = optimizer(
        0.5,
        clipvalue=2.0,
        weight_decay_factor=0.25,
        low_dimensional_packing_status=is_packed,
    )
    with tpu_answers.enum_patch_installed():
        written = write(one)
    assert written.low_dimensional_packing_status == int(is_packed)
    assert written.gradient_clipping_limits.lower.value == -2.0
    assert written.weight_decay_factor == 0.25
    assert written.WhichOneof("parameters")
    assert one.low_dimensional_packing_status is is_packed


def test_the_patch_is_removed_after_its_last_user():
    before = tpu.SGD._set_optimization_parameters
    base = tpu.SGD.__mro__[1]
    original = base._set_optimization_parameters
    patches.install("tpu_optimizer_enum")
    with tpu_answers.enum_patch_installed():
        write(tpu.SGD(0.1))
    write(tpu.SGD(0.1))
    patches.uninstall("tpu_optimizer_enum")
    assert base._set_optimization_parameters is original
    assert tpu.SGD._set_optimization_parameters is before
    with pytest.raises(RuntimeError, match="must follow an `install`"):
        patches.uninstall("tpu_optimizer_enum")


def test_an_error_inside_the_block_removes_the_patch():
    base = tpu.SGD.__mro__[1]
    original = base._set_optimization_parameters
    with pytest.raises(KeyError), tpu_answers.enum_patch_installed():
        raise KeyError
    assert base._set_optimization_parameters is original
