"""Tests tensors of variable size on servers."""

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap.layers.base.tables import ServerTensor


@pytest.fixture
def tensor():
    return ServerTensor(tf.zeros([0, 2]), name="t")


@pytest.mark.parametrize("size", [0, 1, 5])
def test_values_of_any_first_size_are_stored(tensor, size):
    value = np.random.default_rng(0).normal(size=[size, 2]).astype(np.float32)

    @tf.function
    def step(value):
        tensor.assign(tf.concat([tensor.value(), value], axis=0))
        return tensor.value()

    assert step(tf.constant(value)).numpy().tolist() == value.tolist()
    tensor.assign(value)
    np.testing.assert_array_equal(tensor.numpy(), value)


def test_another_row_size_raises(tensor):
    with pytest.raises(tf.errors.InvalidArgumentError):
        tensor.assign(tf.zeros([1, 3]))


def test_checkpoints_are_exchanged_with_a_variable(tensor, tmp_path):
    tensor.assign([[1, 2], [3, 4]])
    path = tf.train.Checkpoint(one=tensor).write(str(tmp_path / "tensor"))
    variable = tf.Variable(tf.zeros([0, 2]), shape=[None, 2])
    tf.train.Checkpoint(one=variable).read(path).assert_consumed()
    assert variable.numpy().tolist() == [[1, 2], [3, 4]]
    variable.assign([[5, 6]])
    path = tf.train.Checkpoint(one=variable).write(str(tmp_path / "variable"))
    tf.train.Checkpoint(one=tensor).read(path).assert_consumed()
    assert tensor.numpy().tolist() == [[5, 6]]
