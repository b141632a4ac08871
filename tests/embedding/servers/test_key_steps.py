"""Steps with keys on servers, compared with the same steps in one process."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import local
from tests.reference import vocabulary as reference
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

tpu = tf.tpu.experimental.embedding


def both(policy, *arguments, num_servers=2, num_shards=None, **options):
    """Returns two equal embeddings, one on servers and one in one process."""
    with local.servers(num_servers, num_shards):
        distributed = cases.embedding(policy, *arguments, **options)
    return distributed, cases.embedding(policy, *arguments, **options)


def same_steps(distributed, host, steps, **options):
    for step in steps:
        found = cases.train(distributed, step, **options)
        expected = cases.train(host, step, **options)
        for name, one in found.items():
            np.testing.assert_array_equal(one, expected[name])
    assert cases.differences(distributed, host) == []


def test_integers_after_strings_raise_and_change_nothing():
    distributed, _ = both({})
    cases.train(distributed, 0, strings=True)
    before = cases.values(distributed)
    distributed.enqueue(*cases.batch(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be strings"):
        distributed.dequeue()
    assert cases.values(distributed) == before


def test_a_forward_only_step_looks_up_and_changes_nothing():
    distributed, host = both({"oov_embedding": "trainable"})
    same_steps(distributed, host, range(2))
    before = cases.values(distributed)
    ids, weights = cases.batch(9)
    found, expected = [], []
    for one, activations in [(distributed, found), (host, expected)]:
        one.enqueue(ids, weights, training=False)
        activations.append(one.dequeue())
    for name, one in found[0].items():
        np.testing.assert_array_equal(one, expected[0][name])
    assert cases.values(distributed) == before
    expected = host(ids, weights)
    for name, one in distributed(ids, weights).items():
        np.testing.assert_array_equal(one, expected[name])


def test_a_traced_step_without_apply_is_forward_only():
    distributed, host = both({"evict": "lru"})
    same_steps(distributed, host, range(2))
    before = cases.values(distributed)

    @tf.function
    def look_up(ids):
        distributed.enqueue(ids)
        return distributed.dequeue()

    look_up(cases.batch(9)[0])
    assert cases.values(distributed) == before


def test_a_full_vocabulary_raises_and_changes_nothing():
    policy = {"evict": "none", "on_full": "error"}
    distributed, _ = both(policy, capacity=8, num_servers=1)
    before = cases.values(distributed)
    distributed.enqueue(*cases.batch(0))
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="has no free row.*table 'words'",
    ):
        distributed.dequeue()
    assert cases.values(distributed) == before


def test_training_and_saving_continue_after_a_full_server(tmp_path):
    """A step that fails on a full server is counted on the other server."""
    with local.servers(2):
        distributed = cases.embedding({"evict": "none", "on_full": "error"})
    vocabulary = distributed.vocabularies["words"]
    keys = np.arange(2000)
    # `mixed` contains more keys of the first shard than the shard has rows.
    # `other` is a key of another shard.
    first = vocabulary.key_variable.variables[0].shape[0]
    mixed = keys[[bucket_of(key) < first for key in keys]]
    other = next(key for key in keys if key not in mixed)

    def enqueue(found):
        distributed.enqueue(
            {
                "bag": tf.constant(found, tf.int64)[:, tf.newaxis],
                "text": tf.zeros([len(found), 0], tf.int64),
                "ads": tf.zeros([len(found), 1], tf.int64),
            }
        )
        return distributed.dequeue()

    with pytest.raises(tf.errors.FailedPreconditionError, match="no free row"):
        enqueue([*mixed[:100], other])
    distributed.reset()
    assert not vocabulary.contains(mixed).numpy().any()
    tf.train.Checkpoint(embedding=distributed).write(str(tmp_path / "saved"))
    distributed.apply_gradients(cases.gradients(enqueue([*mixed[:3], other])))
    assert vocabulary.contains([*mixed[:3], other]).numpy().all()


def bucket_of(key):
    """Returns the index of the key's bucket in a table of 8 buckets."""
    return (reference.mix(int(key)) >> 32) * 8 >> 32


def test_an_update_between_fetch_and_apply_is_counted():
    with local.servers(2):
        distributed = cases.embedding({})
    distributed.enqueue(*cases.batch(0))
    activations = distributed.dequeue()
    closure_of(distributed)(0, 1)
    distributed.apply_gradients(cases.gradients(activations))
    assert distributed.stats()["staleness"]["max"] == 1


def closure_of(distributed):
    """Returns a function that runs a worker's closure on a batch."""

    @tf.function(reduce_retracing=True)
    def closure(numbers, ids, weights, dies):
        ClosureTrace().begin(numbers)
        distributed.enqueue(ids, {"bag": weights, "text": None, "ads": None})
        activations = distributed.dequeue()
        with tf.control_dependencies(dying(activations, dies)):
            distributed.apply_gradients(cases.gradients(activations))

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
    """Returns an op that fails between the two server calls of a worker."""
    with tf.control_dependencies(list(activations.values())):
        return [tf.debugging.Assert(False, ["dies"])] if dies else []


def test_a_repeated_closure_counts_its_keys_once():
    """The worker of the first run dies before it sends gradients."""
    distributed, host = both({"evict": "lru"})
    run = closure_of(distributed)
    run(0, 0, dies=True)
    run(0, 0)
    run(1, 1)
    run(1, 1)
    cases.train(host, 0)
    cases.train(host, 1)
    assert cases.differences(distributed, host) == []
    assert distributed.stats()["num_repeated"] == 1


