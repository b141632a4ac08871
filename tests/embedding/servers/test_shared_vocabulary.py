"""Shared vocabularies on servers, compared with the same steps in one process.

The tables `wide` and `deep` share the vocabulary of one of these tables.
"""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.embedding.deltas.cases import save, tensors
from tests.embedding.host import shared_vocabulary_cases as shared_cases
from tests.embedding.host.shared_vocabulary_cases import (
    DIMS,
    POLICY,
    check_same,
    create,
    keys_of,
    train,
)
from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import local, test_lookups
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.servers import closures

tpu = tf.tpu.experimental.embedding
EMPTY = -(2**63)


def both(capacity=64, *, num_servers=2, num_shards=3, **options):
    """Returns two equal embeddings, one on servers and one in one process."""
    with local.servers(num_servers):
        distributed, _ = create(capacity, num_shards=num_shards, **options)
    return distributed, create(capacity, num_shards=num_shards, **options)[0]


def full_value(variable):
    shards = [np.asarray(one.numpy()) for one in tables.shards_of(variable)]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)


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


def assert_same_devices(one):
    """Checks that shards of both tables with the same keys share a server."""
    wide, deep = (
        [shard.device for shard in tables.shards_of(by_name["parameters"])]
        for by_name in one._variables.values()
    )
    assert wide == deep


