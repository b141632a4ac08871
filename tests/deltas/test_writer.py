"""Deltas written by `DeltaWriter`, compared with full checkpoints."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.deltas import cases
from tests.files import full_disk
from tf_layoutmap.deltas import delta_files

tpu = tf.tpu.experimental.embedding


def check(one, base, directory, tmp_path):
    """Checks that base and deltas together equal a checkpoint of this state."""
    wanted = cases.tensors(cases.save(one, tmp_path / "wanted"))
    full = tlm.deltas.apply(base, directory, tmp_path / "full")
    found = cases.tensors(full)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, name
    return full


@pytest.mark.parametrize(
    ("num_shards", "arguments"),
    [
        (1, {}),
        (3, {"optimizer": tpu.Adagrad(0.25), "table_dtypes": "bfloat16"}),
        (2, {"pipeline_execution_with_tensor_core": True}),
    ],
    ids=["one_shard", "three_shards_of_bfloat16", "pipelined"],
)
def test_base_and_deltas_equal_a_full_checkpoint(
    num_shards, arguments, tmp_path
):
    one = cases.embedding(num_shards=num_shards, **arguments)
    for step in range(3):
        cases.train(one, step)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    vocabulary = one.vocabularies["words"]
    for number in range(5):
        last = 3 * number + 5
        for step in range(last - 2, last + 1):
            cases.train(one, step)
        one.flush()
        gone = vocabulary.evict(vocabulary.keys()[number : number + 3])
        assert len(gone) == 3
        if number == 2:
            assert len(vocabulary.evict_expired()) > 0
        delta = writer.write()
        assert delta.meta.sequence == number + 1
        assert delta.meta.tables["words"]["to_step"] == last + 1
        check(one, base, tmp_path / "deltas", tmp_path)
    assert vocabulary.stats()["num_evicted"] > vocabulary.stats()["num_expired"]
    # No row has changed since the last delta, so the next delta is empty.
    assert {
        name: table["num_rows"]
        for name, table in writer.write().meta.tables.items()
    } == {"words": 0, "kinds": 0}


def test_only_changed_rows_are_written(tmp_path):
    one = cases.embedding()
    cases.train(one, 0)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path, base=base)
    # The key is admitted when it occurs for the second time.
    for _ in range(2):
        one.enqueue(
            {"word": tf.constant([1_000_000]), "kind": tf.constant([7])},
            training=True,
        )
        one.dequeue()
        one.apply_gradients({"word": tf.ones([1, 3]), "kind": tf.ones([1, 2])})
    one(features={"word": tf.constant([1]), "kind": tf.constant([8])})
    delta = tf.train.load_checkpoint(writer.write().tensors)
    assert delta.get_tensor("kinds/rows").tolist() == [7]
    assert delta.get_tensor("kinds/parameters").shape == (1, 2)
    row = int(one.vocabularies["words"].lookup(1_000_000))
    assert delta.get_tensor("words/rows").tolist() == [row]
    assert delta.get_tensor("words/vocabulary_keys").tolist() == [1_000_000]
    assert len(delta.get_tensor("words/vocabulary_sketch_rows")) == 2


def test_a_restarted_process_continues_the_deltas(tmp_path):
    one = cases.embedding()
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path, base=base)
    for step in range(4):
        cases.train(one, step)
        writer.write()
    # Simulates the staging folder that a killed writer leaves behind.
    (tmp_path / f".writing-00000005.partial-{'0' * 16}").mkdir()
    again = cases.embedding(num_shards=3)
    full = check(one, base, tmp_path, tmp_path)
    tf.train.Checkpoint(embedding=again).restore(full)
    writer = tlm.deltas.DeltaWriter(again, tmp_path, base=base)
    assert not list(tmp_path.glob(".writing*"))
    assert len(writer.deltas) == 4
    for step in range(4, 8):
        cases.train(again, step)
        cases.train(one, step)
    delta = writer.write()
    assert delta.meta.tables["words"] == {
        **delta.meta.tables["words"],
        "from_step": 4,
        "to_step": 8,
    }
    assert delta.meta.tables["kinds"]["num_rows"] < 15
    check(one, base, tmp_path, tmp_path)


def test_changes_outside_of_steps_are_written(tmp_path):
    one = cases.embedding(num_shards=2)
    cases.train(one, 0)
    base = cases.save(one, tmp_path / "base")
    # The deltas must include these steps, which ran before the writer was
    # created.
    for step in (1, 2):
        cases.train(one, step)
    other = cases.save(one, tmp_path / "other")
    writer = tlm.deltas.DeltaWriter(one, tmp_path, base=base)
    writer.write()
    check(one, base, tmp_path, tmp_path)
    cases.train(one, 3)
    tf.train.Checkpoint(embedding=one).restore(other)
    writer.write()
    check(one, base, tmp_path, tmp_path)
    table = list(one.embedding_tables.values())[0]
    table.scatter_update(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3])))
    assert writer.write(compare=True).meta.tables["kinds"]["num_rows"] == 1
    check(one, base, tmp_path, tmp_path)


def test_training_continues_while_files_are_written(tmp_path, monkeypatch):
    one = cases.embedding()
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path, base=base)
    cases.train(one, 0)
    wanted = cases.tensors(cases.save(one, tmp_path / "wanted"))
    may_write, write = threading.Event(), delta_files.write_files

    def slow_write(*arguments):
        assert may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(delta_files, "write_files", slow_write)
    assert writer.write(wait=False) is None
    for step in (1, 2, 3):
        cases.train(one, step)
    assert writer.deltas == []
    may_write.set()
    assert writer.finish().meta.sequence == 1
    # The delta contains the state at the time when `write` was called.
    assert cases.tensors(tlm.deltas.apply(base, tmp_path)) == wanted
    writer.write()
    check(one, base, tmp_path, tmp_path)


def test_a_delta_is_a_consistent_snapshot(tmp_path):
    one = tlm.TPUEmbedding(
        {
            "id": tpu.FeatureConfig(
                tpu.TableConfig(
                    100,
                    2,
                    initializer=tf.zeros_initializer(),
                    combiner="sum",
                    name="words",
                )
            )
        },
        tpu.SGD(1.0),
    )
    one.build()
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path, base=base)
    stop = threading.Event()

    def train():
        while not stop.is_set():
            one.enqueue({"id": tf.range(100)})
            one.dequeue()
            one.apply_gradients({"id": -tf.ones([100, 2])})

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(10):
            writer.write()
    finally:
        stop.set()
        thread.join()
    seen = []
    for delta in writer.deltas:
        found = np.unique(
            tf.train.load_checkpoint(delta.tensors).get_tensor(
                "words/parameters"
            )
        )
        # The delta contains the update of a step for all of its rows or for
        # none.
        assert len(found) <= 1
        seen.extend(found)
    assert len(seen) > 1 and seen == sorted(seen)


def test_changes_of_a_failed_write_are_in_the_next_delta(tmp_path):
    one = cases.embedding()
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    cases.train(one, 0)
    with pytest.raises(OSError, match="File too large.*00000001"):
        with full_disk.full_disk():
            writer.write()
    assert not list((tmp_path / "deltas").iterdir())
    cases.train(one, 1)
    with full_disk.full_disk():
        writer.write(wait=False)
        with pytest.raises(OSError, match="File too large.*00000001"):
            writer.finish()
    assert writer.write().meta.sequence == 1
    check(one, base, tmp_path / "deltas", tmp_path)


def test_only_the_latest_writer_of_an_embedding_writes(tmp_path):
    one = cases.embedding()
    base = cases.save(one, tmp_path / "base")
    first = tlm.deltas.DeltaWriter(one, tmp_path / "first", base=base)
    second = tlm.deltas.DeltaWriter(one, tmp_path / "second", base=base)
    with pytest.raises(RuntimeError, match="later watch"):
        first.write()
    second.write()
    # Simulates another process that writes to the same directory.
    (tmp_path / "second" / "00000002").mkdir()
    with pytest.raises(OSError, match="00000002' already exists"):
        second.write()


def test_invalid_writer_arguments_raise(tmp_path):
    one = cases.embedding()
    base = cases.save(one, tmp_path / "base")
    twice = tf.train.Checkpoint(embedding=one, other=cases.embedding()).save(
        tmp_path / "twice"
    )
    other = cases.save(cases.embedding(capacity=200), tmp_path / "other")
    with pytest.raises(TypeError, match="`embedding` must be a tlm.TPUEmbedd"):
        tlm.deltas.DeltaWriter(tf.Variable(1.0), tmp_path, base=base)
    with pytest.raises(ValueError, match="`base` must be the prefix of a che"):
        tlm.deltas.DeltaWriter(one, tmp_path, base=tmp_path / "nothing")
    with pytest.raises(ValueError, match="embedding once.*several times"):
        tlm.deltas.DeltaWriter(one, tmp_path, base=twice)
    with pytest.raises(ValueError, match="have other variables or shapes"):
        tlm.deltas.DeltaWriter(one, tmp_path, base=other)
    unbuilt = tlm.TPUEmbedding(
        one._state.feature_config,
        tpu.SGD(0.1),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(100)},
    )
    with pytest.raises(RuntimeError, match="requires a built TPUEmbedding"):
        tlm.deltas.DeltaWriter(unbuilt, tmp_path, base=base)


def test_deltas_of_a_layer_trained_by_fit(tmp_path):
    config = tpu.TableConfig(64, 3, combiner="sum", name="words")
    layer = tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(config),
        tpu.Adagrad(0.25),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(64)},
    )
    ids = keras.Input([1], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", "mse")
    checkpoint = tf.train.Checkpoint(embedding=layer.embedding)
    base = checkpoint.save(tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(layer, tmp_path, base=base)
    for first in (0, 30, 60):
        model.fit(
            np.arange(first, first + 40).reshape(-1, 1),
            np.ones([40, 1]),
            batch_size=4,
            verbose=0,
        )
        writer.write()
        check(layer.embedding, base, tmp_path, tmp_path)
    assert layer.embedding.vocabularies["words"].stats()["num_evicted"] > 0
    # Loading weights changes the tables without a training step.
    model.save_weights(tmp_path / "some.weights.h5")
    model.fit(
        np.arange(40).reshape(-1, 1), np.ones([40, 1]), batch_size=4, verbose=0
    )
    model.load_weights(tmp_path / "some.weights.h5")
    writer.write()
    check(layer.embedding, base, tmp_path, tmp_path)


def test_replicas_write_one_delta(tmp_path):
    with strategies.mirrored(2).scope():
        one = cases.embedding(num_shards=2)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path, base=base)
    strategy = one._state.replicas.strategy

    @tf.function
    def step(words, kinds):
        def run(words, kinds):
            one.enqueue({"word": words, "kind": kinds})
            found = one.dequeue()
            one.apply_gradients(tf.nest.map_structure(tf.ones_like, found))

        strategy.run(run, (words, kinds))

    for number in range(3):
        for each in range(3):
            step(
                tf.range(number * 20, number * 20 + 30, dtype=tf.int64),
                tf.constant([each, number]),
            )
        writer.write()
        check(one, base, tmp_path, tmp_path)
