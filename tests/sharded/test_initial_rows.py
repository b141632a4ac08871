"""Tests the values and the memory use of initial rows."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import peak_memory
from tf_layoutmap._core import random_tensors
from tf_layoutmap.embedding import table_variable

tpu = tf.tpu.experimental.embedding


@pytest.mark.parametrize("seed", [None, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_tables_of_an_embedding_match_the_initializer(num_shards, seed):
    def initializer():
        tf.random.set_seed(5)
        return tf.random_uniform_initializer(seed=seed)

    made = initializer()
    embedding = tlm.TPUEmbedding(
        tpu.FeatureConfig(tpu.TableConfig(50, 4, made, name="t")),
        tpu.SGD(0.1),
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )
    embedding.build()
    np.testing.assert_array_equal(
        np.asarray(next(iter(embedding.embedding_tables.values()))),
        initializer()((50, 4)),
    )


@pytest.mark.skipif(
    not peak_memory.is_available(), reason="counts memory as Linux does"
)
@pytest.mark.parametrize("num_shards", [4])
def test_creation_allocates_memory_for_one_table(num_shards):
    shape = (1 << 18, 64)  # 64 MiB
    kept = []
    extra = peak_memory.extra_bytes(
        lambda: kept.append(
            tlm.ShardedVariable.create(
                tf.random_uniform_initializer(), shape, num_shards=num_shards
            )
        )
    )
    assert extra < 1.5 * 4 * shape[0] * shape[1]


@pytest.mark.skipif(
    not peak_memory.is_available(), reason="counts memory as Linux does"
)
def test_creating_16_bit_rows_does_not_copy_all_rows():
    shape = (1 << 19, 64)  # 64 MiB
    embedding = tlm.TPUEmbedding(
        tpu.FeatureConfig(tpu.TableConfig(*shape, name="t")),
        tpu.SGD(0.1),
        table_dtypes="bfloat16",
    )
    gc.collect()
    extra = peak_memory.extra_bytes(embedding.build)
    assert extra < 2 * 2 * shape[0] * shape[1]


@pytest.mark.parametrize("block_bytes", [1, 4 * 4 * 7, 1 << 24])
def test_16_bit_rows_are_rounded_initial_values(block_bytes, monkeypatch):
    monkeypatch.setattr(table_variable, "_BLOCK_BYTES", block_bytes)
    embedding = tlm.TPUEmbedding(
        tpu.FeatureConfig(
            tpu.TableConfig(
                50, 4, tf.random_uniform_initializer(seed=2), name="t"
            )
        ),
        tpu.SGD(0.1),
        table_dtypes="bfloat16",
        partitioner=tlm.partitioners.FixedShardsPartitioner(3),
    )
    embedding.build()
    (table,) = embedding.embedding_tables.values()
    expected = tf.cast(
        tf.random_uniform_initializer(seed=2)((50, 4)), "bfloat16"
    )
    np.testing.assert_array_equal(
        tf.convert_to_tensor(table), tf.cast(expected, tf.float32)
    )


@pytest.mark.parametrize("least_size", [1, 1 << 22])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-(2**63), tf.int64), (5, tf.int64), (0, tf.int32), (-7, tf.int32)],
)
def test_integer_fills_match_tensorflow(value, dtype, least_size, monkeypatch):
    monkeypatch.setattr(random_tensors, "_LEAST_FILL_BYTES", least_size)
    found = random_tensors.fill((101, 8), value, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.full([101, 8], value))
    # Updating a variable that was initialized with the result must not change
    # the result.
    variable = tf.Variable(found)
    variable[3, 1].assign(9)
    assert variable.numpy()[3, 1] == 9 and found.numpy()[3, 1] == value
