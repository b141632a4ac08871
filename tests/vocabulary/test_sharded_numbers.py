"""`ShardedNumbers` reads and assigns totals over the shards of a vocabulary."""

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap.vocabulary.sharded_numbers import ShardedNumbers

# Step, kind and counts of each shard. A step that failed on the second server
# is counted on the first server only.
SHARDS = [[7, 2, 10, 0], [6, 2, 5, 3], [7, 2, 0, 1]]
TOTAL = [7, 2, 15, 4]


@pytest.fixture
def numbers():
    return ShardedNumbers([tf.Variable(one, dtype=tf.int64) for one in SHARDS])


def test_totals_are_read(numbers):
    np.testing.assert_array_equal(numbers.numpy(), TOTAL)
    assert [int(numbers[index]) for index in range(4)] == TOTAL


def test_assigned_totals_are_read_again_and_each_shard_continues(numbers):
    numbers.assign([9, 1, 20, 30])
    np.testing.assert_array_equal(numbers.numpy(), [9, 1, 20, 30])
    for one in numbers.variables:
        assert one.numpy()[:2].tolist() == [9, 1]


def test_a_checkpoint_restores_into_another_number_of_shards(numbers, tmp_path):
    path = tf.train.Checkpoint(numbers=numbers).write(str(tmp_path / "numbers"))
    other = ShardedNumbers([tf.Variable(tf.zeros([4], tf.int64))])
    tf.train.Checkpoint(numbers=other).read(path).assert_consumed()
    np.testing.assert_array_equal(other.numpy(), TOTAL)
