"""Tests tf_layoutmap.embedding.tables: table and slot variables."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tf_layoutmap.embedding import inputs, table_store, tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.partition import FixedShardsPartitioner
from tf_layoutmap.sharded import ShardedVariable

tpu = tf.tpu.experimental.embedding


def create(optimizer=None, *, num_shards=None, num_rows=10, **settings):
    table = tpu.TableConfig(num_rows, 2, name="words", **settings)
    spec, _ = config.read_feature_config(
        inputs.flatten_with_paths(tpu.FeatureConfig(table)), optimizer
    )
    store = table_store.HostStore(
        num_shards and FixedShardsPartitioner(num_shards)
    )
    return store.create(spec)["words"]


def rows_by_number(shape, shard_info=None, dtype=None):
    """Initializes row r of the requested shard to [2 r, 2 r + 1]."""
    assert tuple(shape) == (10, 2)
    full = tf.reshape(tf.range(20, dtype=dtype), shape)
    if shard_info is None:
        return full
    start = shard_info.offset[0]
    return full[start : start + shard_info.shape[0]]


def test_a_table_is_one_variable_with_its_name():
    found = create(tpu.SGD(0.1))
    assert set(found) == {"parameters"}
    assert isinstance(found["parameters"], tf.Variable)
    assert found["parameters"].name == "words:0"
    assert found["parameters"].shape == [10, 2]


def test_slots_have_their_initial_value_and_the_table_s_name():
    found = create(tpu.Adagrad(0.1, initial_accumulator_value=0.25))
    assert found["accumulators"].name == "words/accumulators:0"
    assert np.all(found["accumulators"].numpy() == 0.25)


def test_only_a_table_without_optimizer_is_trainable():
    assert create(None)["parameters"].trainable
    found = create(tpu.Adagrad(0.1))
    assert not found["parameters"].trainable
    assert not found["accumulators"].trainable


def test_a_partitioner_shards_table_and_slots_equally():
    found = create(tpu.Adagrad(0.1), num_shards=3)
    for variable in found.values():
        assert isinstance(variable, ShardedVariable)
        assert [one.shape[0] for one in variable.variables] == [4, 3, 3]
    assert len(tables.shards_of(found["parameters"])) == 3


def test_a_table_with_one_shard_is_a_plain_variable():
    assert isinstance(create(num_shards=1)["parameters"], tf.Variable)


def test_the_number_of_rows_limits_the_shards():
    found = create(num_shards=5, num_rows=2)
    assert len(tables.shards_of(found["parameters"])) == 2


@pytest.mark.parametrize("num_shards", [None, 3])
def test_a_shard_aware_initializer_gives_the_same_rows(num_shards):
    found = create(num_shards=num_shards, initializer=rows_by_number)
    assert found["parameters"].numpy().tolist() == (
        np.arange(20).reshape(10, 2).tolist()
    )


def test_an_initializer_can_take_only_the_shape():
    found = create(num_shards=2, initializer=lambda shape: tf.ones(shape))
    assert np.all(found["parameters"].numpy() == 1)


def test_an_initializer_with_a_wrong_shape_raises():
    with pytest.raises(ValueError, match="'words'"):
        create(initializer=lambda shape: tf.ones([3, 2]))


def test_a_partitioner_of_columns_raises():
    spec, _ = config.read_feature_config(
        [("", tpu.FeatureConfig(tpu.TableConfig(4, 2, name="words")))], None
    )
    with pytest.raises(ValueError, match=r"rows only.*'words'"):
        table_store.HostStore(lambda shape, dtype: [1, 2]).create(spec)


def test_tables_are_not_mirrored():
    with strategies.mirrored(2).scope():
        found = create(tpu.Adagrad(0.1), num_shards=2)
        mirrored = tf.Variable(1.0)
    assert isinstance(mirrored, tf.distribute.DistributedValues)
    for variable in found.values():
        for shard in variable.variables:
            assert not isinstance(shard, tf.distribute.DistributedValues)
            assert shard.device.endswith("CPU:0")


def test_names_do_not_depend_on_the_scope():
    with tf.name_scope("tower"):
        assert create()["parameters"].name == "words:0"


def constant_of(value, num_shards):
    table = tpu.TableConfig(5, 2, tf.constant_initializer(value), name="words")
    embedding = tlm.TPUEmbedding(
        tpu.FeatureConfig(table),
        tpu.SGD(0.1),
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )
    return embedding.embedding_tables[table].numpy()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_constant_initializers_are_supported(num_shards):
    # tf.constant_initializer does not support partitioned initialization.
    assert np.all(constant_of(0.5, num_shards) == 0.5)
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    np.testing.assert_array_equal(constant_of(rows, num_shards), rows)