@pytest.mark.parametrize("owner", ["deep", "wide"])
@pytest.mark.parametrize("num_servers, num_shards", [(1, 1), (2, 3), (3, 8)])
@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        ({"evict": "lru"}, {}),
        (POLICY, {}),
        (
            {**POLICY, "unknown": "row"},
            {"table_dtypes": {"wide": "bfloat16"}, "rounding_seed": 3},
        ),
    ],
    ids=["lru", "count", "unknown_row"],
)
def test_steps_equal_one_process_bitwise(
    owner, num_servers, num_shards, policy, arguments
):
    pair = both(
        512 if num_shards == 8 else 64,
        num_servers=num_servers,
        num_shards=num_shards,
        owner=owner,
        arguments=arguments,
        **policy,
    )
    most = 3000 if num_shards == 8 else 300
    same_steps(pair, batches(0, 6, most=most, size=most // 4))
    same_steps(pair, batches(1, 4, most=most, equal=True))
    assert_same(*pair)
    stats = pair[0].vocabularies["wide"].stats()
    assert stats == pair[0].vocabularies["deep"].stats()
    assert stats["num_known"] > 0 < stats["num_evicted"]
    # Only the owner has variables of the vocabulary.
    (other,) = DIMS.keys() - {owner}
    assert not any(
        name.startswith("vocab") for name in pair[0]._variables[other]
    )
    assert_same_devices(pair[0])


@settings(max_examples=6, deadline=None)
@given(
    policy=st.sampled_from(sorted(cases.POLICIES)),
    owner=st.sampled_from(["wide", "deep"]),
    num_servers=st.integers(1, 4),
    num_shards=st.integers(1, 70),
    capacity=st.sampled_from([1, 40, 300, 700]),
    seed=st.integers(0, 2**20),
    most=st.integers(1, 900),
    size=st.integers(1, 60),
    equal=st.booleans(),
)
def test_steps_equal_one_process_for_any_settings(
    policy, owner, num_servers, num_shards, capacity, seed, most, size, equal
):
    pair = both(
        capacity,
        num_servers=num_servers,
        num_shards=num_shards,
        owner=owner,
        **cases.POLICIES[policy],
    )
    same_steps(pair, batches(seed, 3, equal=equal, size=size, most=most))
    assert_same(*pair)


def test_a_key_counts_as_in_the_table_with_most_occurrences():
    one, _ = both(64, admission="count", min_count=3)
    shared_cases.check_occurrences(one)


@pytest.mark.parametrize("packed", [False, True])
def test_strings_equal_one_process(packed):
    pair = both(evict="lru")
    for wide, _ in batches(2, 3):
        # Only some keys of the tables are equal.
        deep = wide + np.arange(len(wide)) % 2
        for one in pair:
            ids = {
                name: tf.strings.as_string(keys)
                for name, keys in (("wide", wide), ("deep", deep))
            }
            one.enqueue(tlm.pack(ids) if packed else ids)
            one.apply_gradients(
                {name: 0.5 * value for name, value in one.dequeue().items()}
            )
    assert_same(*pair)
    before = values(pair[0])
    # The table without a key has no kind of keys in this step.
    empty = np.zeros([0], np.int64)
    for wide, deep in (([3], empty), (empty, [3])):
        pair[0].enqueue({"wide": tf.constant(wide), "deep": tf.constant(deep)})
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="must be strings"
        ):
            pair[0].dequeue()
        pair[0].reset()
        assert values(pair[0]) == before


def test_keys_of_only_one_table_fix_the_kind_of_both():
    one, _ = both()
    empty = np.zeros([0], np.int64)
    train(one, [7], empty)
    assert one.vocabularies["deep"].stats()["keys_are"] == "integers"
    with pytest.raises(ValueError, match="all have integers or all have str"):
        one.enqueue({"wide": tf.constant(["a"]), "deep": tf.constant([1])})


def test_forward_only_steps_look_up_both_tables_and_change_nothing():
    pair = both(unknown="row")
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


@pytest.mark.parametrize("by", ["wide", "deep"])
def test_evictions_equal_one_process(by):
    pair = both(evict="lru", ttl_steps=2)
    same_steps(pair, batches(5, 3, size=15))
    gone = [
        one.vocabularies[by].evict(np.sort(one.vocabularies[by].keys())[::3])
        for one in pair
    ]
    np.testing.assert_array_equal(gone[0], gone[1])
    assert len(gone[0]) > 3
    assert_same(*pair)
    same_steps(pair, batches(6, 4, size=5))
    expired = [np.sort(one.vocabularies[by].evict_expired()) for one in pair]
    np.testing.assert_array_equal(expired[0], expired[1])
    assert len(expired[0]) > 3
    assert_same(*pair)
    same_steps(pair, batches(7, 2))
    assert_same(*pair)


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


def test_evicted_keys_are_reported_for_each_table_as_in_one_process():
    pair, reports = both_with_reports()
    same_steps(pair, batches(8, 5))
    assert not reports[0]
    num_keys = pair[0].vocabularies["wide"].report_evicted()
    assert num_keys == sum(len(one.keys) for one in reports[1]) > 20
    for one in pair:
        words = one.vocabularies["wide"]
        words.evict(np.sort(words.keys())[::4])
    assert_same_reports(reports)
    assert reports_by_table(reports[0]).keys() == DIMS.keys()
    assert_same(*pair)


@pytest.mark.parametrize("by", ["wide", "deep"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_keys_equal_one_process(by, dtype):
    pair = both(512, num_shards=5, arguments={"table_dtypes": {by: dtype}})
    same_steps(pair, batches(9, 2))
    known = np.sort(pair[1].vocabularies[by].keys())[::2]
    keys = np.concatenate([known, np.arange(10**6, 10**6 + 50)])
    rows = np.random.default_rng(0).normal(size=[len(keys), DIMS[by]])
    written = [one.vocabularies[by].write(keys, rows) for one in pair]
    assert written[0].num_new == written[1].num_new == 50
    assert_same(*pair)
    # Both tables have the rows of the new keys.
    assert_same_lookups(*pair, keys)
    same_steps(pair, batches(10, 2))
    assert_same(*pair)


def test_rows_are_moved_between_servers_and_one_process(tmp_path):
    distributed, host = both()
    for wide, deep in batches(11, 2):
        train(distributed, wide, deep)
    for name in DIMS:
        assert distributed.vocabularies[name].export(tmp_path / name) > 10
        tlm.import_rows(tmp_path / name, host.vocabularies[name])
    keys = distributed.vocabularies["wide"].keys()
    assert_same_lookups(distributed, host, keys)


@pytest.mark.parametrize("capacity", [5000, 20])
@pytest.mark.parametrize("by", ["wide", "deep"])
def test_resized_tables_equal_one_process(capacity, by):
    pair, reports = both_with_reports()
    same_steps(pair, batches(12, 3, size=15))
    kept = [one.vocabularies[by].resize(capacity) for one in pair]
    assert kept[0] == kept[1]
    assert (kept[0].num_dropped > 0) == (capacity < 64)
    assert_same(*pair)
    same_steps(pair, batches(13, 3))
    assert_same(*pair)
    pair[0].vocabularies[by].report_evicted()
    assert bool(reports[1]) == (capacity < 64)
    assert_same_reports(reports)
    assert_same_devices(pair[0])


@pytest.mark.parametrize("owner", ["wide", "deep"])
def test_deltas_equal_one_process_bitwise(owner, tmp_path):
    pair = both(600, num_shards=3, owner=owner, evict="lru")
    folders = [tmp_path / "servers", tmp_path / "host"]
    same_steps(pair, batches(14, 2))
    bases = [save(one, folder / "base") for one, folder in zip(pair, folders)]
    assert tensors(bases[0]) == tensors(bases[1])
    writers = [
        tlm.DeltaWriter(one, folder / "deltas", base=base)
        for one, folder, base in zip(pair, folders, bases)
    ]
    for number in range(3):
        # In the first step, only one table looks up keys.
        ((wide, deep),) = batches(15 + number, 1, size=10)
        same_steps(pair, [(wide, deep if number else deep[:0])])
        deltas = []
        for one, writer in zip(pair, writers):
            if number == 1:
                words = one.vocabularies["wide"]
                words.evict(np.sort(words.keys())[:3])
                words.write([10**12], [[2.0]])
            deltas.append(writer.write())
        assert deltas[0].meta.tables == deltas[1].meta.tables
        assert tensors(deltas[0].tensors) == tensors(deltas[1].tensors)
    full = tlm.apply_deltas(bases[0], folders[0] / "deltas", tmp_path / "full")
    assert tensors(full) == tensors(save(pair[0], tmp_path / "end"))


def test_checkpoints_are_restored_in_both_directions(tmp_path):
    distributed, host = both(300, num_shards=3, evict="lru")
    for wide, deep in batches(18, 3):
        train(distributed, wide, deep)
    path = save(distributed, tmp_path / "servers")
    tf.train.Checkpoint(embedding=host).restore(path).assert_consumed()
    assert_same(distributed, host)
    other, _ = both(300, num_servers=3, num_shards=7, evict="lru")
    path = save(host, tmp_path / "host")
    tf.train.Checkpoint(embedding=other).restore(path).assert_consumed()
    assert_same(other, host)
    same_steps((other, host), batches(19, 3))
    assert_same(other, host)
    with local.servers(2):
        separate, _ = create(300, num_shards=3, shared=False)
    with pytest.raises(ValueError, match="the vocabulary of table 'deep'"):
        tf.train.Checkpoint(embedding=separate).restore(path)


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
        closures.begin(numbers)
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


def layer_of(policy):
    layer = tlm.layers.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    64,
                    dim,
                    initializer=tf.random_uniform_initializer(-1.0, 1.0),
                    combiner="sum",
                    name=name,
                )
            )
            for name, dim in DIMS.items()
        },
        tpu.Adagrad(0.3),
        vocabularies={"deep": tlm.OpenVocabulary(64, **policy), "wide": "deep"},
        partitioner=tlm.partitioners.FixedShardsPartitioner(3),
    )
    layer.build()
    return layer


@pytest.mark.parametrize("num_calls", [1, 3])
def test_calls_of_a_layer_equal_one_process(num_calls):
    with local.servers(2):
        distributed = layer_of({"evict": "lru"})
    pair = distributed, layer_of({"evict": "lru"})
    for step in range(4):
        calls = [
            {"wide": tf.constant(wide), "deep": tf.constant(deep)}
            for wide, deep in batches(23 + step, num_calls, size=20)
        ]
        found = [test_lookups.train(layer, calls) for layer in pair]
        for one, other in zip(*map(tf.nest.flatten, found), strict=True):
            np.testing.assert_array_equal(one, other)
        assert_same(*(layer.embedding for layer in pair))
    assert distributed.embedding.vocabularies["wide"].stats()["step"] == (
        4 * num_calls
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
