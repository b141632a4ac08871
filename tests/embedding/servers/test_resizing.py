"""Resizing of vocabularies on servers, compared with one process."""

import numpy as np
import pytest
import tensorflow as tf

from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import local
from tests.embedding.servers.test_evicted_reports import (
    Reports,
    assert_equal,
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


@pytest.mark.parametrize("capacity", [2000, 16])
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ({"evict": "lru"}, "float32"),
        ({"admission": "count", "min_count": 2}, "bfloat16"),
    ],
    ids=["lru", "count_16_bit"],
)
@pytest.mark.parametrize("num_servers, num_shards", [(1, 1), (2, 3)])
def test_a_resized_table_equals_one_process(
    capacity, policy, dtype, num_servers, num_shards
):
    distributed, host, found, expected = both(
        policy,
        num_servers=num_servers,
        num_shards=num_shards,
        table_dtypes={"words": dtype, "ads": "float16"},
    )
    for step in range(4):
        for one in (distributed, host):
            cases.train(one, step)
    kept = [
        one.vocabularies["words"].resize(capacity)
        for one in (distributed, host)
    ]
    assert kept[0] == kept[1]
    assert (kept[0].num_dropped > 0) == (capacity < 64)
    if found.num_keys or expected.num_keys:
        assert_equal(found, expected)
    check_equal(distributed, host)
    # A table of one process has the same layout, so later steps are equal.
    for step in range(4, 8):
        results = [cases.train(one, step) for one in (distributed, host)]
        for name, activations in results[0].items():
            np.testing.assert_array_equal(activations, results[1][name])
    assert cases.differences(distributed, host) == []
    distributed.vocabularies["words"].report_evicted()
    assert found.num_keys == expected.num_keys


def test_checkpoints_of_resized_tables_equal_one_process(tmp_path):
    distributed, host, _, _ = both({"evict": "lru"})
    for one in (distributed, host):
        for step in range(3):
            cases.train(one, step)
        one.vocabularies["words"].resize(500)
    saved = tf.train.Checkpoint(it=distributed).save(str(tmp_path / "saved"))
    again = cases.embedding({"evict": "lru"}, capacity=500)
    tf.train.Checkpoint(it=again).restore(saved).assert_consumed()
    check_equal(again, host)


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
