"""Our graphs under TPUStrategy are those of TensorFlow's class."""

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.tpu_engine import canonical, traced_tpu
from tf_layoutmap.embedding.tpu_engine import id_checks

tpu = tf.tpu.experimental.embedding


def trace(cls, is_inside):
    words = tpu.TableConfig(10, 2, tf.ones, combiner="sum", name="words")
    ads = tpu.TableConfig(3, 4, tf.ones, tpu.Adagrad(0.5), name="ads")
    features = {"a": tpu.FeatureConfig(words), "b": tpu.FeatureConfig(ads),
                "c": tpu.FeatureConfig(ads, max_sequence_length=3)}
    strategy = traced_tpu.strategy_of(2)
    with traced_tpu.replaced(), strategy.scope():
        embedding = cls(features, tpu.SGD(0.1))

        def step(batch):
            if is_inside:
                embedding.enqueue(batch, name="n")
            found = embedding.dequeue("n")
            embedding.apply_gradients(
                tf.nest.map_structure(tf.ones_like, {
                    "a": tf.ones([2, 2]), "b": tf.ones([2, 4]),
                    "c": tf.ones([2, 3, 4])}), "n")
            return found

        @tf.function
        def program(*batch):
            batch = dict(zip("abc", batch))
            if not is_inside:
                embedding.enqueue({
                    key: strategy.experimental_distribute_values_from_function(
                        lambda _, one=one: one)
                    for key, one in batch.items()}, name="n")
            strategy.run(step, args=(batch,))

        graph = program.get_concrete_function(
            tf.TensorSpec([2], tf.int32), tf.SparseTensorSpec([2, 3], tf.int64),
            tf.RaggedTensorSpec([2, None], tf.int64)).graph
    return embedding, graph


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_step_is_the_same(is_inside):
    stock, expected = trace(tpu.TPUEmbedding, is_inside)
    ours, found = trace(tlm.TPUEmbedding, is_inside)
    assert ours._state.backend.config_proto == (
        stock._config_proto.SerializeToString())
    assert canonical.operations(found, id_checks.SCOPE) == (
        canonical.operations(expected))
