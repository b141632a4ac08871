"""Runs one script with `TPUEmbeddingV2` on the host, on two replicas and a TPU.

Runs in separate processes for a TPU with an embedding engine and for TPUs with
SparseCores (tests/emulation).
"""

import os

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.emulation import training

TPU = os.environ.get("TF_LAYOUTMAP_TPU", "v4")
SETTING = dict(num_cores=2, deadline=5.0, tpu=TPU)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding
BATCH, NUM_STEPS = 16, 20


def rows(shape, dtype=None):
    del dtype
    generator = np.random.default_rng(shape[0])
    return generator.normal(size=shape).astype(np.float32)


def script(strategy):
    """Trains 20 steps with the same code for each strategy; returns tables."""
    words = tpu.TableConfig(40, 4, rows, combiner="sum", name="words")
    users = tpu.TableConfig(23, 4, rows, combiner="sum", name="users")
    samples = [BATCH // strategy.num_replicas_in_sync]
    with strategy.scope():
        embedding = tlm.TPUEmbeddingV2(
            {
                "title": tpu.FeatureConfig(words, output_shape=samples),
                "user": tpu.FeatureConfig(users, output_shape=samples),
            },
            tpu.Adagrad(0.05),
        )
    generator = np.random.default_rng(0)
    size = NUM_STEPS * BATCH
    dataset = tf.data.Dataset.from_tensor_slices(
        {
            "title": tf.RaggedTensor.from_row_lengths(
                generator.integers(0, 40, size), [0, 2] * (size // 2)
            ),
            "user": generator.integers(0, 23, size),
        }
    ).batch(BATCH, drop_remainder=True)
    iterator = iter(
        strategy.experimental_distribute_dataset(
            dataset,
            tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )
    )

    def core(features):
        activations, preserved = embedding.embedding_lookup(features)
        with tf.GradientTape() as tape:
            tape.watch(activations)
            hidden = activations["title"] * 0.5 + activations["user"]
            loss = tf.reduce_sum((hidden - 0.25) ** 2)
        embedding.apply_gradients(tape.gradient(loss, activations), preserved)

    @tf.function
    def train(iterator):
        for _ in tf.range(NUM_STEPS):
            strategy.run(core, args=(next(iterator),))

    train(iterator)
    return {
        name: table.numpy()
        for name, table in embedding.get_embedding_tables().items()
    }


def test_all_settings_are_bitwise_equal():
    expected = script(tf.distribute.get_strategy())
    assert (expected["users"] != rows((23, 4))).any(axis=1).all()
    training.assert_same(script(training.mirrored(2)), expected)
    tlm.emulation.initialize_tpu_system()
    training.assert_same(script(STRATEGY), expected)