def test_a_repeated_closure_with_other_keys_inserts_none():
    distributed, host = both({"evict": "lru"})
    run = closure_of(distributed)
    run(0, 0, dies=True)
    before = distributed.vocabularies["words"].stats()
    run(0, 5)
    assert distributed.vocabularies["words"].stats() == before
    cases.train(host, 0)
    np.testing.assert_array_equal(
        distributed.vocabularies["words"].keys(),
        host.vocabularies["words"].keys(),
    )


def test_gradients_of_a_replaced_run_raise():
    distributed, _ = both({"evict": "lru"})
    ids, weights = cases.batch(0)

    @tf.function
    def closure(ids, weights):
        ClosureTrace().begin(tf.constant([1, 0], tf.int64))
        distributed.enqueue(ids, {"bag": weights, "text": None, "ads": None})
        activations = distributed.dequeue()
        # Before this closure applies its gradients, another worker runs the
        # same closure.
        with tf.control_dependencies(list(activations.values())):
            done = tf.py_function(
                lambda: closure_of(distributed)(0, 0, dies=True) or 0,
                [],
                tf.int64,
            )
        with tf.control_dependencies([done]):
            distributed.apply_gradients(cases.gradients(activations))

    before = distributed.stats()["num_updates"]
    with pytest.raises(tf.errors.FailedPreconditionError, match="too late"):
        closure(ids, weights["bag"])
    assert distributed.stats()["num_updates"] == before


def test_rows_of_a_pending_step_are_not_evicted():
    """A closure uses all 16 rows and dies before it sends gradients."""
    with local.servers(1):
        distributed = one_table()
    step = one_table_step(distributed)
    step(0, range(16), dies=True)
    step(1, range(100, 116))
    vocabulary = distributed.vocabularies["words"]
    assert sorted(vocabulary.keys().numpy()) == list(range(16))
    assert vocabulary.stats()["num_full"] == 16
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="step in flight"
    ):
        vocabulary.evict([3])
    # After the closure has run again and completed, its rows can be evicted.
    step(0, range(16))
    assert vocabulary.evict([3, 99, 3]).numpy().tolist() == [3]
    step(2, range(200, 216))
    assert not vocabulary.contains(range(16)).numpy().any()


def test_a_new_epoch_frees_the_rows_of_lost_closures():
    with local.servers(1):
        distributed = one_table()
    step = one_table_step(distributed)
    step(0, range(16), dies=True)
    step(0, range(100, 116), epoch=2)
    assert (
        distributed.vocabularies["words"]
        .contains(range(100, 116))
        .numpy()
        .all()
    )


def test_lookups_without_a_closure_pin_rows_for_a_limited_time():
    with local.servers(1):
        distributed = one_table()

    # Simulates a layer's lookups under a tape that are never followed by
    # gradients.
    fetch = distributed._state.backend.open
    fetch({"word": tf.range(16, dtype=tf.int64)}, None)
    for _ in range(256):
        fetch({"word": tf.constant([5], tf.int64)}, None)
    fetch({"word": tf.range(100, 116, dtype=tf.int64)}, None)
    vocabulary = distributed.vocabularies["words"]
    assert vocabulary.contains([5]).numpy().all()
    assert vocabulary.contains(range(100, 115)).numpy().sum() == 15


def test_reset_frees_the_rows_of_the_discarded_step():
    with local.servers(2):
        distributed = one_table()
    distributed.enqueue({"word": tf.range(16, dtype=tf.int64)})
    distributed.dequeue()
    distributed.reset()
    assert len(distributed.vocabularies["words"].evict(range(16))) == 16


def one_table():
    table = tpu.TableConfig(
        16, 1, name="words", initializer=tf.zeros_initializer()
    )
    built = tlm.TPUEmbedding(
        {"word": tpu.FeatureConfig(table)},
        tpu.SGD(1.0),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(16)},
    )
    built.build()
    return built


def one_table_step(distributed):
    @tf.function(reduce_retracing=True)
    def closure(numbers, keys, dies):
        ClosureTrace().begin(numbers)
        distributed.enqueue({"word": keys})
        activations = distributed.dequeue()
        with tf.control_dependencies(dying(activations, dies)):
            distributed.apply_gradients(
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


def test_a_closure_with_two_lookups_of_keys_raises():
    with local.servers(1):
        distributed = one_table()

    @tf.function
    def closure(keys):
        ClosureTrace().begin(tf.constant([1, 0], tf.int64))
        for _ in tf.range(2):
            distributed.enqueue({"word": keys})
            distributed.apply_gradients(distributed.dequeue())

    with pytest.raises(tf.errors.FailedPreconditionError, match="only once"):
        closure(tf.constant([1, 2], tf.int64))


def test_vocabularies_that_keep_strings_raise():
    with local.servers(1):
        with pytest.raises(
            NotImplementedError, match="`keep_strings`.*on the servers.*'words'"
        ):
            cases.embedding({"keep_strings": True})


def test_a_step_calls_each_server_twice():
    with local.servers(2):
        one = cases.embedding({"evict": "lru"})
    ids, weights = cases.batch(0)
    concrete = cases.step_of(one).get_concrete_function(ids, weights["bag"])
    kinds = [each.type for each in concrete.graph.get_operations()]
    for kind in ("FetchKeys", "ApplyRows"):
        assert kinds.count(f"LayoutMap>{kind}") == 2
