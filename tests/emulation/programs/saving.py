"""Tests checkpoints that an emulated TPU writes and restores.

Runs in a separate process with four cores, on the number of hosts that the
environment sets (tests/emulation). The process also restores the files that the
previous process wrote.
"""

import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding import old_checkpoint
from tests.emulation import training

NUM_HOSTS = int(os.environ.get("TF_LAYOUTMAP_NUM_HOSTS", "4"))
EXCHANGE = pathlib.Path(os.environ.get("TF_LAYOUTMAP_EXCHANGE", "/nowhere"))
SETTING = dict(num_cores=4, num_hosts=NUM_HOSTS, deadline=5.0)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding
ASYNC = tf.train.CheckpointOptions(enable_async=True)


def optimizer():
    return tpu.Adagrad(0.1)


def host(num_shards):
    return training.host_embedding(
        optimizer,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )


def train_host(embedding, **options):
    training.train(tf.distribute.get_strategy(), embedding, **options)


def on_tpu(kind, path=None):
    """Returns a built embedding, restored from `path` if `path` is set."""
    # TensorFlow's class can restore checkpoints of other classes only before it
    # is built. After `build`, it loads only its own checkpoints into the TPU.
    is_late = path is not None and kind == "stock"
    embedding = training.tpu_embedding(
        kind, STRATEGY, optimizer, is_built=not is_late
    )
    if path is not None:
        tf.train.Checkpoint(it=embedding).read(path)
    if is_late:
        embedding.build(training.NUM_SAMPLES // 4)
    return embedding


@pytest.fixture(name="kind", params=training.CLASSES)
def fixture_kind(request):
    return request.param


@pytest.fixture(scope="module", name="wanted")
def fixture_wanted():
    """Returns the values after three steps, and the values after five steps."""
    embedding = host(1)
    train_host(embedding, steps=range(3))
    before = training.values_of(embedding)
    train_host(embedding, seed=1, steps=range(2))
    return before, training.values_of(embedding)


def write(embedding, path):
    return tf.train.Checkpoint(it=embedding).write(str(path))


def test_a_damaged_file_changes_nothing(tmp_path):
    # Only tf_layoutmap's class guarantees this.
    path = write(host(5), tmp_path / "it")
    [data] = tmp_path.glob("it.data-*")
    content = bytearray(data.read_bytes())
    content[content.index(training.rows_of("words")[-1].tobytes())] ^= 1
    data.write_bytes(content)
    embedding = on_tpu("ours")
    training.train(STRATEGY, embedding, steps=range(2))
    wanted = training.values_of(embedding)
    with pytest.raises(tf.errors.DataLossError):
        tf.train.Checkpoint(it=embedding).read(path)
    assert any(
        np.any(wanted[name] != training.rows_of(name))
        for name in training.TABLES
    )
    training.assert_same(training.values_of(embedding), wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_a_checkpoint_of_the_host_continues_on_the_tpu(
    kind, num_shards, wanted, tmp_path
):
    embedding = host(num_shards)
    train_host(embedding, steps=range(3))
    found = on_tpu(kind, write(embedding, tmp_path / "it"))
    training.train(STRATEGY, found, seed=1, steps=range(2))
    training.assert_same(training.values_of(found), wanted[1])


def test_a_checkpoint_of_the_tpu_continues_on_the_host(kind, wanted, tmp_path):
    embedding = on_tpu(kind)
    training.train(STRATEGY, embedding, steps=range(3))
    path = write(embedding, tmp_path / "it")
    training.assert_same(training.values_in(path), wanted[0])
    for num_shards in (1, 3):
        found = host(num_shards)
        tf.train.Checkpoint(it=found).read(
            path
        ).assert_existing_objects_matched()
        train_host(found, seed=1, steps=range(2))
        training.assert_same(training.values_of(found), wanted[1])
    served = tpu.TPUEmbeddingForServing(
        training.feature_config(optimizer), None
    )
    served.build()
    tf.train.Checkpoint(it=served).read(path).assert_consumed()
    training.assert_same(training.values_of(served), wanted[0])


def test_files_of_another_number_of_hosts_restore(kind, wanted):
    for path in EXCHANGE.glob("*.index"):
        found = on_tpu(kind, str(path).removesuffix(".index"))
        training.train(STRATEGY, found, seed=1, steps=range(2))
        training.assert_same(training.values_of(found), wanted[1])


def test_writes_files_for_another_number_of_hosts(kind):
    if not EXCHANGE.is_dir():
        pytest.skip("no other process reads the files")
    embedding = on_tpu(kind)
    training.train(STRATEGY, embedding, steps=range(3))
    write(embedding, EXCHANGE / f"{kind}_{NUM_HOSTS}")


def test_an_async_save_contains_the_steps_before_it(kind, tmp_path):
    embedding, ref = on_tpu(kind), host(1)
    checkpoint = tf.train.Checkpoint(it=embedding)
    for step in range(3):
        training.train(STRATEGY, embedding, steps=[step])
        path = checkpoint.save(str(tmp_path / "it"), ASYNC)
        train_host(ref, steps=[step])
        wanted = training.values_of(ref)
        # The next step runs while the checkpoint is written.
        training.train(STRATEGY, embedding, steps=[step], seed=1)
        train_host(ref, steps=[step], seed=1)
        checkpoint.sync()
        training.assert_same(training.values_in(path), wanted)


def test_files_without_a_registered_saver_restore(kind, wanted, tmp_path):
    path = write(old_checkpoint.OldEmbedding(wanted[0]), tmp_path / "it")
    found = on_tpu(kind, path)
    training.train(STRATEGY, found, seed=1, steps=range(2))
    training.assert_same(training.values_of(found), wanted[1])


def test_deltas_contain_the_rows_that_differ_from_the_files(tmp_path):
    # Only tf_layoutmap's class has deltas.
    embedding = on_tpu("ours")
    base, deltas = write(embedding, tmp_path / "base"), tmp_path / "deltas"
    writer = tlm.deltas.DeltaWriter(embedding, deltas, base=base)
    for step in range(2):
        training.train(STRATEGY, embedding, steps=[step])
        changed = writer.write().meta.tables
        assert changed["ads"]["variables"] == ["parameters", "accumulators"]
    full = str(tlm.deltas.apply(base, deltas, tmp_path / "full"))
    wanted = training.values_of(embedding)
    training.assert_same(training.values_in(full), wanted)
    again = tlm.deltas.DeltaWriter(embedding, deltas, base=base)
    with pytest.raises(RuntimeError, match="only one writer at a time"):
        writer.write()
    unchanged = again.write().meta.tables
    assert [one["num_rows"] for one in unchanged.values()] == [0, 0, 0]
    restored = on_tpu("ours", full)
    training.assert_same(training.values_of(restored), wanted)


def test_a_restore_between_two_deltas_is_a_change(tmp_path):
    embedding = on_tpu("ours")
    base, deltas = write(embedding, tmp_path / "base"), tmp_path / "deltas"
    writer = tlm.deltas.DeltaWriter(embedding, deltas, base=base)
    training.train(STRATEGY, embedding, steps=range(1))
    assert writer.write().meta.tables["few"]["num_rows"] > 0
    tf.train.Checkpoint(it=embedding).read(base)
    writer.write()
    full = str(tlm.deltas.apply(base, deltas, tmp_path / "full"))
    training.assert_same(training.values_in(full), training.values_in(base))
