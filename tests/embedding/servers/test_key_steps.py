"""Steps over servers with keys, beside those of one process."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import local
from tests.reference import vocabulary as reference
from tf_layoutmap.embedding.servers import closures

tpu = tf.tpu.experimental.embedding


def both(policy, *arguments, num_servers=2, num_shards=None, **options):
    """The same over servers and in one process."""
    with local.servers(num_servers, num_shards):
        ours = cases.embedding(policy, *arguments, **options)
    return ours, cases.embedding(policy, *arguments, **options)


def same_steps(ours, host, steps, **options):
    for step in steps:
        found = cases.train(ours, step, **options)
        expected = cases.train(host, step, **options)
        for name, one in found.items():
            np.testing.assert_array_equal(one, expected[name])
    assert cases.differences(ours, host) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_servers, num_shards", [(1, 1), (2, 3), (3, 8)])
@pytest.mark.parametrize(
    "policy", cases.POLICIES.values(), ids=cases.POLICIES.keys()
)
def test_all_is_that_of_one_process_to_the_bit(policy, num_servers, num_shards):
    ours, host = both(
        policy,
        capacity=512 if num_shards == 8 else 64,
        num_servers=num_servers,
        num_shards=num_shards,
    )
    same_steps(ours, host, range(5))
    found = ours.vocabularies["words"].stats()
    assert found == host.vocabularies["words"].stats()
    assert found["num_known"] > 0


@settings(max_examples=4, deadline=None)
@given(
    policy=st.sampled_from(sorted(cases.POLICIES)),
    num_servers=st.integers(1, 4),
    num_shards=st.integers(1, 70),
    capacity=st.sampled_from([1, 40, 300, 700]),
    seed=st.integers(0, 2**20),
    most=st.integers(1, 900),
    num_samples=st.integers(0, 20),
)
def test_so_it_is_for_any_batches_sizes_and_cuts(
    policy, num_servers, num_shards, capacity, seed, most, num_samples
):
    ours, host = both(
        cases.POLICIES[policy],
        capacity=capacity,
        num_servers=num_servers,
        num_shards=num_shards,
    )
    same_steps(
        ours, host, range(seed, seed + 3), most=most, num_samples=num_samples
    )


def test_keys_give_their_rows_away_as_there():
    ours, host = both({"evict": "lru"}, num_servers=3)
    same_steps(ours, host, range(8), most=400, num_samples=12)
    assert ours.vocabularies["words"].stats()["num_evicted"] > 20


@pytest.mark.parametrize(
    "optimizer",
    [
        tpu.SGD(0.3, use_gradient_accumulation=False, clip_weight_max=0.9),
        tpu.Adam(0.3),
        tpu.FTRL(0.3),
        tlm.optimizers.RowwiseAdagrad(0.3),
    ],
    ids=lambda one: type(one).__name__,
)
def test_so_it_is_for_other_rules_and_rows_of_16_bits(optimizer):
    ours, host = both(
        {"evict": "lru"},
        optimizer,
        table_dtypes={"words": "bfloat16", "ads": "float16"},
    )
    same_steps(ours, host, range(4))


def test_strings_are_keys():
    ours, host = both({"evict": "lfu"})
    same_steps(ours, host, range(3), strings=True)
    vocabulary = ours.vocabularies["words"]
    assert vocabulary.stats()["keys_are"] == "strings"
    keys = cases.batch(1, strings=True)[0]["bag"].values
    np.testing.assert_array_equal(
        vocabulary.lookup(keys), host.vocabularies["words"].lookup(keys)
    )
    assert vocabulary.contains(keys).numpy().all()


def test_integers_after_strings_are_refused_and_change_nothing():
    ours, _ = both({})
    cases.train(ours, 0, strings=True)
    before = cases.values(ours)
    ours.enqueue(*cases.batch(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be strings"):
        ours.dequeue()
    assert cases.values(ours) == before


def test_a_forward_only_step_changes_nothing_and_finds_what_there_is():
    ours, host = both({"unknown": "row"})
    same_steps(ours, host, range(2))
    before = cases.values(ours)
    ids, weights = cases.batch(9)
    found, expected = [], []
    for one, activations in [(ours, found), (host, expected)]:
        one.enqueue(ids, weights, training=False)
        activations.append(one.dequeue())
    for name, one in found[0].items():
        np.testing.assert_array_equal(one, expected[0][name])
    assert cases.values(ours) == before
    expected = host(ids, weights)
    for name, one in ours(ids, weights).items():
        np.testing.assert_array_equal(one, expected[name])


def test_a_traced_step_that_nothing_applies_is_forward_only():
    ours, host = both({"evict": "lru"})
    same_steps(ours, host, range(2))
    before = cases.values(ours)

    @tf.function
    def look_up(ids):
        ours.enqueue(ids)
        return ours.dequeue()

    look_up(cases.batch(9)[0])
    assert cases.values(ours) == before


def test_a_full_vocabulary_refuses_a_step_that_then_is_none():
    policy = {"evict": "none", "on_full": "error"}
    ours, _ = both(policy, capacity=8, num_servers=1)
    before = cases.values(ours)
    ours.enqueue(*cases.batch(0))
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="has no free row.*table 'words'",
    ):
        ours.dequeue()
    assert cases.values(ours) == before


def test_of_several_servers_training_and_saving_go_on_after_it(tmp_path):
    """The other servers have counted the step that one has refused."""
    with local.servers(2):
        ours = cases.embedding({"evict": "none", "on_full": "error"})
    vocabulary = ours.vocabularies["words"]
    keys = np.arange(2000)
    # All of one shard's, more than it has room for; and one of the other's.
    first = vocabulary.key_variable.variables[0].shape[0]
    mixed = keys[[bucket_of(key) < first for key in keys]]
    other = next(key for key in keys if key not in mixed)

    def enqueue(found):
        ours.enqueue(
            {
                "bag": tf.constant(found, tf.int64)[:, tf.newaxis],
                "text": tf.zeros([len(found), 0], tf.int64),
                "ads": tf.zeros([len(found), 1], tf.int64),
            }
        )
        return ours.dequeue()

    with pytest.raises(tf.errors.FailedPreconditionError, match="no free row"):
        enqueue([*mixed[:100], other])
    ours.reset()
    assert not vocabulary.contains(mixed).numpy().any()
    tf.train.Checkpoint(embedding=ours).write(str(tmp_path / "saved"))
    ours.apply_gradients(cases.gradients(enqueue([*mixed[:3], other])))
    assert vocabulary.contains([*mixed[:3], other]).numpy().all()


def bucket_of(key):
    """Of 8 buckets."""
    return (reference.mix(int(key)) >> 32) * 8 >> 32


def test_an_update_between_fetch_and_apply_is_counted():
    with local.servers(2):
        ours = cases.embedding({})
    ours.enqueue(*cases.batch(0))
    activations = ours.dequeue()
    closure_of(ours)(0, 1)
    ours.apply_gradients(cases.gradients(activations))
    assert ours.stats()["staleness"]["max"] == 1


def closure_of(ours):
    """What a worker runs: of numbers and a batch."""

    @tf.function(reduce_retracing=True)
    def closure(numbers, ids, weights, dies):
        closures.begin(numbers)
        ours.enqueue(ids, {"bag": weights, "text": None, "ads": None})
        activations = ours.dequeue()
        with tf.control_dependencies(dying(activations, dies)):
            ours.apply_gradients(cases.gradients(activations))

    def run(number, step, *, dies=False, epoch=1):
        ids, weights = cases.batch(step)
        with (
            pytest.raises(tf.errors.InvalidArgumentError, match="dies")
            if dies
            else contextlib.nullcontext()
        ):
            closure(
                tf.constant([epoch, number], tf.int64),
                ids,
                weights["bag"],
                dies,
            )

    return run


def dying(activations, dies):
    """What comes between the two calls of a worker that dies there."""
    with tf.control_dependencies(list(activations.values())):
        return [tf.debugging.Assert(False, ["dies"])] if dies else []


def test_a_closure_that_comes_again_counts_its_keys_once():
    """As when its worker has died before it sent the gradients."""
    ours, host = both({"evict": "lru"})
    run = closure_of(ours)
    run(0, 0, dies=True)
    run(0, 0)
    run(1, 1)
    run(1, 1)
    cases.train(host, 0)
    cases.train(host, 1)
    assert cases.differences(ours, host) == []
    assert ours.stats()["num_repeated"] == 1


def test_with_another_batch_it_finds_keys_and_gives_none_a_row():
    ours, host = both({"evict": "lru"})
    run = closure_of(ours)
    run(0, 0, dies=True)
    before = ours.vocabularies["words"].stats()
    run(0, 5)
    assert ours.vocabularies["words"].stats() == before
    cases.train(host, 0)
    np.testing.assert_array_equal(
        ours.vocabularies["words"].keys(), host.vocabularies["words"].keys()
    )


def test_gradients_of_a_run_that_another_has_replaced_are_refused():
    ours, _ = both({"evict": "lru"})
    ids, weights = cases.batch(0)

    @tf.function
    def closure(ids, weights):
        closures.begin(tf.constant([1, 0], tf.int64))
        ours.enqueue(ids, {"bag": weights, "text": None, "ads": None})
        activations = ours.dequeue()
        # The same closure elsewhere, meanwhile.
        with tf.control_dependencies(list(activations.values())):
            done = tf.py_function(
                lambda: closure_of(ours)(0, 0, dies=True) or 0, [], tf.int64
            )
        with tf.control_dependencies([done]):
            ours.apply_gradients(cases.gradients(activations))

    before = ours.stats()["num_updates"]
    with pytest.raises(tf.errors.FailedPreconditionError, match="too late"):
        closure(ids, weights["bag"])
    assert ours.stats()["num_updates"] == before


def test_rows_of_a_step_that_is_awaited_stay():
    """16 rows, and a closure whose gradients never come."""
    with local.servers(1):
        ours = one_table()
    step = one_table_step(ours)
    step(0, range(16), dies=True)
    step(1, range(100, 116))
    vocabulary = ours.vocabularies["words"]
    assert sorted(vocabulary.keys().numpy()) == list(range(16))
    assert vocabulary.stats()["num_full"] == 16
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="step in flight"
    ):
        vocabulary.evict([3])
    # It is run again, as a coordinator does: then its rows may go.
    step(0, range(16))
    assert vocabulary.evict([3, 99, 3]).numpy().tolist() == [3]
    step(2, range(200, 216))
    assert not vocabulary.contains(range(16)).numpy().any()


def test_a_new_epoch_frees_the_rows_of_closures_that_were_given_up():
    with local.servers(1):
        ours = one_table()
    step = one_table_step(ours)
    step(0, range(16), dies=True)
    step(0, range(100, 116), epoch=2)
    assert ours.vocabularies["words"].contains(range(100, 116)).numpy().all()


def test_steps_without_a_closure_do_not_pin_rows_for_ever():
    with local.servers(1):
        ours = one_table()

    # A lookup of a layer under a tape, whose gradients never come.
    fetch = ours._state.backend.open
    fetch({"word": tf.range(16, dtype=tf.int64)}, None)
    for _ in range(256):
        fetch({"word": tf.constant([5], tf.int64)}, None)
    fetch({"word": tf.range(100, 116, dtype=tf.int64)}, None)
    vocabulary = ours.vocabularies["words"]
    assert vocabulary.contains([5]).numpy().all()
    assert vocabulary.contains(range(100, 115)).numpy().sum() == 15


def test_reset_frees_the_rows_of_the_step_that_it_forgets():
    with local.servers(2):
        ours = one_table()
    ours.enqueue({"word": tf.range(16, dtype=tf.int64)})
    ours.dequeue()
    ours.reset()
    assert len(ours.vocabularies["words"].evict(range(16))) == 16


def one_table():
    table = tpu.TableConfig(
        16, 1, name="words", initializer=tf.zeros_initializer()
    )
    made = tlm.TPUEmbedding(
        {"word": tpu.FeatureConfig(table)},
        tpu.SGD(1.0),
        vocabularies={"words": tlm.OpenVocabulary(16)},
    )
    made.build()
    return made


def one_table_step(ours):
    @tf.function(reduce_retracing=True)
    def closure(numbers, keys, dies):
        closures.begin(numbers)
        ours.enqueue({"word": keys})
        activations = ours.dequeue()
        with tf.control_dependencies(dying(activations, dies)):
            ours.apply_gradients(
                tf.nest.map_structure(tf.ones_like, activations)
            )

    def step(number, keys, *, dies=False, epoch=1):
        with (
            pytest.raises(tf.errors.InvalidArgumentError, match="dies")
            if dies
            else contextlib.nullcontext()
        ):
            closure(
                tf.constant([epoch, number], tf.int64),
                tf.constant(list(keys), tf.int64),
                dies,
            )

    return step


def test_a_closure_that_looks_keys_up_twice_is_refused():
    with local.servers(1):
        ours = one_table()

    @tf.function
    def closure(keys):
        closures.begin(tf.constant([1, 0], tf.int64))
        for _ in tf.range(2):
            ours.enqueue({"word": keys})
            ours.apply_gradients(ours.dequeue())

    with pytest.raises(tf.errors.FailedPreconditionError, match="only once"):
        closure(tf.constant([1, 2], tf.int64))


def test_keys_that_expire_leave_when_they_are_told_to():
    ours, host = both({"evict": "none", "ttl_steps": 2}, num_servers=3)
    same_steps(ours, host, range(6))
    found = ours.vocabularies["words"].evict_expired()
    expected = host.vocabularies["words"].evict_expired()
    np.testing.assert_array_equal(found, expected)
    assert len(found) > 0
    some = ours.vocabularies["words"].keys()[::2]
    np.testing.assert_array_equal(
        ours.vocabularies["words"].evict(some),
        host.vocabularies["words"].evict(some),
    )
    assert cases.differences(ours, host) == []


def test_what_workers_cannot_do_is_refused():
    with local.servers(1):
        with pytest.raises(NotImplementedError, match="on_evict.*'words'"):
            cases.embedding({"on_evict": print})
        ours = cases.embedding({})
    with pytest.raises(NotImplementedError, match="convert_vocabularies"):
        ours.vocabularies["words"].resize(128)


@pytest.mark.parametrize("policy", ["lru", "count"])
def test_checkpoints_go_to_one_process_and_other_servers_and_back(
    policy, tmp_path
):
    policy = cases.POLICIES[policy]
    ours, host = both(policy, num_servers=3)
    same_steps(ours, host, range(3))
    for name, source in [("servers", ours), ("host", host)]:
        path = tf.train.Checkpoint(embedding=source).write(str(tmp_path / name))
        fresh, alone = both(policy, num_servers=2)
        for one in (fresh, alone):
            tf.train.Checkpoint(embedding=one).read(path).assert_consumed()
            assert cases.differences(one, source) == []
        same_steps(fresh, alone, range(3, 5))
