"""A progress bar is shown only while large tables are created."""

import threading

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap._core import ops
from tf_layoutmap.sharded import creation_progress

tpu = tf.tpu.experimental.embedding
SHAPE = (20_000, 64)
SIZE = SHAPE[0] * SHAPE[1] * 4


@pytest.fixture
def show_immediately(monkeypatch):
    monkeypatch.setattr(creation_progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(creation_progress, "FILE_SECONDS", 0.01)
    monkeypatch.setattr(creation_progress, "LEAST_BYTES", 1)


def test_the_op_counts_the_bytes_it_writes():
    before = int(ops.bytes_drawn())
    for initializer in (
        tf.random_uniform_initializer(seed=1),
        tf.zeros_initializer(),
    ):
        tlm.ShardedVariable.create(initializer, shape=SHAPE, num_shards=1)
    assert int(ops.bytes_drawn()) - before == 2 * SIZE


@pytest.mark.parametrize(
    "initializer",
    [
        # This package's op draws these values.
        tf.random_uniform_initializer(seed=1),
        lambda shape: tf.ones(shape),
    ],
)
def test_creating_a_sharded_variable_shows_progress(
    show_immediately, capsys, initializer
):
    tlm.ShardedVariable.create(initializer, shape=SHAPE, num_shards=3)
    printed = capsys.readouterr().out
    assert printed.startswith("Making tables\n")
    assert printed.count("Making tables") == 1
    mib = SIZE >> 20
    assert f"{mib}/{mib}" in printed.splitlines()[-1]


def test_all_tables_of_an_embedding_share_one_progress_bar(
    show_immediately, capsys
):
    embedding = tlm.TPUEmbedding(
        [
            tpu.FeatureConfig(tpu.TableConfig(SHAPE[0], SHAPE[1], name=name))
            for name in ("a", "b")
        ],
        tpu.Adam(0.1),
    )
    embedding.build(per_replica_batch_size=2)
    printed = capsys.readouterr().out
    assert printed.count("Making tables") == 1
    # The bar counts the bytes of the rows and two slot variables.
    mib = 2 * 3 * SIZE >> 20
    assert f"{mib}/{mib}" in printed.splitlines()[-1]


def test_an_error_ends_the_progress_bar(show_immediately, capsys):
    def fail(shape):
        raise KeyError("no such file")

    with pytest.raises(KeyError, match="no such file"):
        tlm.ShardedVariable.create(fail, shape=SHAPE, num_shards=2)
    assert f"0/{SIZE >> 20}" in capsys.readouterr().out
    # After the error, the next progress bar is shown.
    with creation_progress.show_progress(SIZE):
        creation_progress.add_progress(SIZE)
    assert f"{SIZE >> 20}/{SIZE >> 20}" in capsys.readouterr().out


def test_device_scopes_of_the_program_do_not_affect_progress(
    show_immediately, capsys
):
    # The process does not have this device, so an op in the device scope would
    # fail.
    with creation_progress.show_progress(SIZE), tf.device("/job:ps/task:7"):
        creation_progress.add_progress(SIZE)
    with tf.device("/job:ps/task:7"), creation_progress.show_progress(SIZE):
        creation_progress.add_progress(SIZE)
    assert capsys.readouterr().out.count("Making tables") == 2


def test_small_and_fast_tables_print_nothing(monkeypatch, capsys):
    threads = threading.active_count()
    tlm.ShardedVariable.create(tf.zeros_initializer(), shape=SHAPE)
    monkeypatch.setattr(creation_progress, "LEAST_BYTES", 1)
    tlm.ShardedVariable.create(tf.zeros_initializer(), shape=SHAPE)
    assert capsys.readouterr().out == ""
    assert threading.active_count() == threads
