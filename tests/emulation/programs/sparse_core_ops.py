"""Tests the host ops of SparseCores with the kernels of this package."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

SETTING = dict(num_cores=2, deadline=2.0)
tlm.emulation.enable(**SETTING)

from tests.embedding.tpu.test_sparse_core_ops import *  # noqa: E402, F403
from tests.embedding.tpu.test_sparse_core_ops import convert  # noqa: E402


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(values=np.array([1, -2], np.int32)), "must not be negative.*-2"),
        (
            dict(indices_or_row_splits=np.array([0, 3, 2], np.int32)),
            "must ascend from 0 to the number of ids, 2",
        ),
        (
            dict(indices_or_row_splits=np.array([0, 1, 1], np.int32)),
            "must ascend from 0 to the number of ids, 2",
        ),
        (
            dict(indices_or_row_splits=np.zeros([1, 2], np.int32)),
            "one row per id",
        ),
        (
            dict(indices_or_row_splits=np.zeros([2, 3], np.int32)),
            "should be 2. But got 3",
        ),
        (
            dict(sample_count=2, num_sc_per_chip=4),
            "not divisible by the number of sparsecores",
        ),
    ],
)
def test_inputs_that_read_other_memory_on_a_tpu_raise(changes, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        convert(**changes)


def test_the_statistics_of_tensorflow_run():
    """TensorFlow's function requires version 2.21 for several features."""
    if tf.__version__ < "2.21":
        pytest.skip("TensorFlow 2.20 adds each table once per feature")
    tpu = tf.tpu.experimental.embedding
    adam = tpu.Adam(0.1)
    tables = [tpu.TableConfig(100, 8, name=n, optimizer=adam) for n in "ab"]
    config = [
        tpu.FeatureConfig(tables[index], output_shape=[16])
        for index in (0, 1, 0)
    ]
    generator = np.random.default_rng(0)
    batch = [tf.constant(generator.integers(0, 9, 16)) for _ in config]
    max_ids, max_unique = tpu.TPUEmbeddingV2.compute_sparse_core_stats(
        batch, config, num_tpu_chips=2, num_sc_per_chip=4
    )
    limits = tlm.inspect_ids(
        [batch],
        config,
        sparse_cores=tlm.planning.SparseCores(8, replicas_per_batch=1),
    ).sparse_core_limits()
    assert limits.max_ids_per_table == {"a_b": int(max_ids["a_b"])}
    assert limits.max_unique_ids_per_table == {"a_b": int(max_unique["a_b"])}


def sort(**changes):
    arguments = dict(
        row_ids_list=[np.array([0, 1], np.int32)],
        col_ids_list=[np.array([3, 4], np.int32)],
        gains_list=[np.ones([2], np.float32)],
        sample_count_list=[2],
        col_offset_list=[0],
        num_replica=1,
        table_vocab_size=8,
        feature_width=8,
        num_sc_per_chip=1,
        max_ids_per_sparse_core=4,
        max_unique_ids_per_sparse_core=4,
        table_name="t",
    )
    return tf.raw_ops.SortListOfSparseCoreCooTensors(**{**arguments, **changes})


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(row_ids_list=[np.zeros([1], np.int32)]), "1 elements for row"),
        (dict(gains_list=[np.ones([3], np.float32)]), "3 elements for gains"),
        (dict(col_ids_list=[np.array([1, -1], np.int32)]), "col id -1"),
        (dict(row_ids_list=[np.array([-1, 1], np.int32)]), "row id -1"),
        (dict(col_offset_list=[0, 1]), "one element per feature, 1"),
        (dict(sample_count_list=[0]), "must be at least 1"),
        (dict(num_replica=3), "num_physical_replica to be a power of two"),
    ],
)
def test_invalid_ids_raise(changes, words):
    with pytest.raises(
        (
            tf.errors.InvalidArgumentError,
            tf.errors.FailedPreconditionError,
        ),
        match=words,
    ):
        sort(**changes)


def fill(counts, **changes):
    ids = np.array([0, 1], np.int32)
    arguments = dict(
        sorted_row_ids_list=[ids],
        sorted_col_ids_list=[ids],
        sorted_gains_list=[np.ones([2], np.float32)],
        id_counts_list=[np.array(counts, np.int32)],
        splits=tf.constant(0, tf.int64),
        sample_count_per_sc=8,
        num_replica=2,
        max_minibatches_per_sc=1,
        max_ids_per_chip_per_sample=1,
        table_vocab_size=8,
        feature_width=8,
        table_name="t",
        allow_id_dropping=False,
    )
    return tf.raw_ops.ConvertToSparseCoreCsrWrappedCooTensor(
        **{**arguments, **changes}
    )


@pytest.mark.parametrize(
    "counts, changes, words",
    [
        ([0, 2], {}, "either 3 elements.*or 129 elements.*got 2"),
        ([0, 1, 3], {}, "last element of id counts 3 should not exceed"),
        ([0, 2, 1], {}, "must ascend"),
        ([-1, 0, 1], {}, "must ascend"),
        ([0, 1, 2], dict(sample_count_per_sc=7), "divisible by the xla_pad"),
        (
            [0, 1, 2],
            dict(splits=tf.constant(1, tf.int64)),
            "minibatches per sparse core is 2",
        ),
        (
            [0, 1, 2],
            dict(max_ids_per_chip_per_sample=2**30),
            "less than 2\\^31 elements",
        ),
    ],
)
def test_invalid_counts_raise(counts, changes, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        fill(counts, **changes)
