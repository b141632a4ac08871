"""`TPUEmbeddingV2` on servers, and under TPUStrategy without SparseCores."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import values

import tf_layoutmap as tlm
from tests import strategies
from tests.embedding.servers import local
from tests.embedding.tpu import canonical, replicated_graph, traced_tpu

tpu = tf.tpu.experimental.embedding
NUM_ROWS, BATCH = 12, 4


def initializer(shape, dtype=tf.float32):
    return tf.cast(tf.reshape(tf.range(shape[0] * shape[1]), shape), dtype)


def config():
    table = tpu.TableConfig(
        NUM_ROWS, 2, initializer, combiner="sum", name="words"
    )
    return {
        name: tpu.FeatureConfig(table, output_shape=[BATCH]) for name in "ab"
    }


def embedding_of(cls=tlm.TPUEmbeddingV2, **options):
    embedding = cls(config(), tpu.Adagrad(0.5), **options)
    embedding.build()
    return embedding


def batch_of(seed):
    ids = np.random.default_rng(seed).integers(0, NUM_ROWS, 12)
    return tf.RaggedTensor.from_row_lengths(tf.constant(ids), [3, 0, 5, 4])


def v1_step(embedding, ids):
    # The name is an attribute of operations of a TPU.
    embedding.enqueue({"a": ids, "b": ids}, name="lookup_1")
    found = embedding.dequeue(name="lookup_1")
    embedding.apply_gradients(
        {"a": found["a"] * 0.5 - 1.0, "b": found["b"] * 0.25}, name="lookup_1"
    )
    return found["a"]


def v2_step(embedding, ids):
    found, preserved = embedding({"a": ids, "b": ids})
    embedding.apply_gradients(
        {"a": found["a"] * 0.5 - 1.0, "b": found["b"] * 0.25}, preserved
    )
    return found["a"]


def rows_of(embedding):
    return embedding.get_embedding_tables()["words"].numpy()


@pytest.mark.parametrize("is_traced", [False, True])
def test_steps_on_servers_equal_steps_of_one_process(is_traced):
    with local.servers(2):
        on_servers = embedding_of()
    host = embedding_of()
    steps = [
        lambda ids, embedding=embedding: v2_step(embedding, ids)
        for embedding in (on_servers, host)
    ]
    if is_traced:
        steps = [tf.function(step, reduce_retracing=True) for step in steps]
    for seed in range(3):
        found, expected = [step(batch_of(seed)) for step in steps]
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(rows_of(on_servers), rows_of(host))


def program_of(strategy, embedding, step):
    """Returns a function that runs a step with the ids of two replicas."""

    def replica(ids):
        return step(embedding, ids)

    def program(*ids):
        return strategy.run(replica, (values.PerReplica(ids),)).values

    return tf.function(program, autograph=False)


SPEC = tf.RaggedTensorSpec([BATCH, None], tf.int64, 1)


def test_tables_on_the_host_beside_a_tpu_train_as_with_two_replicas():
    strategy = traced_tpu.strategy_of(2, embedding=traced_tpu.UNSUPPORTED)
    with traced_tpu.replaced():
        with strategy.scope():
            beside = embedding_of()
        program = program_of(strategy, beside, v2_step)
        run = replicated_graph.runner(
            program.get_concrete_function(SPEC, SPEC), 2
        )
    mirrored = strategies.mirrored(2)
    with mirrored.scope():
        expected = embedding_of()
    step = program_of(mirrored, expected, v2_step)
    for seed in range(3):
        parts = [batch_of(2 * seed), batch_of(2 * seed + 1)]
        found = run(*tf.nest.flatten(parts, True))
        for part, wanted in zip(found, step(*parts), strict=True):
            np.testing.assert_array_equal(part, wanted)
    np.testing.assert_array_equal(rows_of(beside), rows_of(expected))


def test_the_graph_on_an_embedding_engine_equals_that_of_v1():
    graphs = []
    for cls, step in (
        (tlm.TPUEmbedding, v1_step),
        (tlm.TPUEmbeddingV2, v2_step),
    ):
        strategy = traced_tpu.strategy_of(2)
        with traced_tpu.replaced(), strategy.scope():
            embedding = embedding_of(cls)
            program = program_of(strategy, embedding, step)
            graphs.append(program.get_concrete_function(SPEC, SPEC).graph)
    expected, found = [canonical.operations(graph) for graph in graphs]
    assert any("EnqueueTPU" in kind for kind, _ in expected)
    assert found == expected
