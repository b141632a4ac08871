"""Compares `IdReport.sparse_core_limits` with TensorFlow's host ops.

`make test-tensorflow-tpu` runs these tests with tensorflow-tpu, whose ops have
kernels for the CPU.
"""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.tpu import sparse_core_batches

tpu = tf.tpu.experimental.embedding

pytestmark = pytest.mark.skipif(
    not sparse_core_batches.have_kernels(),
    reason="only tensorflow-tpu has kernels of the SparseCore ops",
)


def ragged(generator, num_samples, high):
    sizes = generator.integers(0, 6, num_samples)
    ids = generator.integers(0, high, sizes.sum())
    return tf.RaggedTensor.from_row_lengths(ids, sizes)


@pytest.mark.parametrize(
    "num_cores, per_chip", [(1, 1), (2, 2), (4, 4), (8, 2), (16, 4)]
)
def test_limits_equal_those_of_tensorflows_ops(num_cores, per_chip):
    adam = tpu.Adam(0.1)
    ads = tpu.TableConfig(70, 8, name="ads", optimizer=adam)
    bids = tpu.TableConfig(100, 8, name="bids", optimizer=adam)
    config = [tpu.FeatureConfig(table) for table in (ads, bids, ads, bids)]
    generator = np.random.default_rng(num_cores)
    num_replicas, num_samples = num_cores // per_chip, 8 * num_cores
    batches = []
    for _ in range(10):
        sparse = ragged(generator, num_samples, 7).to_sparse()
        batches.append(
            [
                ragged(generator, num_samples, 70),
                ragged(generator, num_samples, 100),
                sparse,
                tf.constant(generator.integers(0, 5, num_samples)),
            ]
        )
    report = tlm.inspect_ids(
        batches,
        config,
        sparse_cores=tlm.planning.SparseCores(num_cores, per_chip),
    )
    counts = report.sparse_cores[num_cores]["stacks"]["ads_bids"]
    for index, batch in enumerate(batches):
        stacks = [
            stack_of(batch, replica, num_cores, per_chip)
            for replica in range(num_replicas)
        ]
        max_ids = counts["max_ids"][index]
        max_unique = counts["max_unique_ids"][index]
        per_sample = counts["ids_per_chip_per_sample"][index]
        ids, unique = zip(*(stack.stats() for stack in stacks))
        assert (max(ids), max(unique)) == (max_ids, max_unique)
        # The limits are sufficient.
        in_order = [stack.sort(max_ids, max_unique) for stack in stacks]
        for stack, ordered in zip(stacks, in_order):
            stack.buffers(ordered, per_sample)
        # Smaller limits are not sufficient.
        if max_unique > 1:
            with pytest.raises(tf.errors.InvalidArgumentError, match="gets"):
                [stack.sort(max_ids, max_unique - 1) for stack in stacks]
        with pytest.raises(tf.errors.InvalidArgumentError, match="gets"):
            [stack.sort(max_ids - 1, max_unique) for stack in stacks]
        with pytest.raises(tf.errors.InvalidArgumentError, match="per_chip"):
            for stack, ordered in zip(stacks, in_order):
                stack.buffers(ordered, per_sample - 1)


def stack_of(batch, replica, num_cores, per_chip):
    """Returns the samples of one replica."""
    num_samples = 8 * per_chip
    rows = slice(replica * num_samples, (replica + 1) * num_samples)
    sparse = tf.sparse.slice(
        batch[2], [rows.start, 0], [num_samples, batch[2].shape[1]]
    )
    # The second table starts at the next multiple of 8 rows per core.
    offset = -(-70 // (8 * num_cores)) * 8 * num_cores
    rotation = per_chip % num_cores
    feature = sparse_core_batches.Feature
    return sparse_core_batches.Stack(
        {
            "0": feature(batch[0][rows], num_samples),
            "1": feature(batch[1][rows], num_samples, offset, rotation),
            "2": feature(sparse, num_samples),
            "3": feature(batch[3][rows], num_samples, offset, rotation),
        },
        num_cores=num_cores,
        cores_per_chip=per_chip,
    )
