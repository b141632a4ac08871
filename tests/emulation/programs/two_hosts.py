"""Tests four cores on two hosts, in a separate process (tests/emulation)."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.emulation import training

SETTING = dict(num_cores=4, num_hosts=2, deadline=5.0)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding


def optimizer():
    return tpu.Adam(0.1)


def kinds():
    """Returns a strategy and an embedding factory for each kind of training."""
    one = tf.distribute.get_strategy()
    two = training.mirrored(2)

    def on_host(strategy):
        with strategy.scope():
            return training.host_embedding(
                optimizer, strategy.num_replicas_in_sync
            )

    return {
        "host": (one, lambda: on_host(one)),
        "two replicas": (two, lambda: on_host(two)),
        "stock": (
            STRATEGY,
            lambda: training.tpu_embedding("stock", STRATEGY, optimizer),
        ),
        "ours": (
            STRATEGY,
            lambda: training.tpu_embedding("ours", STRATEGY, optimizer),
        ),
    }


KINDS = kinds()


def serving_values(path):
    """Returns the tables and slots that TensorFlow's CPU class restores."""
    embedding = tpu.TPUEmbeddingForServing(
        training.feature_config(optimizer), None
    )
    embedding.build()
    tf.train.Checkpoint(it=embedding).read(path).assert_consumed()
    return training.values_of(embedding)


@pytest.fixture(scope="module", name="trained")
def fixture_trained(tmp_path_factory):
    """Returns a checkpoint for each kind of training, after the same steps."""
    paths = {}
    for kind, (strategy, make) in KINDS.items():
        embedding = make()
        training.train(strategy, embedding, steps=range(3))
        paths[kind] = tf.train.Checkpoint(it=embedding).write(
            str(tmp_path_factory.mktemp("trained") / "it")
        )
    return paths


def test_all_kinds_train_bitwise_equally(trained):
    wanted = training.values_in(trained["host"])
    # The embedding has three tables with two slot variables each.
    assert len(wanted) == 9
    for path in trained.values():
        training.assert_same(training.values_in(path), wanted)


@pytest.fixture(scope="module", name="continued")
def fixture_continued():
    """Returns the values after two more steps, without a checkpoint."""
    strategy, make = KINDS["host"]
    host = make()
    training.train(strategy, host, steps=range(3))
    training.train(strategy, host, seed=1, steps=range(2))
    return training.values_of(host)


def _writers_and_readers():
    """Yields all pairs. `make test` runs one pair per writer and reader."""
    for number, writer in enumerate(KINDS):
        for place, reader in enumerate(KINDS):
            is_next = place == (number + 1) % len(KINDS)
            yield pytest.param(
                writer,
                reader,
                marks=[] if is_next else [pytest.mark.exhaustive],
            )


@pytest.mark.parametrize("writer, reader", list(_writers_and_readers()))
def test_each_kind_continues_every_checkpoint(
    writer, reader, trained, continued
):
    strategy, make = KINDS[reader]
    if reader == "stock" and writer != "stock":
        # TensorFlow's class can restore checkpoints of other classes only
        # before it is built. After `build`, it loads only its own checkpoints
        # into the TPU.
        embedding = training.tpu_embedding(
            reader, strategy, optimizer, is_built=False
        )
        tf.train.Checkpoint(it=embedding).read(trained[writer])
        embedding.build(training.NUM_SAMPLES // 4)
    else:
        embedding = make()
        status = tf.train.Checkpoint(it=embedding).read(trained[writer])
        status.assert_existing_objects_matched()
        if reader == "host":
            status.assert_consumed()
    training.train(strategy, embedding, seed=1, steps=range(2))
    training.assert_same(training.values_of(embedding), continued)


def test_tensorflow_s_cpu_class_restores_the_checkpoints(trained):
    wanted = training.values_in(trained["host"])
    for kind in ("stock", "ours", "host"):
        training.assert_same(serving_values(trained[kind]), wanted)


def test_shards_are_placed_on_their_hosts():
    embedding = training.tpu_embedding("stock", STRATEGY, optimizer)
    shards = embedding._variables["ads"]["parameters"].variables
    assert [shard.shape[0] for shard in shards] == [12, 11]
    assert [shard.device[-5:] for shard in shards] == ["CPU:4", "CPU:5"]


@pytest.mark.parametrize("kind", training.CLASSES)
def test_fewer_rows_than_hosts_are_supported(kind):
    tlm.emulation.initialize_tpu_system()
    with STRATEGY.scope():
        embedding = training.CLASSES[kind](
            tpu.FeatureConfig(
                tpu.TableConfig(
                    1, 3, initializer=tf.ones_initializer(), name="one"
                )
            ),
            tpu.SGD(0.5),
        )
        embedding.build(1)

    @tf.function
    def step(ids):
        def core():
            embedding.dequeue()
            embedding.apply_gradients(tf.ones([1, 3]))

        embedding.enqueue(ids)
        STRATEGY.run(core)

    step(
        STRATEGY.experimental_distribute_values_from_function(
            lambda context: tf.constant([0], tf.int64)
        )
    )
    np.testing.assert_array_equal(
        training.values_of(embedding)["one"], [[-1, -1, -1]]
    )
