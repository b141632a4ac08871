"""Reports of evicted keys on servers, compared with the same steps here."""

import numpy as np
import pytest
import tensorflow as tf

from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import local
from tf_layoutmap.embedding.servers import evicted_reports
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

tpu = tf.tpu.experimental.embedding
# Batches with so many keys that steps evict keys of the table `words`.
MANY = {"most": 400, "num_samples": 12}


class Reports:
    """An `on_evict` callable that stores the evicted keys."""

    def __init__(self):
        self.all = []
        self.fails = False

    def __call__(self, evicted):
        if self.fails:
            raise OSError("disk full")
        self.all.append(evicted)

    @property
    def num_keys(self):
        return sum(len(one.keys) for one in self.all)

    def by_key(self):
        """Returns all reports as arrays, sorted by key, then by time."""
        assert {one.table for one in self.all} == {"words"}
        keys = np.concatenate([one.keys for one in self.all])
        order = np.argsort(keys, kind="stable")
        arrays = [keys] + [
            np.concatenate([values(one) for one in self.all])
            for values in (
                lambda one: one.rows,
                *(
                    lambda one, name=name: one.slots[name]
                    for name in self.all[0].slots
                ),
            )
        ]
        return [one[order] for one in arrays]


def words(one):
    return one.vocabularies["words"]


def both(policy, *arguments, num_servers=2, num_shards=None, **options):
    """Returns an embedding on servers and one here, with their reports."""
    reports = Reports(), Reports()
    with local.servers(num_servers, num_shards):
        distributed = cases.embedding(
            {**policy, "on_evict": reports[0]}, *arguments, **options
        )
    host = cases.embedding(
        {**policy, "on_evict": reports[1]}, *arguments, **options
    )
    return distributed, host, *reports


def assert_equal(found, expected):
    assert found.num_keys == expected.num_keys > 0
    for one, other in zip(found.by_key(), expected.by_key(), strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


def train(embeddings, steps, **options):
    for step in steps:
        for one in embeddings:
            cases.train(one, step, **{**MANY, **options})


def test_small_blocks_report_all_keys(monkeypatch):
    monkeypatch.setattr(evicted_reports, "_BLOCK_BYTES", 1)
    distributed, host, found, expected = both({"evict": "lru"})
    train([distributed, host], range(6))
    words(distributed).report_evicted()
    assert len(found.all) > len(expected.all)
    assert_equal(found, expected)


@pytest.mark.parametrize("call", ["save", "read", "restore", "resize"])
def test_calls_report_evicted_keys(call, tmp_path):
    distributed, host, found, expected = both({"evict": "lru"})
    train([distributed, host], range(6))
    saved = tf.train.Checkpoint(embedding=host).save(str(tmp_path / "host"))
    if call == "save":
        tf.train.Checkpoint(embedding=distributed).save(str(tmp_path / "own"))
    elif call == "read":
        assert distributed.embedding_tables
    elif call == "restore":
        tf.train.Checkpoint(embedding=distributed).restore(saved)
    else:
        words(distributed).resize(1000)
    assert_equal(found, expected)


def test_keys_are_reported_again_after_an_error(tmp_path):
    distributed, host, found, expected = both({"evict": "lru"})
    train([distributed, host], range(6))
    found.fails = True
    with pytest.raises(OSError, match="disk full"):
        words(distributed).report_evicted()
    with pytest.raises(OSError, match="disk full"):
        tf.train.Checkpoint(embedding=distributed).save(str(tmp_path / "own"))
    train([distributed, host], range(6, 8))
    found.fails = False
    words(distributed).report_evicted()
    assert_equal(found, expected)


def test_the_keys_of_an_eviction_are_reported_again_after_an_error():
    distributed, host, found, expected = both({"evict": "lru"})
    train([distributed, host], [0], most=40, num_samples=3)
    gone = np.sort(words(host).keys())[:2]
    found.fails = True
    with pytest.raises(OSError, match="disk full"):
        words(distributed).evict(gone)
    # In contrast to one process, the keys no longer have rows.
    assert not words(distributed).contains(gone).numpy().any()
    found.fails = False
    assert words(distributed).report_evicted() == 2
    words(host).evict(gone)
    assert_equal(found, expected)


def test_a_repeated_closure_reports_its_keys_once():
    distributed, host, found, expected = both({"evict": "lru"})

    def closure(one):
        @tf.function(reduce_retracing=True)
        def step(numbers, ids, is_complete):
            ClosureTrace().begin(numbers)
            one.enqueue(ids)
            activations = one.dequeue()
            if is_complete:
                one.apply_gradients(cases.gradients(activations))

        return step

    step = closure(distributed)
    for number in range(6):
        ids, _ = cases.batch(number, **MANY)
        # The workers of some runs die before they send their gradients.
        for is_complete in (False, False, True, True):
            if number % 2 or is_complete:
                step(tf.constant([1, number], tf.int64), ids, is_complete)
        host.enqueue(ids)
        host.apply_gradients(cases.gradients(host.dequeue()))
    words(distributed).report_evicted()
    assert_equal(found, expected)
    assert cases.differences(distributed, host) == []


def test_a_path_is_written_by_the_coordinator(tmp_path):
    with local.servers(2):
        one = cases.embedding({"on_evict": str(tmp_path / "gone")})
    train([one], range(6))
    assert not list(tmp_path.iterdir())
    count = words(one).report_evicted()
    records = tf.data.TFRecordDataset([str(tmp_path / "gone-00000")])
    keys = [
        tf.train.Example.FromString(one.numpy()).features.feature["keys"]
        for one in records
    ]
    assert sum(len(one.int64_list.value) for one in keys) == count > 0


def test_inside_a_function_reports_raise():
    with local.servers(2):
        one = cases.embedding({"on_evict": print})
    with pytest.raises(RuntimeError, match=r"outside tf\.function"):
        tf.function(words(one).report_evicted)()
