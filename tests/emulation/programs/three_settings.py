"""Runs one script on the host, on two replicas and on an emulated TPU.

Runs in a separate process with four cores on two hosts (tests/emulation).
"""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.covering import but
from tests.emulation import training

SETTING = dict(num_cores=4, num_hosts=2, deadline=5.0)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding


def script(strategy, *, sums=None):
    """Trains 200 steps with the same code for each strategy and returns tables.

    The dense part consists of elementwise ops. `sums` selects how the gradient
    of a weight is summed over samples. If it is "float32" or "float64", each
    replica sums its samples in this dtype, and these sums are added. If it is
    "in order", the samples of all replicas are summed in order. If it is None,
    the weight is not trained.
    """
    tables = {
        "ads": tpu.TableConfig(
            40,
            4,
            name="ads",
            combiner="mean",
            initializer=tf.ones_initializer(),
        ),
        "words": tpu.TableConfig(
            30,
            4,
            name="words",
            combiner="sum",
            initializer=tf.ones_initializer(),
        ),
    }
    features = {
        "ad": tpu.FeatureConfig(tables["ads"], name="ad"),
        "title": tpu.FeatureConfig(tables["words"], name="title"),
    }
    with strategy.scope():
        embedding = tlm.TPUEmbedding(features, tpu.Adagrad(0.05))
        dtype = tf.float64 if sums == "float64" else tf.float32
        weight = tf.Variable(tf.ones([4], dtype))
        optimizer = tf.keras.optimizers.SGD(0.001)
        optimizer.build([weight])
    rng = np.random.default_rng(0)
    rows = {
        "ad": rng.integers(0, 40, [200 * 8, 1]),
        "title": rng.integers(0, 30, [200 * 8, 1]),
    }
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(
        8, drop_remainder=True
    )
    iterator = iter(
        strategy.experimental_distribute_dataset(
            dataset,
            tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )
    )

    def core():
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            # The weight is repeated for each sample, so that each sample has a
            # separate gradient.
            weights = tf.repeat(weight[tf.newaxis], len(activations["ad"]), 0)
            tape.watch((activations, weights))
            hidden = tf.cast(activations["ad"] * activations["title"], dtype)
            loss = tf.reduce_sum((hidden * weights - 0.25) ** 2)
        gradients, weight_gradients = tape.gradient(
            loss, (activations, weights)
        )
        embedding.apply_gradients(gradients)
        if sums:
            train_weight(weight_gradients)

    def train_weight(weight_gradients):
        context = tf.distribute.get_replica_context()
        if sums == "in order":
            total = tf.reduce_sum(context.all_gather(weight_gradients, 0), 0)
        else:
            total = context.all_reduce(
                tf.distribute.ReduceOp.SUM, tf.reduce_sum(weight_gradients, 0)
            )
        # Every replica has the same sum, and the strategy averages these equal
        # values.
        optimizer.apply([total / strategy.num_replicas_in_sync], [weight])

    @tf.function
    def train(iterator):
        for _ in tf.range(200):
            embedding.enqueue(next(iterator), training=True)
            strategy.run(core)

    train(iterator)
    values = training.values_of(embedding)
    values["weight"] = weight.numpy()
    return values


def test_three_settings_are_bitwise_equal_after_200_steps():
    wanted = script(tf.distribute.get_strategy())
    assert np.abs(wanted["ads"] - 1).min() > 0
    training.assert_same(script(training.mirrored(2)), wanted)
    tlm.emulation.initialize_tpu_system()
    training.assert_same(script(STRATEGY), wanted)
    assert "200 updates" in tlm.emulation.report()


@pytest.mark.parametrize(
    "sums", but(["float32", "float64", "in order"], "float64")
)
def test_a_trained_weight_changes_values_by_at_most_1e_6(sums):
    wanted = script(tf.distribute.get_strategy(), sums=sums)
    assert np.abs(wanted["weight"] - 1).min() > 1e-3
    for strategy in (training.mirrored(2), STRATEGY):
        tlm.emulation.initialize_tpu_system()
        found = script(strategy, sums=sums)
        if sums != "float32":
            # Only the weight is compared with a tolerance. The tables are
            # bitwise equal, because differences of float64 sums disappear when
            # the tables are rounded to float32, and sums in order do not
            # differ.
            weight = found.pop("weight")
            np.testing.assert_allclose(
                weight, wanted["weight"], rtol=1e-13, atol=0
            )
            training.assert_same(
                found,
                {
                    name: value
                    for name, value in wanted.items()
                    if name != "weight"
                },
            )
            continue
        assert sorted(found) == sorted(wanted)
        for name, value in wanted.items():
            # The largest values are sums of squares near 17, where the distance
            # between float32 values is 2e-6.
            limit = 1e-6 * np.maximum(np.abs(value), 1)
            assert np.all(np.abs(found[name] - value) <= limit), name
