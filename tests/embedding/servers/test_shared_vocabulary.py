"""Shared vocabularies on servers, compared with the same steps in one process.

The tables `wide` and `deep` share the vocabulary of one of these tables.
"""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas.cases import save
from tests.embedding.host import shared_vocabulary_cases as shared_cases
from tests.embedding.host.shared_vocabulary_cases import (
    DIMS,
    check_same,
    create,
    keys_of,
    train,
)
from tests.embedding.servers import local
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

tpu = tf.tpu.experimental.embedding
EMPTY = -(2**63)


def both(capacity=64, *, num_servers=2, num_shards=3, **options):
    """Returns two equal embeddings, one on servers and one in one process."""
    with local.servers(num_servers):
        distributed, _ = create(capacity, num_shards=num_shards, **options)
    return distributed, create(capacity, num_shards=num_shards, **options)[0]


def full_value(variable):
    return np.asarray(variable.numpy())


def values(one):
    """Returns the bytes of all variables, except for rows without a key."""
    (keys,) = (
        full_value(by_name["vocabulary_keys"])
        for by_name in one._variables.values()
        if "vocabulary_keys" in by_name
    )
    has_key = np.append(keys.ravel() != EMPTY, True)
    found = {}
    for table, by_name in one._variables.items():
        for name, variable in by_name.items():
            value = full_value(variable)
            if value.ndim and len(value) == len(has_key):
                value = value[has_key]
            found[f"{table}/{name}"] = value.tobytes()
    return found


def assert_same(distributed, host):
    found, expected = values(distributed), values(host)
    assert [name for name, one in expected.items() if one != found[name]] == []
    assert found.keys() == expected.keys()
    for table in DIMS:
        assert (
            distributed.vocabularies[table].stats()
            == host.vocabularies[table].stats()
        )


