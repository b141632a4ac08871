"""Tests the memory use of large tables, and updates from many threads."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import peak_memory
from tf_layoutmap.sharded import ShardedVariable

MIB = 1 << 20


USES = {
    "lookup": lambda table, ids: tf.nn.embedding_lookup(table, ids),
    "gather": lambda table, ids: tf.gather(table, ids),
    "slice": lambda table, ids: table[:100],
    "scatter": lambda table, ids: table.scatter_add(
        tf.IndexedSlices(tf.ones([100, 64]), ids)
    ),
    "index tuples": lambda table, ids: table.scatter_nd_add(
        tf.stack([ids, ids * 0], axis=1), tf.ones([100])
    ),
}


@pytest.mark.skipif(not peak_memory.is_available(), reason="Linux counts it")
def test_row_access_does_not_copy_the_table():
    table = ShardedVariable.create(
        tf.zeros_initializer(), [1 << 19, 64], num_shards=8
    )  # The table has 128 MiB.
    ids = tf.range(100, dtype=tf.int64) * 5000
    for name, use in USES.items():
        # The first call initializes the op and is not measured.
        use(table, ids[:100])
        extra = peak_memory.extra_bytes(lambda use=use: use(table, ids))
        assert extra < 8 * MIB, name
    # A dense read copies the table, which the measurement must detect. The read
    # is last, because the reuse of its freed memory would not be counted.
    if peak_memory.extra_bytes(lambda: table.value()) < 100 * MIB:
        pytest.skip("memory that earlier tests freed hides what is taken")


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["div", "mod"])
def test_concurrent_scatters_from_threads_are_all_applied(placement):
    table = ShardedVariable.create(
        np.zeros((40, 4), np.float32), num_shards=4, placement=placement
    )
    wanted = np.zeros((40, 4), np.float32)
    num_threads, num_calls = 4, 10_000
    ids = np.random.default_rng(5).integers(0, 40, (num_threads, num_calls, 3))
    np.add.at(wanted, ids.reshape(-1), 1)
    ones = tf.ones([3, 4])

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def scatter_all(rows):
        for row in rows:
            table.scatter_add(tf.IndexedSlices(ones, row))

    scatter_all(ids[0, :0])
    threads = [
        threading.Thread(target=scatter_all, args=(each,)) for each in ids
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(table.numpy(), wanted)
