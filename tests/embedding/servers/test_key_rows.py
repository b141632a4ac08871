"""Rows by key on servers, compared with the same calls in one process."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import test_key_steps
from tests.vocabulary.test_key_rows import contents

tpu = tf.tpu.experimental.embedding


def words(one):
    return one.vocabularies["words"]


@pytest.mark.parametrize("num_servers, num_shards", [(1, 1), (2, 3), (3, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_equal_one_process(num_servers, num_shards, dtype):
    distributed, host = test_key_steps.both(
        cases.POLICIES["count"],
        capacity=512 if num_shards == 8 else 64,
        num_servers=num_servers,
        num_shards=num_shards,
        table_dtypes=dtype,
    )
    rng = np.random.default_rng(0)
    for step in range(4):
        cases.train(distributed, step)
        cases.train(host, step)
        keys = np.unique(rng.integers(-(2**60), 2**60, 150))
        keys[: len(words(host).keys()) // 2] = words(host).keys()[::2][
            : len(words(host).keys()) // 2
        ]
        arguments = (
            keys,
            rng.normal(size=[len(keys), 3]),
            {"accumulators": rng.uniform(1, 2, [len(keys), 3])}
            if step % 2
            else None,
        )
        options = (
            {
                "counts": rng.integers(0, 9, len(keys)),
                "last_steps": rng.integers(0, step + 2, len(keys)),
            }
            if step > 1
            else {}
        )
        found = words(distributed).write(*arguments, **options)
        expected = words(host).write(*arguments, **options)
        assert (found.num_written, found.num_new) == (
            expected.num_written,
            expected.num_new,
        )
        np.testing.assert_array_equal(found.without_row, expected.without_row)
        assert cases.differences(distributed, host) == []
    assert words(distributed).stats() == words(host).stats()
    assert contents(words(distributed), 40) == contents(words(host), 24)


def test_rows_are_moved_between_servers_and_one_process(tmp_path):
    distributed, host = test_key_steps.both({}, num_shards=3)
    for step in range(3):
        cases.train(distributed, step)
    expected = contents(words(distributed))
    assert words(distributed).export(tmp_path / "words") == len(expected)
    assert tlm.import_rows(tmp_path / "words", words(host)).num_new
    assert contents(words(host)) == expected
    other, _ = test_key_steps.both({}, num_servers=3, num_shards=5)
    tlm.import_rows(words(host), words(other))
    assert contents(words(other)) == expected
    assert words(other).stats()["step"] == 3
    # A shard without keys also gets the step.
    numbers = other._variables["words"]["vocabulary_numbers"]
    assert {int(one[0]) for one in numbers.copies} == {3}


def test_a_pending_step_prevents_a_jump_of_the_step():
    distributed, host = test_key_steps.both(
        {"admission": "count", "min_count": 9}
    )
    cases.train(host, 0)
    words(host).write([1, 2])
    cases.train(distributed, 0)
    for step in range(1, 3):
        cases.train(host, step)
    # This step does not assign rows, because no key has occurred nine times.
    distributed.enqueue(*cases.batch(1, num_samples=1))
    distributed.dequeue()
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="step of table 'words' cannot be set while a step is in flight",
    ):
        tlm.import_rows(words(host), words(distributed))
    distributed.reset()
    assert tlm.import_rows(words(host), words(distributed)).num_new == 2


def test_a_pending_step_keeps_its_rows():
    distributed, _ = test_key_steps.both(
        {}, tpu.SGD(1.0), capacity=8, num_servers=1
    )
    keys = tf.range(8, dtype=tf.int64)[:, tf.newaxis]
    batch = {"bag": keys, "text": keys, "ads": tf.zeros([8, 1], tf.int64)}
    distributed.enqueue(batch)
    distributed.dequeue()
    words(distributed).write([3], np.ones([1, 3]), last_steps=[0])
    distributed.enqueue({**batch, "bag": keys + 50, "text": keys + 50})
    assert words(distributed).contains(3)


def test_keys_of_another_kind_change_no_shard():
    distributed, _ = test_key_steps.both({}, capacity=600, num_shards=8)
    words(distributed).write([1], np.ones([1, 3]))
    before = cases.values(distributed)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be integer"):
        words(distributed).write([str(n) for n in range(50)])
    assert cases.values(distributed) == before
