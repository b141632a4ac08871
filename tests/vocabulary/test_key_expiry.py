"""Checks the eviction of keys that were not used for a period of time."""

import datetime

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
DAY = 24 * 3600.0
MONTH = datetime.timedelta(days=30)


def embedding_of(*, is_pipelined=False, **settings):
    table = tpu.TableConfig(
        64, 2, initializer=tf.ones, combiner="sum", name="words"
    )
    one = tlm.TPUEmbedding(
        {"word": tpu.FeatureConfig(table)},
        tpu.Adagrad(0.1),
        pipeline_execution_with_tensor_core=is_pipelined,
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(64, **settings)},
    )
    one.build()
    return one


def train(one, *keys):
    one.enqueue({"word": tf.constant(keys)})
    one.dequeue()
    one.apply_gradients({"word": tf.ones([len(keys), 2])})


def expiry_of(one):
    return tlm.vocabulary.KeyExpiry(one.vocabularies["words"], unused_for=MONTH)


def evict(expiry, day):
    return sorted(expiry.evict(now=day * DAY).numpy().tolist())


def test_keys_expire_after_the_time_without_use():
    one = embedding_of()
    expiry = expiry_of(one)
    train(one, 1, 2)
    assert evict(expiry, 0) == []
    train(one, 2, 3)
    assert evict(expiry, 10) == []
    assert evict(expiry, 29.9) == []
    assert evict(expiry, 30) == [1]
    assert evict(expiry, 39.9) == []
    train(one, 3)
    assert evict(expiry, 40) == [2]
    assert evict(expiry, 69.9) == []
    assert evict(expiry, 70) == [3]
    assert one.vocabularies["words"].stats()["num_evicted"] == 3


def test_a_key_that_was_used_after_the_recorded_time_is_kept():
    one = embedding_of()
    expiry = expiry_of(one)
    train(one, 1, 2)
    assert evict(expiry, 0) == []
    train(one, 1)
    # The key 1 was used at an unknown time between the days 0 and 60.
    assert evict(expiry, 60) == [2]
    assert evict(expiry, 89) == []
    assert evict(expiry, 90) == [1]


def test_pending_updates_are_applied_first():
    one = embedding_of(is_pipelined=True)
    expiry = expiry_of(one)
    train(one, 1)
    assert evict(expiry, 0) == []
    assert evict(expiry, 30) == [1]


def test_times_are_saved_in_checkpoints(tmp_path):
    one = embedding_of()
    expiry = expiry_of(one)
    train(one, 1, 2)
    evict(expiry, 0)
    train(one, 2)
    evict(expiry, 10)
    path = tf.train.Checkpoint(one=one, expiry=expiry).save(tmp_path / "saved")
    # Without the times, no key expires.
    later = embedding_of()
    tf.train.Checkpoint(one=later).restore(path).expect_partial()
    assert evict(expiry_of(later), 30) == []
    later = embedding_of()
    expiry = expiry_of(later)
    tf.train.Checkpoint(one=later, expiry=expiry).restore(
        path
    ).assert_existing_objects_matched()
    assert evict(expiry, 30) == [1]
    assert evict(expiry, 40) == [2]


def test_times_of_steps_after_the_restored_checkpoint_are_discarded(tmp_path):
    one = embedding_of()
    expiry = expiry_of(one)
    train(one, 1)
    checkpoint = tf.train.Checkpoint(one=one)
    path = checkpoint.save(tmp_path / "saved")
    train(one, 2)
    evict(expiry, 0)
    checkpoint.restore(path)
    # The record of day 0 belongs to a step that was lost.
    assert evict(expiry, 30) == []
    train(one, 3)
    assert evict(expiry, 60) == [1]