def batches(seed, count, *, equal=False, size=40, most=300):
    """Returns keys of `wide` and of `deep` for each step."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        wide = keys_of(rng, size, most)
        deep = (
            wide
            if equal
            else keys_of(rng, int(rng.integers(0, 2 * size)), most)
        )
        found.append((wide, deep))
    return found


def same_steps(embeddings, steps):
    for wide, deep in steps:
        check_same(*(train(one, wide, deep) for one in embeddings))


def assert_same_lookups(one, other, keys):
    """Checks that lookups of the same keys in both tables are equal."""
    check_same(*(each(dict.fromkeys(DIMS, keys)) for each in (one, other)))


def test_a_key_counts_as_in_the_table_with_most_occurrences():
    one, _ = both(64, admission="count", min_count=3)
    shared_cases.check_occurrences(one)


def test_keys_of_only_one_table_fix_the_kind_of_both():
    one, _ = both()
    empty = np.zeros([0], np.int64)
    train(one, [7], empty)
    assert one.vocabularies["deep"].stats()["key_type"] == "integers"
    with pytest.raises(ValueError, match="all have integers or all have str"):
        one.enqueue({"wide": tf.constant(["a"]), "deep": tf.constant([1])})


def test_forward_only_steps_look_up_both_tables_and_change_nothing():
    pair = both(oov_embedding="trainable")
    same_steps(pair, batches(3, 2))
    before = values(pair[0])
    ((wide, deep),) = batches(4, 1)
    ids = {"wide": wide, "deep": deep}
    check_same(*(one(ids) for one in pair))
    for one in pair:
        one.enqueue(ids, training=False)
    check_same(*(one.dequeue() for one in pair))
    assert values(pair[0]) == before


def test_a_full_vocabulary_changes_no_table():
    one, _ = both(8, num_servers=1, num_shards=1, evict="none", on_full="error")
    shared_cases.check_full_vocabulary(one, values)


@pytest.mark.parametrize("table", ["wide", "deep"])
def test_a_step_in_flight_pins_the_rows_of_both_tables(table):
    one, _ = both(8, num_servers=1, num_shards=1, evict="lru")
    empty = np.zeros([0], np.int64)
    (other,) = DIMS.keys() - {table}
    one.enqueue({table: tf.range(8, dtype=tf.int64), other: tf.constant(empty)})
    one.dequeue()
    for each in DIMS:
        with pytest.raises(
            tf.errors.FailedPreconditionError, match="step in flight"
        ):
            one.vocabularies[each].evict([3])
    one.reset()
    assert one.vocabularies[other].evict([3]).numpy().tolist() == [3]
    assert not bool(one.vocabularies[table].contains(3))


def reports_by_table(reports):
    """Returns the keys, rows and slots of each table, sorted by key."""
    found = {}
    for table in sorted({one.table for one in reports}):
        own = [one for one in reports if one.table == table]
        keys = np.concatenate([one.keys for one in own])
        order = np.argsort(keys, kind="stable")
        arrays = [keys, np.concatenate([one.rows for one in own])] + [
            np.concatenate([one.slots[name] for one in own])
            for name in own[0].slots
        ]
        found[table] = [one[order].tobytes() for one in arrays]
    return found


def assert_same_reports(reports):
    found, expected = (reports_by_table(one) for one in reports)
    assert found == expected


def both_with_reports():
    """Returns two equal embeddings, and a list of the reports of each."""
    reports = [], []
    with local.servers(2):
        distributed, _ = create(
            64, num_shards=3, on_evict=reports[0].append, evict="lru"
        )
    host, _ = create(64, num_shards=3, on_evict=reports[1].append, evict="lru")
    return (distributed, host), reports


def test_an_exported_embedding_has_the_rows_of_both_tables(tmp_path):
    one, _ = both()
    for wide, deep in batches(20, 3):
        train(one, wide, deep)
    tlm.export(
        one,
        str(tmp_path / "served"),
        input_signature=[
            {name: tf.TensorSpec([None], tf.int64) for name in DIMS}
        ],
    )
    served = tf.saved_model.load(str(tmp_path / "served"))
    keys = np.append(one.vocabularies["deep"].keys(), [-77, 10**13])
    assert_same_lookups(served.serve, one, tf.constant(keys))


def closure_of(one):
    """Returns a function that runs a closure of a worker on a batch."""

    @tf.function(reduce_retracing=True)
    def closure(numbers, wide, deep, dies):
        ClosureTrace().begin(numbers)
        one.enqueue({"wide": wide, "deep": deep})
        found = one.dequeue()
        with tf.control_dependencies(list(found.values())):
            alive = [tf.debugging.Assert(not dies, ["dies"])]
        with tf.control_dependencies(alive):
            one.apply_gradients(
                {name: value * 0.5 + 0.125 for name, value in found.items()}
            )

    def run(number, batch, *, dies=False):
        with (
            pytest.raises(tf.errors.InvalidArgumentError, match="dies")
            if dies
            else contextlib.nullcontext()
        ):
            wide, deep = (tf.constant(keys, tf.int64) for keys in batch)
            closure(
                tf.constant([1, number], tf.int64),
                wide,
                deep,
                tf.constant(dies),
            )

    return run


def test_a_repeated_closure_counts_and_reports_its_keys_once():
    (distributed, host), reports = both_with_reports()
    run = closure_of(distributed)
    for number, batch in enumerate(batches(21, 6)):
        # The worker of some runs dies before it sends its gradients.
        for dies in (True, True, False, False)[number % 3 :]:
            run(number, batch, dies=dies)
        train(host, *batch)
    assert distributed.stats()["num_repeated"] > 0
    assert_same(distributed, host)
    distributed.vocabularies["deep"].report_evicted()
    assert_same_reports(reports)


def test_a_repeated_closure_with_other_keys_inserts_none():
    distributed, host = both(evict="lru")
    run = closure_of(distributed)
    first, second = batches(22, 2)
    run(0, first, dies=True)
    before = distributed.vocabularies["wide"].stats()
    run(0, second)
    assert distributed.vocabularies["wide"].stats() == before
    train(host, *first)
    np.testing.assert_array_equal(
        distributed.vocabularies["wide"].keys(),
        host.vocabularies["wide"].keys(),
    )


def test_tables_of_one_vocabulary_are_placed_on_the_servers_of_its_shards():
    """The servers get similar numbers of bytes, also of the second table."""
    with local.servers(3):
        one, _ = create(6000, num_shards=3, owner="wide")
    resident = {}
    for by_name in one._variables.values():
        for shard in tables.shards_of(by_name["parameters"]):
            resident[shard.device] = (
                resident.get(shard.device, 0) + shard.shape.num_elements()
            )
    assert len(resident) == 3
    assert max(resident.values()) < 1.2 * min(resident.values())


def test_a_checkpoint_of_a_shared_vocabulary_is_not_restored_separately(
    tmp_path,
):
    path = save(both(300, evict="lru")[0], tmp_path / "servers")
    with local.servers(2):
        separate, _ = create(300, num_shards=3, shared=False)
    with pytest.raises(ValueError, match="the vocabulary of table 'deep'"):
        tf.train.Checkpoint(embedding=separate).restore(path)


def test_an_empty_table_without_a_kind_of_keys_raises():
    one, _ = both(evict="lru")
    one.enqueue(dict.fromkeys(DIMS, tf.constant(["a", "b"])))
    one.apply_gradients(one.dequeue())
    before = values(one)
    # The table without a key has no kind of keys in this step.
    empty = np.zeros([0], np.int64)
    for wide, deep in (([3], empty), (empty, [3])):
        one.enqueue({"wide": tf.constant(wide), "deep": tf.constant(deep)})
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="must be strings"
        ):
            one.dequeue()
        one.reset()
        assert values(one) == before


@pytest.mark.parametrize("owner", ["wide", "deep"])
def test_shards_with_the_same_keys_are_on_the_same_server(owner):
    one, _ = both(owner=owner)
    one.vocabularies["wide"].resize(5000)
    wide, deep = (
        [shard.device for shard in tables.shards_of(by_name["parameters"])]
        for by_name in one._variables.values()
    )
    assert wide == deep
    # Only the owner has variables of the vocabulary.
    (other,) = DIMS.keys() - {owner}
    assert not any(name.startswith("vocab") for name in one._variables[other])
