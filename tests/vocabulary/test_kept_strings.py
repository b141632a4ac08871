"""Vocabularies with `keep_strings=True` return the strings of their keys."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.embedding.host import open_table_cases as cases
from tf_layoutmap._core import types
from tf_layoutmap.partition import FixedShardsPartitioner
from tf_layoutmap.vocabulary import kept_strings, key_tensors

tpu = tf.tpu.experimental.embedding


def make(capacity=64, *, num_shards=1, features=("ids",), **arguments):
    one, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(capacity, keep_strings=True, **arguments),
        tpu.Adagrad(0.1),
        num_shards=num_shards,
        features=features,
        sequence=2,
    )
    one.build()
    return one


def train(one, ids):
    one.enqueue({"ids": ids})
    found = one.dequeue()
    one.apply_gradients(tf.nest.map_structure(tf.ones_like, found))


def test_stats_have_the_entries_of_their_type():
    stats = make().vocabularies["words"].stats()
    assert set(stats) == set(types.VocabularyStats.__annotations__)


def words(numbers):
    return tf.constant([f"word {number}" for number in numbers])


def names(one):
    return sorted(one.vocabularies["words"].keys().numpy().tolist())


def test_keys_are_strings_in_the_order_of_their_rows():
    one = make(num_shards=3)
    vocabulary = one.vocabularies["words"]
    assert vocabulary.keys().dtype == tf.string
    assert vocabulary.keys().shape == [0]
    train(one, tf.constant(["b", "a", "", "b\0c", "é"]))
    found = vocabulary.keys()
    assert names(one) == [b"", b"a", b"b", b"b\0c", "é".encode()]
    rows = vocabulary.lookup(found).numpy()
    assert (rows == np.sort(rows)).all() and (rows >= 0).all()
    stats = vocabulary.stats()
    assert (stats["num_strings"], stats["num_string_bytes"]) == (5, 7)
    assert (stats["num_collisions"], stats["collisions"]) == (0, [])


def test_only_strings_of_keys_with_a_row_are_kept():
    one = make(admission="count", min_count=2)
    train(one, tf.constant(["a", "b", "b"]))
    assert names(one) == [b"b"]
    assert one.vocabularies["words"].stats()["num_strings"] == 1
    one.enqueue({"ids": tf.constant(["a"])}, training=False)
    one.dequeue()
    one({"ids": tf.constant(["a"])})
    train(one, tf.constant(["a"]))
    assert names(one) == [b"a", b"b"]


def test_forward_steps_keep_no_strings():
    """Keys that were written as hashes get no string in a forward-only step."""
    one = make()
    vocabulary = one.vocabularies["words"]
    hashes = key_tensors.hash_strings(tf.constant(["a"])).numpy()
    block = tlm.vocabulary.KeyBlock(hashes, np.ones([1, 3]), key_type="strings")
    tlm.vocabulary.import_rows([block], vocabulary)
    one.enqueue({"ids": tf.constant(["a"])}, training=False)
    one.dequeue()
    one({"ids": tf.constant(["a"])})
    assert next(vocabulary.blocks()).strings.tolist() == [None]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="strings of some keys.*'words'"
    ):
        vocabulary.keys()
    train(one, tf.constant(["a"]))
    assert names(one) == [b"a"]


@pytest.mark.parametrize("is_traced", [False, True])
def test_all_forms_of_inputs_are_kept(is_traced):
    one = make(features=("ids", "text"))

    def step(first, training):
        ragged = tf.RaggedTensor.from_row_lengths(
            tf.strings.join([first, tf.constant(["r0", "r1", "r2"])]), [3, 0]
        )
        sparse = tf.SparseTensor(
            [[0, 0], [1, 1]], tf.strings.join([first, ["s0", "s1"]]), [2, 2]
        )
        one.enqueue({"ids": sparse, "text": ragged}, training=training)
        found = one.dequeue()
        if training is True:
            one.apply_gradients(tf.nest.map_structure(tf.ones_like, found))

    if is_traced:
        step = tf.function(step)
    step(tf.constant("x"), True)
    step(tf.constant("y"), False)
    # The sequence feature "text" has two positions, so "r2" gets no row.
    known = names(one)
    assert {b"xs0", b"xs1", b"xr0", b"xr1"} <= set(known)
    assert not [one for one in known if one.startswith(b"y")]
    vocabulary = one.vocabularies["words"]
    assert vocabulary.contains(known).numpy().all()
    assert tf.function(vocabulary.keys)().numpy().tolist() == (
        vocabulary.keys().numpy().tolist()
    )


def test_a_tensor_determines_whether_a_step_keeps_strings():
    one = make()
    enqueue = tf.function(
        lambda ids, training: one.enqueue({"ids": ids}, training=training)
    )
    enqueue(tf.constant(["a"]), tf.constant(False))
    one.dequeue()
    assert names(one) == []
    enqueue(tf.constant(["a"]), tf.constant(True))
    one.dequeue()
    assert names(one) == [b"a"]


@pytest.mark.parametrize("is_traced", [False, True])
def test_on_evict_receives_strings(is_traced):
    found = []
    one = make(8, on_evict=found.append)

    def step(ids):
        train(one, ids)

    if is_traced:
        step = tf.function(step)
    for first in range(0, 48, 8):
        step(words(range(first, first + 8)))
    told = [text for evicted in found for text in evicted.strings]
    assert sorted(told) == sorted(words(range(40)).numpy().tolist())
    for evicted in found:
        hashes = key_tensors.hash_strings(tf.constant(list(evicted.strings)))
        assert evicted.keys.tolist() == hashes.numpy().tolist()
    one.vocabularies["words"].evict(["word 41"])
    assert found[-1].strings.tolist() == [b"word 41"]


def test_a_file_of_evicted_keys_contains_strings(tmp_path):
    one = make(8, on_evict=tmp_path / "evicted")
    train(one, words(range(8)))
    one.vocabularies["words"].evict(words([3, 5]))
    (record,) = tf.data.TFRecordDataset(str(tmp_path / "evicted-00000"))
    features = tf.train.Example.FromString(record.numpy()).features.feature
    assert features["strings"].bytes_list.value == [b"word 3", b"word 5"]
    assert list(features["has_string"].int64_list.value) == [1, 1]


def test_a_step_that_on_evict_rejects_can_be_repeated():
    is_broken = [True]

    def on_evict(evicted):
        if is_broken[0]:
            raise ValueError("broken")

    one = make(8, on_evict=on_evict)
    train(one, words(range(8)))
    with pytest.raises(ValueError, match="broken"):
        one.enqueue({"ids": words(range(8, 16))})
    assert names(one) == words(range(8)).numpy().tolist()
    is_broken[0] = False
    train(one, words(range(8, 16)))
    assert names(one) == sorted(words(range(8, 16)).numpy().tolist())


def test_strings_of_evicted_keys_are_removed_during_training():
    one = make(256)
    for step in range(100):
        train(one, words(range(100 * step, 100 * (step + 1))))
    stats = one.vocabularies["words"].stats()
    assert stats["num_evicted"] > 9000
    assert stats["num_keys"] <= stats["num_strings"] <= 512
    one._kept_strings["words"].all_strings()
    assert one.vocabularies["words"].stats()["num_strings"] == len(names(one))


@pytest.mark.parametrize("keeps_in_other", [True, False])
@pytest.mark.parametrize("format", ["numpy", "parquet"])
def test_strings_are_exported_and_imported(tmp_path, format, keeps_in_other):
    if format == "parquet":
        pytest.importorskip("pyarrow")
    one = make()
    vocabulary = one.vocabularies["words"]
    train(one, tf.constant(["b", "a", "", "b\0\0", "é"]))
    hashes = key_tensors.hash_strings(tf.constant(["no string"])).numpy()
    tlm.vocabulary.import_rows(
        [tlm.vocabulary.KeyBlock(hashes, np.ones([1, 3]), key_type="strings")],
        vocabulary,
    )
    expected = {
        key: text
        for block in vocabulary.blocks(8)
        for key, text in zip(block.keys.tolist(), block.strings)
    }
    assert expected[int(hashes[0])] is None
    assert vocabulary.export(tmp_path / "words", format=format) == 6
    if format == "numpy":
        with np.load(tmp_path / "words" / "keys-00000.npz") as arrays:
            assert arrays["string_splits"].shape == (7,)
            assert arrays["has_string"].sum() == 5
    other = (
        make(200, num_shards=2)
        if keeps_in_other
        else cases.embedding(
            tlm.vocabulary.OpenVocabulary(200), tpu.Adagrad(0.1)
        )[0]
    )
    other.build()
    imported = other.vocabularies["words"]
    tlm.vocabulary.import_rows(tmp_path / "words", imported)
    assert imported.contains(["b", "é", "no string"]).numpy().all()
    if keeps_in_other:
        found = {
            key: text
            for block in imported.blocks()
            for key, text in zip(block.keys.tolist(), block.strings)
        }
        assert found == expected
    else:
        assert next(imported.blocks()).strings is None


def test_a_folder_without_strings_is_imported(tmp_path):
    source, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8), tpu.Adagrad(0.1)
    )
    train(source, tf.constant(["a", "b"]))
    source.vocabularies["words"].export(tmp_path / "words")
    one = make()
    tlm.vocabulary.import_rows(tmp_path / "words", one.vocabularies["words"])
    assert (
        next(one.vocabularies["words"].blocks()).strings.tolist() == [None] * 2
    )


def test_written_strings_are_kept():
    one = make(8)
    vocabulary = one.vocabularies["words"]
    written = vocabulary.write(words(range(10)))
    assert written.without_row.tolist() == [b"word 8", b"word 9"]
    assert names(one) == words(range(8)).numpy().tolist()


@pytest.mark.parametrize("how", ["built", "deferred"])
def test_a_checkpoint_restores_strings_into_other_shards(tmp_path, how):
    one = make(num_shards=3)
    train(one, tf.constant(["b", "a", "b\0c"]))
    path = tf.train.Checkpoint(embedding=one).save(tmp_path / "one")
    other, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(64, keep_strings=True),
        tpu.Adagrad(0.1),
        num_shards=2,
    )
    if how == "built":
        other.build()
        train(other, tf.constant(["other"]))
    status = tf.train.Checkpoint(embedding=other).restore(path)
    other.build()
    status.assert_existing_objects_matched()
    found, expected = (x.vocabularies["words"] for x in (other, one))
    assert found.keys().numpy().tolist() == expected.keys().numpy().tolist()
    assert found.stats()["num_strings"] == 3
    train(other, tf.constant(["d"]))
    assert names(other) == [b"a", b"b", b"b\0c", b"d"]


def test_a_checkpoint_contains_only_strings_of_keys_with_a_row(tmp_path):
    one = make(8)
    train(one, words(range(8)))
    train(one, words(range(8, 16)))
    path = tf.train.Checkpoint(embedding=one).write(tmp_path / "one")
    reader = tf.train.load_checkpoint(path)
    (key,) = [
        key for key in reader.get_variable_to_shape_map() if "kept" in key
    ]
    assert sorted(reader.get_tensor(key).tolist()) == names(one)
    assert one.vocabularies["words"].stats()["num_strings"] == 8


def test_a_converted_checkpoint_contains_the_strings(tmp_path):
    one = make()
    train(one, words(range(20)))
    path = tf.train.Checkpoint(embedding=one).save(tmp_path / "one")
    settings = tlm.vocabulary.OpenVocabulary(1000, keep_strings=True)
    tlm.vocabulary.convert(path, tmp_path / "larger", {"words": settings})
    other = make(1000, num_shards=2)
    tf.train.Checkpoint(embedding=other).restore(str(tmp_path / "larger"))
    assert names(other) == names(one)


def test_checkpoints_of_tables_with_and_without_strings_are_compatible(
    tmp_path,
):
    plain, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(64), tpu.Adagrad(0.1)
    )
    train(plain, tf.constant(["a"]))
    path = tf.train.Checkpoint(embedding=plain).save(tmp_path / "plain")
    one = make()
    train(one, tf.constant(["b"]))
    kept = tf.train.Checkpoint(embedding=one).save(tmp_path / "kept")
    tf.train.Checkpoint(embedding=one).restore(path)
    assert next(one.vocabularies["words"].blocks()).strings.tolist() == [None]
    train(one, tf.constant(["a"]))
    assert names(one) == [b"a"]
    tf.train.Checkpoint(embedding=plain).restore(kept)
    assert plain.vocabularies["words"].contains("b")


def test_an_asynchronous_checkpoint_contains_the_strings(tmp_path):
    one = make()
    train(one, tf.constant(["a", "b"]))
    checkpoint = tf.train.Checkpoint(embedding=one)
    options = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True
    )
    path = checkpoint.save(tmp_path / "async", options)
    checkpoint.sync()
    other = make()
    tf.train.Checkpoint(embedding=other).restore(path)
    assert names(other) == [b"a", b"b"]


def test_deltas_of_a_table_with_strings_are_applied(tmp_path):
    one = make()
    train(one, tf.constant(["a"]))
    base = tf.train.Checkpoint(embedding=one).save(tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    train(one, tf.constant(["b"]))
    writer.write()
    full = tlm.deltas.apply(base, tmp_path / "deltas")
    other = make()
    tf.train.Checkpoint(embedding=other).restore(full)
    found = next(other.vocabularies["words"].blocks()).strings.tolist()
    # Deltas contain no strings.
    assert set(found) == {None, b"a"}


def test_a_resize_keeps_the_strings():
    found = []
    one = make(40, num_shards=2, on_evict=found.append)
    train(one, words(range(20)))
    vocabulary = one.vocabularies["words"]
    vocabulary.resize(200)
    assert names(one) == sorted(words(range(20)).numpy().tolist())
    train(one, words(range(20, 60)))
    assert names(one) == sorted(words(range(60)).numpy().tolist())
    vocabulary.resize(8)
    told = [text for evicted in found for text in evicted.strings]
    assert sorted(told + names(one)) == sorted(
        words(range(60)).numpy().tolist()
    )


def test_strings_with_the_same_hash_are_reported(monkeypatch):
    monkeypatch.setattr(key_tensors, "_NUM_HASHES", 1)
    one = make()
    for ids in (["a", "b"], ["c", "a"], ["b"]):
        train(one, tf.constant(ids))
    stats = one.vocabularies["words"].stats()
    assert stats["num_collisions"] == 3
    assert stats["collisions"] == [(b"a", b"b"), (b"a", b"c")]
    assert names(one) == [b"a"]


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_keras_files_contain_the_strings(tmp_path, suffix):
    def build():
        ids = keras.Input([2], dtype="string")
        layer = tlm.layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(100, keep_strings=True),
            2,
            optimizer="adagrad",
            mask_zero=True,
            num_shards=2,
            name="users",
        )
        rows = keras.layers.Flatten()(layer(ids))
        model = keras.Model(ids, keras.layers.Dense(1)(rows))
        model.compile("adam", "mse")
        return model

    model = build()
    x = tf.constant([["ann", "b\0b"], ["", "éve"]])
    model.fit(x, np.ones([2, 1]), verbose=0)
    expected = [b"ann", b"b\0b", "éve".encode()]
    vocabulary = model.get_layer("users").vocabulary
    assert sorted(vocabulary.keys().numpy().tolist()) == expected
    model.predict(tf.constant([["zoe", "ann"]]), verbose=0)
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(path)
        again = keras.models.load_model(path)
    else:
        model.save_weights(path)
        again = build()
        again.load_weights(path)
    found = again.get_layer("users").vocabulary
    assert found.settings.keep_strings
    assert sorted(found.keys().numpy().tolist()) == expected


def test_a_tpu_embedding_layer_keeps_strings(tmp_path):
    table = tpu.TableConfig(64, 2, combiner="sum", name="words")
    layer = tlm.layers.TPUEmbedding(
        {"ids": tpu.FeatureConfig(table)},
        tpu.SGD(0.1),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(64, keep_strings=True)
        },
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer({"ids": tf.constant(["a", "b"])})["ids"])
    tape.gradient(loss, layer.trainable_variables)
    found = layer.embedding.vocabularies["words"].keys()
    assert sorted(found.numpy().tolist()) == [b"a", b"b"]


def test_replicas_keep_the_strings_of_all_replicas():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        one = make(num_shards=2)
    single = make(num_shards=2)

    @tf.function
    def step(ids):
        def replica_step(ids):
            one.enqueue({"ids": ids})
            found = one.dequeue()
            one.apply_gradients(tf.nest.map_structure(tf.ones_like, found))

        strategy.run(replica_step, (ids,))

    for first in (0, 3):
        ids = strategy.experimental_distribute_values_from_function(
            lambda context, first=first: words(
                [first + context.replica_id_in_sync_group, 50]
            )
        )
        step(ids)
        train(single, words([first, 50, first + 1, 50]))
    keys = [
        x.vocabularies["words"].keys().numpy().tolist() for x in (one, single)
    ]
    assert keys[0] == keys[1] and len(keys[0]) == 5


def test_integers_raise():
    one = make()
    with pytest.raises(
        ValueError,
        match="`keep_strings=True` must be strings.*integers.*'words'",
    ):
        one.enqueue({"ids": tf.constant([1])})
    with pytest.raises(ValueError, match="tf.strings.as_string"):
        one.vocabularies["words"].write([1])
    with pytest.raises(TypeError, match="`keep_strings` must be a bool"):
        tlm.vocabulary.OpenVocabulary(8, keep_strings="yes")


def make_shared(capacity=64, *, owner="deep", num_shards=1, **arguments):
    """Returns an embedding with two tables that share a vocabulary."""
    settings = tlm.vocabulary.OpenVocabulary(
        capacity, keep_strings=True, **arguments
    )
    one = tlm.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(capacity, dim, combiner="sum", name=name)
            )
            for name, dim in {"wide": 1, "deep": 3}.items()
        },
        tpu.Adagrad(0.1),
        vocabularies={
            name: settings if name == owner else owner
            for name in ("wide", "deep")
        },
        partitioner=FixedShardsPartitioner(num_shards),
    )
    one.build()
    return one


def train_shared(one, wide, deep):
    one.enqueue({"wide": wide, "deep": deep})
    found = one.dequeue()
    one.apply_gradients(tf.nest.map_structure(tf.ones_like, found))


def names_of_tables(one):
    """Returns the sorted strings, which are equal for all tables."""
    found = {
        name: vocabulary.keys().numpy().tolist()
        for name, vocabulary in one.vocabularies.items()
    }
    assert found["wide"] == found["deep"]
    for name, vocabulary in one.vocabularies.items():
        texts = [x for block in vocabulary.blocks() for x in block.strings]
        assert texts == found[name]
    return sorted(found["wide"])


@pytest.mark.parametrize("owner", ["wide", "deep"])
def test_tables_with_one_vocabulary_share_its_strings(owner):
    gone = []
    one = make_shared(owner=owner, num_shards=2, on_evict=gone.append)
    train_shared(one, tf.constant(["a", "b"]), tf.constant(["b", "c", "c"]))
    assert names_of_tables(one) == [b"a", b"b", b"c"]
    one.vocabularies["wide"].write(["d"], [[1.0]])
    one.vocabularies["deep"].write(["e"], [[1.0, 2.0, 3.0]])
    assert names_of_tables(one) == [b"a", b"b", b"c", b"d", b"e"]
    for vocabulary in one.vocabularies.values():
        assert vocabulary.stats()["num_strings"] == 5
    one.vocabularies["wide"].evict(["c", "d"])
    assert {evicted.table for evicted in gone} == {"wide", "deep"}
    for evicted in gone:
        hashes = key_tensors.hash_strings(tf.constant(list(evicted.strings)))
        assert sorted(evicted.strings) == [b"c", b"d"]
        assert evicted.keys.tolist() == hashes.numpy().tolist()
    assert names_of_tables(one) == [b"a", b"b", b"e"]


@pytest.mark.parametrize("by", ["wide", "deep"])
def test_a_resize_of_a_shared_vocabulary_keeps_the_strings(by):
    gone = []
    one = make_shared(num_shards=2, on_evict=gone.append)
    train_shared(one, words(range(20)), words(range(10, 30)))
    one.vocabularies[by].resize(200)
    assert names_of_tables(one) == sorted(words(range(30)).numpy().tolist())
    train_shared(one, words(range(30, 50)), words([50]))
    known = words(range(51)).numpy().tolist()
    assert names_of_tables(one) == sorted(known)
    one.vocabularies[by].resize(8)
    for table in ("wide", "deep"):
        told = [x for each in gone if each.table == table for x in each.strings]
        assert sorted(told + names_of_tables(one)) == sorted(known)


def test_a_checkpoint_of_a_shared_vocabulary_contains_the_strings(tmp_path):
    one = make_shared(num_shards=3)
    train_shared(one, words(range(20)), words(range(10, 30)))
    path = tf.train.Checkpoint(embedding=one).save(tmp_path / "one")
    reader = tf.train.load_checkpoint(path)
    keys = [key for key in reader.get_variable_to_shape_map() if "kept" in key]
    assert len(keys) == 1
    other = make_shared()
    status = tf.train.Checkpoint(embedding=other).restore(path)
    status.assert_existing_objects_matched()
    assert names_of_tables(other) == names_of_tables(one)
    tlm.vocabulary.convert(
        path,
        tmp_path / "larger",
        {
            "deep": tlm.vocabulary.OpenVocabulary(1000, keep_strings=True),
            "wide": "deep",
        },
    )
    larger = make_shared(1000, num_shards=2)
    tf.train.Checkpoint(embedding=larger).restore(str(tmp_path / "larger"))
    assert names_of_tables(larger) == names_of_tables(one)


@pytest.mark.parametrize("capacity", [64, 1000, 8])
def test_weight_files_of_other_capacities_contain_the_strings(
    tmp_path, capacity
):
    def build(capacity):
        tables = {
            name: tpu.TableConfig(capacity, dim, combiner="sum", name=name)
            for name, dim in {"wide": 1, "deep": 3}.items()
        }
        layer = tlm.layers.TPUEmbedding(
            {name: tpu.FeatureConfig(one) for name, one in tables.items()},
            tpu.SGD(0.1),
            vocabularies={
                "deep": tlm.vocabulary.OpenVocabulary(
                    capacity, keep_strings=True
                ),
                "wide": "deep",
            },
        )
        ids = keras.Input([2], dtype="string")
        found = layer({"wide": ids, "deep": ids})
        outputs = keras.layers.Concatenate()([found["wide"], found["deep"]])
        model = keras.Model(ids, keras.layers.Dense(1)(outputs))
        model.compile("sgd", "mse")
        return model, layer

    model, layer = build(64)
    x = tf.reshape(words(range(20)), [10, 2])
    model.fit(x, np.ones([10, 1]), verbose=0)
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    other, other_layer = build(capacity)
    if capacity == 8:
        with pytest.warns(UserWarning, match="has no rows for 12 of the 20"):
            other.load_weights(path)
    else:
        other.load_weights(path)
    found = names_of_tables(other_layer.embedding)
    expected = names_of_tables(layer.embedding)
    assert len(found) == min(20, capacity)
    assert set(found) <= set(expected)


def test_packed_batches_raise():
    one = make()
    packed = tlm.pack({"ids": tf.constant(["a", "b"])})
    with pytest.raises(
        ValueError, match="only hashes, as in a packed batch.*'words'"
    ):
        one.enqueue(packed)
    shared = make_shared()
    ids = tf.constant(["a", "b"])
    with pytest.raises(ValueError, match="only hashes.*'(wide|deep)'"):
        shared.enqueue(tlm.pack({"wide": ids, "deep": ids}))
    assert shared.stats()["pending"] == [0]


@pytest.mark.parametrize("is_traced", [False, True])
def test_sampled_keys_are_accepted(is_traced):
    one = make(features=("ids", "labels"))
    vocabulary = one.vocabularies["words"]

    def step(labels):
        sampled = tlm.ops.sample_keys(
            vocabulary, 6, distribution="uniform", seed=[1, 2]
        )
        one.enqueue({"ids": sampled.ids(labels), "labels": labels[:, None]})
        found = one.dequeue()
        one.apply_gradients(tf.nest.map_structure(tf.ones_like, found))

    if is_traced:
        step = tf.function(step)
    one.enqueue({"ids": tf.constant(["a"]), "labels": tf.constant([["b"]])})
    one.dequeue()
    one.apply_gradients({"ids": None, "labels": None})
    step(tf.constant(["c", "a"]))
    assert names(one) == [b"a", b"b", b"c"]
    only_sampled = tlm.ops.sample_keys(vocabulary, 4).ids()
    one.enqueue({"ids": only_sampled, "labels": tf.constant([["d"]])})
    one.dequeue()
    assert names(one) == [b"a", b"b", b"c", b"d"]
    assert vocabulary.stats()["num_collisions"] == 0


def test_labels_of_sampled_keys_are_kept():
    one = make()
    train(one, tf.constant(["a", "b"]))
    sampled = tlm.ops.sample_keys(one.vocabularies["words"], 4)
    train(one, sampled.ids([["c", "a"], ["d", "c"]]))
    assert names(one) == [b"a", b"b", b"c", b"d"]
    with pytest.raises(ValueError, match="must be strings.*'words'"):
        one.enqueue({"ids": sampled.ids([5])})


def test_replicas_keep_the_strings_of_labels():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        one = make()
    vocabulary = one.vocabularies["words"]
    vocabulary.write(["a", "b"])

    @tf.function
    def step(labels):
        def replica_step(labels):
            sampled = tlm.ops.sample_keys(vocabulary, 3, seed=[1, 2])
            one.enqueue({"ids": sampled.ids(labels)})
            found = one.dequeue()
            one.apply_gradients(tf.nest.map_structure(tf.ones_like, found))

        strategy.run(replica_step, (labels,))

    step(
        strategy.experimental_distribute_values_from_function(
            lambda context: words([context.replica_id_in_sync_group, 7])
        )
    )
    expected = [b"a", b"b", *words([0, 1, 7]).numpy().tolist()]
    assert names(one) == expected


@pytest.mark.parametrize("mask_zero", [False, True])
def test_a_sampled_softmax_keeps_the_strings_of_labels(mask_zero):
    layer = tlm.layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(100, keep_strings=True),
        2,
        optimizer="adagrad",
        mask_zero=mask_zero,
    )
    layer.build([None])
    layer.vocabulary.write(["bag"])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(
            tlm.ops.sampled_softmax_loss(
                layer, tf.constant(["hat", "", "hat"]), tf.ones([3, 2]), 5
            )
        )
    tape.gradient(loss, layer.trainable_variables)
    expected = [b"bag", b"hat"] if mask_zero else [b"", b"bag", b"hat"]
    assert sorted(layer.vocabulary.keys().numpy().tolist()) == expected


def test_an_export_contains_neither_strings_nor_native_ops(tmp_path):
    one = make()
    train(one, tf.constant(["secret word"]))

    class Served(tf.Module):
        def __init__(self):
            self.embedding = one
            self.lookup = tf.function(
                lambda ids: one({"ids": ids}),
                input_signature=[tf.TensorSpec([None], tf.string)],
            )

    served = Served()
    tf.saved_model.save(served, tmp_path / "served", signatures=served.lookup)
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    assert tf.reduce_any(
        loaded.lookup(tf.constant(["secret word"]))["ids"] != 0
    )
    for path in (tmp_path / "served").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"secret word" not in content
            assert b"LayoutMap>" not in content


def test_invalid_columns_raise():
    columns = kept_strings.to_columns(
        kept_strings.as_objects([b"ab", None, b"", b"c\0"])
    )
    assert kept_strings.from_columns(columns).tolist() == [
        b"ab",
        None,
        b"",
        b"c\0",
    ]
    for changed in (
        {"string_splits": columns["string_splits"][:-1]},
        {"string_splits": columns["string_splits"][::-1]},
        {"string_bytes": columns["string_bytes"][:-1]},
    ):
        with pytest.raises(ValueError, match="offsets of the strings"):
            kept_strings.from_columns({**columns, **changed})
