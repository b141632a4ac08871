"""Four cores on two hosts; a process of its own (tests/emulation)."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.emulation import training

STRATEGY = tlm.emulation.enable(num_cores=4, num_hosts=2, deadline=5.0)

tpu = tf.tpu.experimental.embedding


def optimizer():
    return tpu.Adam(0.1)


def mirrored(num_replicas):
    return tf.distribute.MirroredStrategy(
        [f"CPU:{replica}" for replica in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice())


def kinds():
    """Each way to train: its strategy, and how its embedding is made."""
    one = tf.distribute.get_strategy()
    two = mirrored(2)

    def on_host(strategy):
        with strategy.scope():
            return training.host_embedding(
                optimizer, strategy.num_replicas_in_sync)

    return {
        "host": (one, lambda: on_host(one)),
        "two replicas": (two, lambda: on_host(two)),
        "stock": (STRATEGY, lambda: training.tpu_embedding(
            "stock", STRATEGY, optimizer)),
        "ours": (STRATEGY, lambda: training.tpu_embedding(
            "ours", STRATEGY, optimizer))}


KINDS = kinds()


def serving_values(path):
    """What TensorFlow's class for CPUs restores, tables and slots."""
    embedding = tpu.TPUEmbeddingForServing(
        training.feature_config(optimizer), None)
    embedding.build()
    tf.train.Checkpoint(it=embedding).read(path).assert_consumed()
    return training.values_of(embedding)


@pytest.fixture(scope="module", name="trained")
def fixture_trained(tmp_path_factory):
    """A checkpoint of each after the same three steps."""
    paths = {}
    for kind, (strategy, make) in KINDS.items():
        embedding = make()
        training.train(strategy, embedding, steps=range(3))
        paths[kind] = tf.train.Checkpoint(it=embedding).write(
            str(tmp_path_factory.mktemp("trained") / "it"))
    return paths


def test_all_train_to_the_same_bits(trained):
    wanted = training.values_in(trained["host"])
    assert len(wanted) == 9  # three tables with two slots
    for path in trained.values():
        training.assert_same(training.values_in(path), wanted)


@pytest.mark.parametrize("writer", KINDS)
def test_every_checkpoint_is_restored_by_all_and_trained_on(writer, trained):
    host_strategy, make = KINDS["host"]
    host = make()
    tf.train.Checkpoint(it=host).read(trained[writer]).assert_consumed()
    training.train(host_strategy, host, seed=1, steps=range(2))
    wanted = training.values_of(host)
    for kind, (strategy, make) in KINDS.items():
        if kind == "host":
            continue
        if kind == "stock" and writer != "stock":
            # Once built, TensorFlow's class sends to its TPU only what its own
            # kind has written; before that, it creates what was restored.
            embedding = training.tpu_embedding(
                kind, strategy, optimizer, is_built=False)
            tf.train.Checkpoint(it=embedding).read(trained[writer])
            embedding.build(training.NUM_SAMPLES // 4)
        else:
            embedding = make()
            tf.train.Checkpoint(it=embedding).read(
                trained[writer]).assert_existing_objects_matched()
        training.train(strategy, embedding, seed=1, steps=range(2))
        training.assert_same(training.values_of(embedding), wanted)


def test_stock_class_for_cpus_restores_what_the_tpu_wrote(trained):
    wanted = training.values_in(trained["host"])
    for kind in ("stock", "ours", "host"):
        training.assert_same(serving_values(trained[kind]), wanted)


def test_shards_lie_on_their_hosts():
    embedding = training.tpu_embedding("stock", STRATEGY, optimizer)
    shards = embedding._variables["ads"]["parameters"].variables
    assert [shard.shape[0] for shard in shards] == [12, 11]
    assert [shard.device[-5:] for shard in shards] == ["CPU:4", "CPU:5"]


@pytest.mark.parametrize("kind", training.CLASSES)
def test_fewer_rows_than_hosts_are_fine(kind):
    tlm.emulation.initialize_tpu_system()
    with STRATEGY.scope():
        embedding = training.CLASSES[kind](
            tpu.FeatureConfig(tpu.TableConfig(
                1, 3, initializer=tf.ones_initializer(), name="one")),
            tpu.SGD(0.5))
        embedding.build(1)

    @tf.function
    def step(ids):
        def core():
            embedding.dequeue()
            embedding.apply_gradients(tf.ones([1, 3]))
        embedding.enqueue(ids)
        STRATEGY.run(core)

    step(STRATEGY.experimental_distribute_values_from_function(
        lambda context: tf.constant([0], tf.int64)))
    np.testing.assert_array_equal(
        training.values_of(embedding)["one"], [[-1, -1, -1]])


def script(strategy, *, trains_weight=False):
    """A program that does not know where it runs; its tables after 200 steps.

    Its dense part is elementwise; its weight, if trained, sums over samples.
    """
    tables = {
        "ads": tpu.TableConfig(40, 4, name="ads", combiner="mean",
                               initializer=tf.ones_initializer()),
        "words": tpu.TableConfig(30, 4, name="words", combiner="sum",
                                 initializer=tf.ones_initializer())}
    features = {"ad": tpu.FeatureConfig(tables["ads"], name="ad"),
                "title": tpu.FeatureConfig(tables["words"], name="title")}
    with strategy.scope():
        embedding = tlm.TPUEmbedding(features, tpu.Adagrad(0.05))
        weight = tf.Variable(tf.ones([4]))
        optimizer = tf.keras.optimizers.SGD(0.001)
        optimizer.build([weight])
    rng = np.random.default_rng(0)
    rows = {"ad": rng.integers(0, 40, [200 * 8, 1]),
            "title": rng.integers(0, 30, [200 * 8, 1])}
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(
        8, drop_remainder=True)
    iterator = iter(strategy.experimental_distribute_dataset(
        dataset, tf.distribute.InputOptions(
            experimental_fetch_to_device=False)))

    def core():
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            tape.watch(activations)
            hidden = activations["ad"] * activations["title"]
            loss = tf.reduce_sum((hidden * weight - 0.25) ** 2)
        gradients, of_weight = tape.gradient(loss, (activations, weight))
        embedding.apply_gradients(gradients)
        if trains_weight:
            of_weight = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, of_weight)
            # Every replica has the sum; the mean of equal values is the same.
            optimizer.apply([of_weight / strategy.num_replicas_in_sync],
                            [weight])

    @tf.function
    def train(iterator):
        for _ in tf.range(200):
            embedding.enqueue(next(iterator), training=True)
            strategy.run(core)

    train(iterator)
    values = training.values_of(embedding)
    values["weight"] = weight.numpy()
    return values


def test_one_script_in_three_settings_gives_the_same_bits_after_200_steps():
    wanted = script(tf.distribute.get_strategy())
    assert np.abs(wanted["ads"] - 1).min() > 0
    training.assert_same(script(mirrored(2)), wanted)
    tlm.emulation.initialize_tpu_system()
    training.assert_same(script(STRATEGY), wanted)
    assert "200 updates" in tlm.emulation.report()


def test_one_script_with_dense_weights_agrees_within_a_millionth():
    wanted = script(tf.distribute.get_strategy(), trains_weight=True)
    assert np.abs(wanted["weight"] - 1).min() > 1e-3
    for strategy in (mirrored(2), STRATEGY):
        tlm.emulation.initialize_tpu_system()
        found = script(strategy, trains_weight=True)
        assert sorted(found) == sorted(wanted)
        for name, value in wanted.items():
            # The dense gradient is summed in another order.
            np.testing.assert_allclose(found[name], value, rtol=1e-6)