def test_evicted_keys_are_reported_and_may_return():
    gone = []
    one = embedding_of(on_evict=gone.append)
    expiry = expiry_of(one)
    train(one, 1)
    evict(expiry, 0)
    evict(expiry, 30)
    assert [part.keys.tolist() for part in gone] == [[1]]
    assert gone[0].rows.shape == (1, 2)
    train(one, 1)
    assert one.vocabularies["words"].keys().numpy().tolist() == [1]
    assert evict(expiry, 59) == []


def test_strings_of_evicted_keys_are_returned():
    one = embedding_of(keep_strings=True)
    expiry = expiry_of(one)
    one.enqueue({"word": tf.constant(["sale"])})
    one.dequeue()
    one.apply_gradients({"word": tf.ones([1, 2])})
    expiry.evict(now=0)
    assert expiry.evict(now=30 * DAY).numpy().tolist() == [b"sale"]


def test_the_number_of_recorded_times_is_limited():
    one = embedding_of()
    expiry = expiry_of(one)
    for hour in range(0, 24 * 90):
        if hour % 24 == 0:
            train(one, hour // 24 % 40)
        expiry.evict(now=hour * 3600.0)
    # A day has at most one step that was not recorded before.
    assert len(expiry._recorded) <= 32
    for second in range(100):
        train(one, 50)
        expiry.evict(now=90 * DAY + second)
    assert len(expiry._recorded) <= 33


def test_the_clock_of_the_system_may_be_set_back(monkeypatch):
    one = embedding_of()
    expiry = expiry_of(one)
    times = iter([40 * DAY, 5 * DAY, 70 * DAY])
    monkeypatch.setattr("time.time", lambda: next(times))
    train(one, 1)
    assert expiry.evict().numpy().tolist() == []
    train(one, 2)
    assert expiry.evict().numpy().tolist() == []
    assert expiry.evict().numpy().tolist() == [1]


def test_tables_that_share_a_vocabulary_lose_the_same_keys():
    wide, narrow = (
        tpu.TableConfig(64, dim, combiner="sum", name=name)
        for dim, name in ((4, "wide"), (2, "narrow"))
    )
    one = tlm.TPUEmbedding(
        {"w": tpu.FeatureConfig(wide), "n": tpu.FeatureConfig(narrow)},
        tpu.SGD(0.1),
        vocabularies={
            "wide": tlm.vocabulary.OpenVocabulary(64),
            "narrow": "wide",
        },
    )
    one.build()
    expiry = tlm.vocabulary.KeyExpiry(
        one.vocabularies["narrow"], unused_for=MONTH
    )
    one.enqueue({"w": tf.constant([1, 2]), "n": tf.constant([2])})
    one.dequeue()
    one.apply_gradients({"w": tf.ones([2, 4]), "n": tf.ones([1, 2])})
    assert evict(expiry, 0) == []
    assert evict(expiry, 30) == [1, 2]
    assert one.vocabularies["wide"].keys().shape == [0]


def test_invalid_arguments_raise():
    one = embedding_of()
    vocabulary = one.vocabularies["words"]
    with pytest.raises(TypeError, match="`vocabulary` must be an element of"):
        tlm.vocabulary.KeyExpiry(one, unused_for=MONTH)
    with pytest.raises(TypeError, match="must be a datetime.timedelta"):
        tlm.vocabulary.KeyExpiry(vocabulary, unused_for=30)
    with pytest.raises(ValueError, match="`unused_for` must be positive"):
        tlm.vocabulary.KeyExpiry(vocabulary, unused_for=datetime.timedelta(0))
    expiry = expiry_of(one)
    for now in ("today", datetime.datetime.now(), True):
        with pytest.raises(TypeError, match="a number of seconds since"):
            expiry.evict(now=now)
    with pytest.raises(ValueError, match="`now` must be finite"):
        expiry.evict(now=np.inf)
    train(one, 1)
    evict(expiry, 3)
    with pytest.raises(ValueError, match="at least the time of the last"):
        evict(expiry, 2)
    with pytest.raises(RuntimeError, match="outside tf.function"):
        tf.function(expiry.evict)()
