"""Rows by key on servers, compared with the same calls in one process."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import test_key_steps

tpu = tf.tpu.experimental.embedding


def words(one):
    return one.vocabularies["words"]


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
        tlm.vocabulary.import_rows(words(host), words(distributed))
    distributed.reset()
    assert (
        tlm.vocabulary.import_rows(words(host), words(distributed)).num_new == 2
    )


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
