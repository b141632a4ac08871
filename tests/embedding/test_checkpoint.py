"""Checkpoints of TPUEmbedding."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding import old_checkpoint

tpu = tf.tpu.experimental.embedding


def embedding_of(num_shards=1, *, num_rows=10, start=1.0, optimizer=True):
    table = tpu.TableConfig(
        num_rows,
        2,
        lambda shape: tf.fill(shape, start),
        combiner="sum",
        name="words",
    )
    return tlm.TPUEmbedding(
        tpu.FeatureConfig(table),
        tpu.Adagrad(0.5) if optimizer else None,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )


def train(embedding):
    embedding.enqueue(np.array([1, 2, 2, 9]))
    activations = embedding.dequeue()
    embedding.apply_gradients(tf.ones_like(activations))


def state_of(embedding):
    [table] = embedding.embedding_tables.values()
    [slots] = embedding.slot_variables.values()
    return {
        "parameters": table.numpy(),
        **{name: slot.numpy() for name, slot in slots.items()},
    }


def check_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def save(embedding, path):
    return tf.train.Checkpoint(embedding=embedding).write(str(path / "ckpt"))


def restore(embedding, path):
    return tf.train.Checkpoint(embedding=embedding).read(path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3, 4])
@pytest.mark.parametrize("saved_shards", [1, 3])
def test_checkpoint_restores_into_any_number_of_shards(
    saved_shards, num_shards, built, tmp_path
):
    trained = embedding_of(saved_shards)
    train(trained)
    path = save(trained, tmp_path)
    found = embedding_of(num_shards, start=0.0)
    if built:
        found.build()
    status = restore(found, path)
    found.build()
    status.assert_consumed()
    check_same(state_of(found), state_of(trained))
    train(found)
    train(trained)
    check_same(state_of(found), state_of(trained))


@pytest.mark.parametrize(
    "optimizer",
    [tpu.AdagradMomentum(0.1, momentum=0.5), tpu.Adam(0.1), tpu.FTRL(0.1)],
)
def test_all_slots_are_saved_and_restored(optimizer, tmp_path):
    def make(num_shards):
        return tlm.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(10, 2, tf.ones, combiner="sum", name="words")
            ),
            optimizer,
            partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        )

    trained = make(3)
    train(trained)
    path = save(trained, tmp_path)
    found = make(2)
    restore(found, path)
    train(found)
    train(trained)
    assert len(state_of(found)) == 3
    check_same(state_of(found), state_of(trained))
    stock = tpu.TPUEmbeddingForServing(
        tpu.FeatureConfig(tpu.TableConfig(10, 2, name="words")), optimizer
    )
    stock.build()
    path = save(trained, tmp_path)
    restore(stock, path).expect_partial()
    check_same(
        {name: one.numpy() for name, one in stock._variables["words"].items()},
        state_of(trained),
    )


def test_restore_is_applied_when_a_function_builds(tmp_path):
    trained = embedding_of()
    train(trained)
    found = embedding_of(start=0.0)
    restore(found, save(trained, tmp_path))
    tf.function(lambda: train(found))()
    train(trained)
    check_same(state_of(found), state_of(trained))


def test_a_training_checkpoint_restores_without_slots(tmp_path):
    trained = embedding_of()
    train(trained)
    served = embedding_of(optimizer=False)
    restore(served, save(trained, tmp_path)).expect_partial()
    np.testing.assert_array_equal(
        state_of(served)["parameters"], state_of(trained)["parameters"]
    )


def test_tensorflow_s_class_reads_a_checkpoint(tmp_path):
    trained = embedding_of(3)
    train(trained)
    path = save(trained, tmp_path)
    table = tpu.TableConfig(10, 2, name="words")
    stock = tpu.TPUEmbeddingForServing(
        tpu.FeatureConfig(table), tpu.Adagrad(0.5)
    )
    stock.build()
    restore(stock, path).expect_partial()
    found = {
        name: one.numpy() for name, one in stock._variables["words"].items()
    }
    check_same(found, state_of(trained))


def test_checkpoint_of_tensorflow_s_class_restores(tmp_path):
    table = tpu.TableConfig(10, 2, name="words")
    stock = tpu.TPUEmbeddingForServing(
        tpu.FeatureConfig(table), tpu.Adagrad(0.5)
    )
    stock.build()
    found = embedding_of(3)
    restore(found, save(stock, tmp_path)).expect_partial()
    check_same(
        state_of(found),
        {name: one.numpy() for name, one in stock._variables["words"].items()},
    )


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("built", [False, True])
def test_checkpoint_without_a_registered_saver_restores(
    num_shards, built, tmp_path
):
    rng = np.random.default_rng(0)
    values = {
        name: rng.random([10, 2], np.float32)
        for name in ("words", "words/accumulators")
    }
    path = save(old_checkpoint.OldEmbedding(values), tmp_path)
    assert any(
        "TPUEmbedding_saveable" in name
        for name, _ in tf.train.list_variables(path)
    )
    found = embedding_of(num_shards)
    if built:
        found.build()
    status = restore(found, path)
    found.build()
    status.assert_existing_objects_matched()
    check_same(
        state_of(found),
        {
            "parameters": values["words"],
            "accumulators": values["words/accumulators"],
        },
    )


@pytest.mark.parametrize("num_shards", [1, 3])
def test_another_shape_raises_with_the_table_name(num_shards, tmp_path):
    path = save(built_of(num_rows=8), tmp_path)
    found = embedding_of(num_shards)
    found.build()
    before = state_of(found)
    with pytest.raises(ValueError, match="words"):
        restore(found, path)
    check_same(state_of(found), before)
    unbuilt = embedding_of(num_shards)
    restore(unbuilt, path)
    with pytest.raises(ValueError, match="words"):
        unbuilt.build()


def two_tables(num_rows):
    embedding = tlm.TPUEmbedding(
        [
            tpu.FeatureConfig(tpu.TableConfig(4, 2, tf.ones, name="a/b.c")),
            tpu.FeatureConfig(tpu.TableConfig(num_rows, 2, tf.ones, name="d")),
        ],
        tpu.SGD(0.5),
    )
    embedding.build()
    return embedding


def test_no_table_changes_if_one_has_another_shape(tmp_path):
    saved = two_tables(5)
    for table in saved.embedding_tables.values():
        table.assign(table * 7)
    path = save(saved, tmp_path)
    found = two_tables(6)
    with pytest.raises(ValueError, match=r"'d' .*\[6, 2\].*\[5, 2\]"):
        restore(found, path)
    for table in found.embedding_tables.values():
        assert np.all(table.numpy() == 1)


def test_two_embeddings_can_have_equal_table_names(tmp_path):
    saved = [built_of(num_rows=rows, start=5.0) for rows in (8, 10)]
    path = tf.train.Checkpoint(small=saved[0], large=saved[1]).write(
        str(tmp_path / "ckpt")
    )
    found = [built_of(num_rows=rows) for rows in (8, 10)]
    tf.train.Checkpoint(small=found[0], large=found[1]).read(
        path
    ).assert_consumed()
    for one, other in zip(found, saved, strict=True):
        check_same(state_of(one), state_of(other))


def test_an_embedding_can_be_the_checkpoint_root(tmp_path):
    path = tf.train.Checkpoint(built_of(num_rows=8)).write(
        str(tmp_path / "ckpt")
    )
    with pytest.raises(ValueError, match="'words' must be restored"):
        tf.train.Checkpoint(built_of()).read(path)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_truncated_checkpoint_changes_nothing(num_shards, tmp_path):
    trained = embedding_of()
    train(trained)
    path = save(trained, tmp_path)
    [data] = pathlib.Path(tmp_path).glob("ckpt.data-*")
    data.write_bytes(data.read_bytes()[:-60])
    found = built_of(num_shards)
    before = state_of(found)
    # TensorFlow's reader raises an IndexError for a truncated file.
    with pytest.raises((IndexError, tf.errors.OpError), match="less bytes"):
        restore(found, path)
    check_same(state_of(found), before)


@pytest.mark.parametrize("damaged", ["parameters", "accumulators"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_damaged_variable_prevents_the_restore(num_shards, damaged, tmp_path):
    trained = embedding_of()
    train(trained)
    path = save(trained, tmp_path)
    [data] = pathlib.Path(tmp_path).glob("ckpt.data-*")
    content = bytearray(data.read_bytes())
    content[content.index(state_of(trained)[damaged].tobytes()) + 3] ^= 1
    data.write_bytes(content)
    found = built_of(num_shards)
    before = state_of(found)
    with pytest.raises(tf.errors.DataLossError):
        restore(found, path)
    check_same(state_of(found), before)


@pytest.mark.parametrize("damaged", ["parameters", "accumulators"])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_a_damaged_last_shard_prevents_the_restore(
    num_shards, damaged, tmp_path
):
    trained = embedding_of(3)
    train(trained)
    path = save(trained, tmp_path)
    [data] = pathlib.Path(tmp_path).glob("ckpt.data-*")
    content = bytearray(data.read_bytes())
    content[content.index(state_of(trained)[damaged][7:].tobytes()) + 3] ^= 1
    data.write_bytes(content)
    found = built_of(num_shards, start=5.0)
    before = state_of(found)
    with pytest.raises(tf.errors.DataLossError):
        restore(found, path)
    check_same(state_of(found), before)


def built_of(num_shards=1, **options):
    embedding = embedding_of(num_shards, **options)
    embedding.build()
    return embedding


@pytest.mark.parametrize("dequeued", [False, True])
def test_restoring_over_steps_in_flight_raises(dequeued, tmp_path):
    trained = embedding_of()
    train(trained)
    path = save(trained, tmp_path)
    train(trained)
    before = state_of(trained)
    trained.enqueue(np.array([1]))
    if dequeued:
        trained.dequeue()
    with pytest.raises(RuntimeError, match=r"steps are in flight.*`reset`"):
        restore(trained, path)
    check_same(state_of(trained), before)
    trained.reset()
    restore(trained, path).assert_consumed()
    assert not np.array_equal(
        state_of(trained)["parameters"], before["parameters"]
    )


def test_saving_while_steps_are_in_flight_is_allowed(tmp_path):
    embedding = embedding_of()
    embedding.enqueue(np.array([1]))
    path = save(embedding, tmp_path)
    found = embedding_of(start=0.0)
    restore(found, path)
    check_same(state_of(found), state_of(embedding))


def test_checkpoint_manager_restores_the_newest(tmp_path):
    embedding = embedding_of(3)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(embedding=embedding), str(tmp_path), 1
    )
    for _ in range(2):
        train(embedding)
        manager.save()
    wanted = state_of(embedding)
    train(embedding)
    manager.restore_or_initialize()
    check_same(state_of(embedding), wanted)
