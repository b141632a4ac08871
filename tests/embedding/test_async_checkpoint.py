"""Tests checkpoints that TensorFlow writes in a separate thread."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies

tpu = tf.tpu.experimental.embedding

ASYNC = tf.train.CheckpointOptions(enable_async=True)


def embedding_of(num_shards=1, *, strategy=None, pipelined=False):
    with (strategy or tf.distribute.get_strategy()).scope():
        return tlm.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(
                    7, 2, tf.ones_initializer(), combiner="sum", name="words"
                )
            ),
            tpu.Adagrad(0.5),
            pipelined,
            partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        )


def train(embedding):
    embedding.enqueue(np.array([0, 3, 3, 6]))
    embedding.apply_gradients(tf.ones_like(embedding.dequeue()))


def values_in(path):
    reader = tf.train.load_checkpoint(path)
    return {
        key: reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if "_variables" in key
    }


def assert_same(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_each_save_contains_the_steps_before_it(
    num_shards, pipelined, tmp_path
):
    embedding = embedding_of(num_shards, pipelined=pipelined)
    embedding.build()
    asynchronous = tf.train.Checkpoint(embedding=embedding)
    saved = []
    for step in range(3):
        train(embedding)
        path = asynchronous.save(str(tmp_path / "async"), ASYNC)
        # The next step runs while the checkpoint is written.
        train(embedding)
        asynchronous.sync()
        saved.append(values_in(path))
        ref = embedding_of()
        for _ in range(2 * step + 1):
            train(ref)
        assert_same(
            saved[-1],
            values_in(
                tf.train.Checkpoint(embedding=ref).write(str(tmp_path / "ref"))
            ),
        )
    asynchronous.restore(
        str(tmp_path / "async-1"), ASYNC
    ).assert_existing_objects_matched()
    assert_same(
        values_in(
            tf.train.Checkpoint(embedding=embedding).write(
                str(tmp_path / "restored")
            )
        ),
        saved[0],
    )


def test_two_replicas_save_asynchronously(tmp_path):
    strategy = strategies.mirrored(2)
    embedding = embedding_of(2, strategy=strategy)
    embedding.build()
    step = tf.function(lambda: strategy.run(lambda: train(embedding)))
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    for _ in range(2):
        step()
        path = checkpoint.save(str(tmp_path / "async"), ASYNC)
        checkpoint.sync()
        assert_same(
            values_in(path),
            values_in(
                tf.train.Checkpoint(embedding=embedding).write(
                    str(tmp_path / "now")
                )
            ),
        )


def test_saving_a_late_build_raises(
    tmp_path,
):
    embedding = embedding_of()
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    checkpoint.save(str(tmp_path / "async"), ASYNC)
    checkpoint.sync()
    train(embedding)
    late = checkpoint.save(str(tmp_path / "async"), ASYNC)
    checkpoint.sync()
    # TensorFlow raises the thread's error at the next save.
    with pytest.raises(RuntimeError, match="must be built before the first"):
        checkpoint.save(str(tmp_path / "async"), ASYNC)
    assert late.endswith("async-2") and not list(tmp_path.glob("async-2*"))


def test_restoring_over_steps_in_flight_raises(tmp_path):
    embedding = embedding_of()
    embedding.build()
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    path = checkpoint.save(str(tmp_path / "async"), ASYNC)
    embedding.enqueue(np.array([1]))
    with pytest.raises(RuntimeError, match="in flight"):
        checkpoint.restore(path, ASYNC)
    embedding.reset()
    checkpoint.restore(path, ASYNC).assert_existing_objects_matched()
