"""An asynchronous save writes the values of the time of the save."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util import object_identity

from tf_layoutmap.embedding.servers.tables import CopiedCount
from tf_layoutmap.layers.base.tables import ServerTensor
from tf_layoutmap.vocabulary.sharded_numbers import ShardedNumbers


def variables(values):
    return [tf.Variable(value, dtype=tf.int64) for value in values]


CASES = {
    "numbers of a vocabulary": (
        lambda: ShardedNumbers(variables([[3, 1, 5, 2], [3, 1, 7, 4]])),
        [3, 1, 12, 6],
        [9, 1, 2, 0],
    ),
    "count": (lambda: CopiedCount(variables([4, 4])), 4, 9),
    "tensor of variable size": (
        lambda: ServerTensor(tf.constant([1, 2, 3], tf.int64), name="ids"),
        [1, 2, 3],
        [7, 8, 9, 10, 11],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_later_changes_are_not_in_the_copy(case):
    make, before, after = CASES[case]
    one = make()
    copies = object_identity.ObjectIdentityDictionary()
    # TensorFlow copies eagerly in the first save, and in a function later.
    one._copy_trackable_to_cpu(copies)
    one.assign(after)
    np.testing.assert_array_equal(written(copies[one]), before)
    copy = tf.function(lambda: one._copy_trackable_to_cpu(copies))
    for value in (before, after):
        one.assign(value)
        copy()
        one.assign(before)
        np.testing.assert_array_equal(written(copies[one]), value)


@pytest.mark.parametrize("case", CASES)
def test_an_asynchronous_save_writes_the_copy(case, tmp_path):
    make, before, after = CASES[case]
    one = make()
    saved = tf.train.Checkpoint(one=one)
    options = tf.train.CheckpointOptions(enable_async=True)
    for value in (before, after):
        one.assign(value)
        path = saved.save(str(tmp_path / "saved"), options)
        saved.sync()
        found = tf.train.load_variable(path, "one/.ATTRIBUTES/VARIABLE_VALUE")
        np.testing.assert_array_equal(found, value)


def written(one):
    (value,) = one._serialize_to_tensors().values()
    return value.numpy()
