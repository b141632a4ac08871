"""A strategy whose sums omit replicas causes one warning."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.layout.meshes import mesh_of
from tf_layoutmap._core import strategies as _core_strategies

tpu = tf.tpu.experimental.embedding
Hierarchical = tf.distribute.HierarchicalCopyAllReduce
OneDevice = tf.distribute.ReductionToOneDevice


def strategy_of(num_replicas, kind):
    return tf.distribute.MirroredStrategy(
        [f"CPU:{replica}" for replica in range(num_replicas)],
        cross_device_ops=kind(),
    )


def embedding():
    return tlm.TPUEmbedding(
        tpu.FeatureConfig(tpu.TableConfig(4, 1)), tpu.SGD(1.0)
    )


@pytest.mark.parametrize("num_replicas", [3, 5, 7])
def test_an_embedding_warns_if_sums_omit_the_last_replica(num_replicas):
    with strategy_of(num_replicas, Hierarchical).scope():
        with pytest.warns(
            _core_strategies.WrongSumsWarning,
            match=f"from sums over {num_replicas} replicas",
        ):
            embedding()
        with warnings.catch_warnings():
            warnings.simplefilter("error", _core_strategies.WrongSumsWarning)
            embedding()  # The second embedding must not warn again.


@pytest.mark.parametrize(
    "num_replicas, kind", [(2, Hierarchical), (4, Hierarchical), (3, OneDevice)]
)
def test_correct_sums_do_not_warn(num_replicas, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error", _core_strategies.WrongSumsWarning)
        with strategy_of(num_replicas, kind).scope():
            embedding()


def test_a_layer_warns_if_sums_over_replicas_are_wrong():
    with strategy_of(3, Hierarchical).scope():
        with pytest.warns(_core_strategies.WrongSumsWarning):
            tlm.layers.ShardedEmbedding(4, 1).build(())


@pytest.mark.parametrize("num_replicas", [2, 3, 5, 7])
def test_the_strategies_of_the_tests_sum_over_all_replicas(num_replicas):
    strategy = strategies.mirrored(num_replicas)

    @tf.function
    def total():
        def of_replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce(
                tf.distribute.ReduceOp.SUM,
                tf.cast(context.replica_id_in_sync_group + 1, tf.float32),
            )

        return strategy.run(of_replica)

    for found in strategy.experimental_local_results(total()):
        assert float(found) == num_replicas * (num_replicas + 1) / 2


@pytest.fixture
def two_replicas():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_a_mesh_inside_a_strategy_of_two_replicas_raises(two_replicas):
    layout_map = tlm.LayoutMap(mesh_of(batch=2))
    with two_replicas.scope():
        with pytest.raises(RuntimeError, match="MirroredStrategy with 2 repl"):
            with tlm.layout_map_scope(layout_map):
                pass


def test_a_model_on_a_mesh_does_not_train_in_two_replicas(two_replicas):
    with tlm.layout_map_scope(tlm.LayoutMap(mesh_of(batch=2))):
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    with two_replicas.scope():
        model.compile("sgd", "mse")
        with pytest.raises(RuntimeError, match="outside of the scope"):
            model.fit(np.ones([4, 4]), np.ones([4, 1]), verbose=0)


def test_a_distributed_variable_of_one_replica_has_a_handle():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
        handle = _core_strategies.handle_of(variable)
        table = tlm.ShardedVariable([variable])
        np.testing.assert_array_equal(tf.gather(table, [1, 0]), [2.0, 1.0])
        table.scatter_add(tf.IndexedSlices(tf.constant([1.0]), [1]))
    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    np.testing.assert_array_equal(read, [1.0, 3.0])
