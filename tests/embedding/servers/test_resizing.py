"""Resizing of vocabularies on servers, compared with one process."""

import pytest
import tensorflow as tf

from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import local
from tests.embedding.servers.test_evicted_reports import (
    Reports,
    both,
)

tpu = tf.tpu.experimental.embedding


def rows_by_key(one):
    """Returns the keys of `words` with everything that belongs to them."""
    found = {}
    for block in one.vocabularies["words"].blocks():
        for number, key in enumerate(block.keys.tolist()):
            found[key] = (
                block.rows[number].tobytes(),
                [slot[number].tobytes() for slot in block.slots.values()],
                int(block.counts[number]),
                int(block.last_steps[number]),
            )
    return found


def check_equal(distributed, host):
    assert rows_by_key(distributed) == rows_by_key(host)
    numbers = [one.vocabularies["words"].stats() for one in (distributed, host)]
    assert numbers[0] == numbers[1]


def test_functions_that_were_traced_before_must_be_traced_again():
    distributed, host, _, _ = both({"evict": "lru"})
    steps = [cases.step_of(one) for one in (distributed, host)]
    ids, weights = cases.batch(0)
    for step in steps:
        step(ids, weights["bag"])
    for one in (distributed, host):
        one.vocabularies["words"].resize(500)
    before = cases.values(distributed)
    with pytest.raises(tf.errors.FailedPreconditionError, match="was resized"):
        steps[0](ids, weights["bag"])
    assert cases.values(distributed) == before
    steps = [cases.step_of(one) for one in (distributed, host)]
    for step in steps:
        step(ids, weights["bag"])
    check_equal(distributed, host)


def test_a_failed_resize_changes_nothing():
    reports = Reports()
    with local.servers(2):
        one = cases.embedding({"on_evict": reports})
    for step in range(4):
        cases.train(one, step)
    one.vocabularies["words"].report_evicted()
    before = cases.values(one)
    reports.fails = True
    with pytest.raises(OSError, match="disk full"):
        one.vocabularies["words"].resize(16)
    assert cases.values(one) == before
    reports.fails = False
    cases.train(one, 4)
    assert one.vocabularies["words"].resize(500).num_dropped == 0


def test_steps_in_flight_raise():
    with local.servers(2):
        one = cases.embedding({})
    one.enqueue(*cases.batch(0))
    with pytest.raises(RuntimeError, match="resized while steps are in flight"):
        one.vocabularies["words"].resize(500)
    one.reset()
    one.vocabularies["words"].resize(500)
