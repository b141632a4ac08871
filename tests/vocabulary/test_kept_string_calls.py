"""Calls of a vocabulary with `keep_strings=True` accept and return strings."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.host import open_table_cases as cases
from tf_layoutmap.vocabulary import key_tensors

tpu = tf.tpu.experimental.embedding


def make(capacity=64, **arguments):
    one, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(capacity, keep_strings=True, **arguments),
        tpu.Adagrad(0.1),
    )
    one.build()
    return one


def train(one, ids):
    one.enqueue({"ids": ids})
    found = one.dequeue()
    one.apply_gradients(tf.nest.map_structure(tf.ones_like, found))


def hashes(texts):
    return key_tensors.hash_strings(tf.constant(texts)).numpy()


def write_hashes(vocabulary, texts):
    """Writes keys whose strings are not known."""
    block = tlm.vocabulary.KeyBlock(
        hashes(texts), np.ones([len(texts), 3]), key_type="strings"
    )
    tlm.vocabulary.import_rows([block], vocabulary)


def strings_of(vocabulary):
    return [
        text for block in vocabulary.blocks() for text in block.strings.tolist()
    ]


@pytest.mark.parametrize("is_traced", [False, True])
def test_evict_returns_strings(is_traced):
    gone = []
    one = make(on_evict=gone.append)
    vocabulary = one.vocabularies["words"]
    train(one, tf.constant(["a", "b", "", "c\0d"]))
    # The string of this key is not known before the call.
    write_hashes(vocabulary, ["e"])
    evict = tf.function(vocabulary.evict) if is_traced else vocabulary.evict
    found = evict(tf.constant(["c\0d", "no row", "", "e"]))
    assert found.dtype == tf.string
    assert sorted(found.numpy().tolist()) == [b"", b"c\0d", b"e"]
    assert found.numpy().tolist() == gone[-1].strings.tolist()
    assert sorted(vocabulary.keys().numpy().tolist()) == [b"a", b"b"]
    none = evict(tf.constant(["no row"]))
    assert (none.dtype, none.shape) == (tf.string, [0])


def test_evict_accepts_sampled_keys():
    one = make()
    vocabulary = one.vocabularies["words"]
    train(one, tf.constant(["a"]))
    sampled = tlm.ops.sample_keys(vocabulary, 2)
    assert vocabulary.evict(sampled.ids()).numpy().tolist() == [b"a"]


@pytest.mark.parametrize("is_traced", [False, True])
def test_evict_expired_returns_strings(is_traced):
    gone = []
    one = make(ttl_steps=2, on_evict=gone.append)
    vocabulary = one.vocabularies["words"]
    train(one, tf.constant(["a", "b"]))
    write_hashes(vocabulary, ["e"])
    for _ in range(3):
        train(one, tf.constant(["b"]))
    evict = vocabulary.evict_expired
    found = (tf.function(evict) if is_traced else evict)()
    # The string of the key "e" is not known.
    assert sorted(found.numpy().tolist()) == [b"", b"a"]
    assert set(gone[-1].strings.tolist()) == {None, b"a"}
    assert vocabulary.keys().numpy().tolist() == [b"b"]


def test_an_eviction_whose_callback_raises_keeps_the_strings():
    def on_evict(evicted):
        raise OSError("disk full")

    one = make(on_evict=on_evict)
    vocabulary = one.vocabularies["words"]
    train(one, tf.constant(["a", "b"]))
    with pytest.raises(OSError, match="disk full"):
        vocabulary.evict(["a"])
    assert sorted(vocabulary.keys().numpy().tolist()) == [b"a", b"b"]


def test_a_string_with_the_hash_of_another_string_evicts_the_kept_string(
    monkeypatch,
):
    monkeypatch.setattr(key_tensors, "_NUM_HASHES", 1)
    one = make()
    vocabulary = one.vocabularies["words"]
    vocabulary.write(["a"])
    vocabulary.write(["b"], [[1.0, 2.0, 3.0]])
    assert vocabulary.evict(["c"]).numpy().tolist() == [b"a"]
    stats = vocabulary.stats()
    assert stats["num_collisions"] == 2
    assert stats["collisions"] == [(b"a", b"b"), (b"a", b"c")]


def test_a_write_of_two_strings_with_the_same_hash_raises(monkeypatch):
    monkeypatch.setattr(key_tensors, "_NUM_HASHES", 1)
    vocabulary = make().vocabularies["words"]
    with pytest.raises(ValueError, match="`keys` must be without duplicates"):
        vocabulary.write(["a", "b"])
    assert not vocabulary.stats()["num_keys"]


def test_written_labels_and_sampled_keys_keep_their_strings():
    one = make()
    vocabulary = one.vocabularies["words"]
    train(one, tf.constant(["a"]))
    sampled = tlm.ops.sample_keys(vocabulary, 1)
    written = vocabulary.write(
        sampled.ids(["b", "c"]), np.arange(9).reshape(3, 3)
    )
    assert (written.num_written, written.num_new) == (3, 2)
    assert sorted(vocabulary.keys().numpy().tolist()) == [b"a", b"b", b"c"]
    rows = one({"ids": tf.constant(["b", "c", "a"])})["ids"]
    np.testing.assert_array_equal(rows, np.arange(9).reshape(3, 3))
    # The string of a key that is written as a hash is unknown.
    vocabulary.write(tlm.ops.StoredKeys(tf.constant(hashes(["d"]))))
    assert sorted(strings_of(vocabulary), key=str) == [None, b"a", b"b", b"c"]
    assert vocabulary.stats()["num_collisions"] == 0
    assert vocabulary.stats()["key_type"] == "strings"


def test_stored_keys_are_the_first_keys_of_a_vocabulary():
    vocabulary = make().vocabularies["words"]
    vocabulary.write(
        tlm.ops.StoredKeys(
            tf.constant(hashes(["a", "b"])), strings=tf.constant(["b", "a"])
        )
    )
    assert vocabulary.stats()["key_type"] == "strings"
    assert sorted(vocabulary.keys().numpy().tolist()) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ([b"a"], r"`strings` must be of shape \(2,\)"),
        ([b"a", b"c"], "`strings` must be the strings whose hashes are `keys`"),
        ([None, b"a"], "`strings` must be the strings whose hashes are `keys`"),
    ],
)
def test_blocks_with_invalid_strings_raise(strings, message):
    vocabulary = make().vocabularies["words"]
    block = tlm.vocabulary.KeyBlock(
        hashes(["a", "b"]),
        np.ones([2, 3]),
        key_type="strings",
        strings=np.array(strings, object),
    )
    with pytest.raises(ValueError, match=f"{message}.*'words'"):
        tlm.vocabulary.import_rows([block], vocabulary)
    assert not vocabulary.stats()["num_keys"]


def test_blocks_can_contain_python_strings():
    vocabulary = make().vocabularies["words"]
    block = tlm.vocabulary.KeyBlock(
        hashes(["a", "é"]),
        np.ones([2, 3]),
        key_type="strings",
        strings=["a", "é"],
    )
    tlm.vocabulary.import_rows([block], vocabulary)
    assert sorted(vocabulary.keys().numpy().tolist()) == [b"a", "é".encode()]


def test_an_asynchronous_checkpoint_contains_the_strings_of_its_keys(tmp_path):
    """Steps after the call of `save` do not change the saved strings."""
    one = make(8)
    checkpoint = tf.train.Checkpoint(embedding=one)
    options = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True
    )
    kept = one._kept_strings["words"]
    may_write = threading.Event()
    serialize = kept._serialize_to_tensors

    # The thread of the save must not read the store.
    def wait_and_serialize():
        may_write.wait(60)
        return serialize()

    kept._serialize_to_tensors = wait_and_serialize
    for number in range(2):
        texts = [f"{number} {i}" for i in range(8)]
        train(one, tf.constant(texts))
        path = checkpoint.save(tmp_path / "async", options)
        # These keys evict all keys of the checkpoint.
        train(one, tf.constant([f"later {i}" for i in range(8)]))
        kept.all_strings()
        may_write.set()
        checkpoint.sync()
        other = make(8)
        tf.train.Checkpoint(embedding=other).restore(path)
        found = other.vocabularies["words"].keys().numpy().tolist()
        assert sorted(found) == [text.encode() for text in texts]
        may_write.clear()
