"""A strategy whose sums omit replicas causes one warning."""

import warnings

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
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


def test_a_layer_warns_before_it_raises_for_replicas():
    with strategy_of(3, Hierarchical).scope():
        with pytest.warns(_core_strategies.WrongSumsWarning):
            with pytest.raises(RuntimeError, match="3 replicas"):
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
