"""Counts and samples of keys, in layers and embeddings on all backends."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import local, test_key_steps
from tests.reference import vocabulary as reference
from tf_layoutmap.vocabulary import key_tensors

tpu = tf.tpu.experimental.embedding


def embedding(capacity=64, *, num_shards=1, **settings):
    table = tpu.TableConfig(capacity, 2, combiner="sum", name="words")
    one = tlm.TPUEmbedding(
        {"word": tpu.FeatureConfig(table)},
        tpu.SGD(0.5),
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(capacity, **settings)
        },
    )
    one.build()
    return one


def train(one, keys):
    one.enqueue({"word": tf.constant(keys)})
    one.dequeue()
    one.apply_gradients({"word": tf.ones([len(keys), 2])})


def words(one):
    return one.vocabularies["words"]


def as_sets(sampled):
    return [sorted(set(one.numpy().tolist())) for one in sampled]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"evict": "lfu", "half_life_steps": 2},
        {"admission": "count", "min_count": 3},
        {"evict": "lru", "ttl_steps": 2},
    ],
)
def test_counts_and_samples_match_the_reference(settings):
    one = embedding(num_shards=3, **settings)
    expected = reference.Vocabulary(64, **settings)
    draw = np.random.default_rng(1)
    keys = np.arange(120)
    for step in range(1, 12):
        batch = draw.zipf(1.3, 40) % 120
        train(one, batch)
        expected.admit(batch.tolist(), step, step)
        assert words(one).counts(keys).numpy().tolist() == expected.counts(
            keys.tolist(), step
        )
        for by in ("count", "uniform"):
            found = tlm.ops.sample_keys(
                words(one), 9, distribution=by, seed=[7, step]
            )
            sampled, total = expected.sample(9, by, (7, step), step)
            if not sampled:
                assert len(found.keys) == 0
                continue
            keys_, rows, weights = map(list, zip(*sampled))
            assert found.keys.numpy().tolist() == keys_
            assert found.rows.numpy().tolist() == rows
            np.testing.assert_array_equal(
                found.expected_counts,
                np.float32(9 * (np.array(weights) / total)),
            )


def test_counts_of_strings_in_a_function():
    one = embedding()
    train(one, ["red", "fox", "red"])

    @tf.function
    def count(keys):
        return words(one).counts(keys)

    found = count(tf.constant([["red", "fox"], ["owl", "red"]]))
    assert found.numpy().tolist() == [[2, 1], [0, 2]]
    train(one, ["red", "owl"])
    assert count(tf.constant([["red", "owl"]])).numpy().tolist() == [[3, 1]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be strings"):
        words(one).counts([1])


def test_counts_follow_evictions_and_writes():
    one = embedding()
    train(one, [3, 3, 4])
    words(one).evict([3])
    assert words(one).counts([3, 4]).numpy().tolist() == [0, 1]
    words(one).write([3, 4], counts=[7, 8])
    assert words(one).counts([3, 4]).numpy().tolist() == [7, 8]


def test_lookups_without_training_do_not_count():
    one = embedding()
    train(one, [3, 4])
    one({"word": tf.constant([3, 3])})
    one.enqueue({"word": tf.constant([3])}, training=False)
    one.dequeue()
    assert words(one).counts([3]).numpy() == 1


def test_keys_from_the_vocabulary_can_be_counted():
    one = embedding()
    train(one, ["red", "fox", "red"])
    sampled = tlm.ops.sample_keys(words(one), 50)
    by_row = {
        int(row): int(count)
        for row, count in zip(sampled.rows, words(one).counts(sampled.ids()))
    }
    rows = words(one).lookup(["red", "fox"]).numpy().tolist()
    assert by_row == dict(zip(rows, [2, 1]))


def test_sampled_keys_are_looked_up_like_their_strings():
    one = embedding()
    train(one, ["red", "fox"])
    sampled = tlm.ops.sample_keys(
        words(one), 6, distribution="uniform", seed=[1, 1]
    )
    table = next(iter(one.embedding_tables.values()))
    expected = tf.gather(table, sampled.rows)
    found = one({"word": sampled.ids()})["word"]
    np.testing.assert_array_equal(found, expected)
    one.enqueue({"word": sampled.ids(["owl", "red"])})
    np.testing.assert_array_equal(one.dequeue()["word"][2:], expected)
    one.apply_gradients({"word": tf.ones([8, 2])})
    # The vocabulary still has strings, and each lookup has counted.
    assert words(one).stats()["key_type"] == "strings"
    counts = words(one).counts(["owl", "red", "fox"]).numpy()
    assert counts[0] == 1 and counts.sum() == 3 + 7


def test_labels_of_another_kind_raise():
    one = embedding()
    train(one, ["red", "fox"])
    sampled = tlm.ops.sample_keys(words(one), 6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be strings"):
        one.enqueue({"word": sampled.ids([5, 6])})


def test_an_empty_vocabulary_gives_empty_samples():
    found = tlm.ops.sample_keys(words(embedding()), 5)
    assert [one.shape for one in found] == [[0]] * 3
    assert found.ids(["red"]).values.shape == [1]


def test_samples_depend_on_the_seed_only():
    one = embedding(num_shards=2)
    train(one, np.arange(40))

    def sample(seed):
        return tlm.ops.sample_keys(words(one), 20, seed=seed).keys.numpy()

    np.testing.assert_array_equal(sample([1, 2]), sample([1, 2]))
    for other in ([1, 3], [2, 2], [2, 1]):
        assert (sample([1, 2]) != sample(other)).any()
    graph = tf.function(sample_in_graph(one))
    np.testing.assert_array_equal(graph(tf.constant([1, 2])), sample([1, 2]))

    # With an int, each call draws other keys, and the program is repeatable.
    def program():
        draw = tf.function(
            lambda: tlm.ops.sample_keys(words(one), 20, seed=3).keys
        )
        return draw().numpy().tolist(), draw().numpy().tolist()

    first, second = program()
    assert first != second
    assert program() == (first, second)
    tf.random.set_seed(1)
    unseeded = sample(None)
    assert (unseeded != sample(None)).any()
    tf.random.set_seed(1)
    np.testing.assert_array_equal(unseeded, sample(None))


def sample_in_graph(one):
    def sample(seed):
        return tlm.ops.sample_keys(words(one), 20, seed=seed).keys

    return sample


def test_the_number_of_samples_can_be_a_tensor():
    one = embedding()
    train(one, np.arange(40))

    @tf.function
    def sample(number):
        return tlm.ops.sample_keys(words(one), number)

    assert [len(part) for part in sample(tf.constant(7))] == [7] * 3


def test_samples_of_a_step_see_the_keys_of_the_previous_step():
    one = embedding()

    @tf.function
    def step(keys):
        before = tlm.ops.sample_keys(words(one), 100, distribution="uniform")
        one.enqueue({"word": keys})
        one.dequeue()
        one.apply_gradients({"word": tf.ones([2, 2])})
        return before.keys, tlm.ops.sample_keys(words(one), 100).keys

    before, after = step(tf.constant([3, 4], tf.int64))
    assert len(before) == 0
    assert as_sets([after]) == [[3, 4]]
    before, after = step(tf.constant([5, 6], tf.int64))
    assert as_sets([before, after]) == [[3, 4], [3, 4, 5, 6]]


def test_replicas_sample_other_keys():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        one = embedding()

    @tf.function
    def step(seed):
        def replica():
            one.enqueue({"word": tf.range(20, dtype=tf.int64)})
            one.dequeue()
            one.apply_gradients({"word": tf.ones([20, 2])})
            return tlm.ops.sample_keys(words(one), 30, seed=seed).keys

        return strategy.run(replica)

    step([1, 2])
    same = strategy.experimental_local_results(step([1, 2]))
    np.testing.assert_array_equal(*same)
    for seed in (3, None):
        first, second = strategy.experimental_local_results(
            tf.function(
                lambda seed=seed: strategy.run(
                    lambda: tlm.ops.sample_keys(words(one), 30, seed=seed).keys
                )
            )()
        )
        assert (first != second).numpy().any()
    assert words(one).counts([1]).numpy() == 4


@pytest.mark.parametrize("num_servers, num_shards", [(1, 1), (2, 3), (3, 8)])
def test_servers_count_and_sample_like_one_process(num_servers, num_shards):
    distributed, host = test_key_steps.both(
        cases.POLICIES["lfu"],
        capacity=512,
        num_servers=num_servers,
        num_shards=num_shards,
    )
    assert len(tlm.ops.sample_keys(words(distributed), 5).keys) == 0
    for step in range(4):
        cases.train(distributed, step)
        cases.train(host, step)
    keys = words(host).keys()
    expected = words(host).counts(keys).numpy()
    np.testing.assert_array_equal(words(distributed).counts(keys), expected)
    assert len(set(expected.tolist())) > 2
    num_sampled = 60_000
    for by in ("count", "uniform"):
        weights = np.maximum(expected, 1) if by == "count" else expected**0
        probabilities = dict(
            zip(keys.numpy().tolist(), weights / weights.sum())
        )

        @tf.function
        def sample(by=by):
            return tlm.ops.sample_keys(
                words(distributed), num_sampled, distribution=by, seed=[1, 2]
            )

        found = sample()
        np.testing.assert_array_equal(
            found.rows, words(distributed).lookup(found.ids())
        )
        np.testing.assert_allclose(
            found.expected_counts,
            [
                num_sampled * probabilities[key]
                for key in found.keys.numpy().tolist()
            ],
            rtol=1e-6,
        )
        drawn = collections.Counter(found.keys.numpy().tolist())
        for key, p in probabilities.items():
            # Six standard deviations, because there are many keys.
            bound = 6 * (num_sampled * p * (1 - p)) ** 0.5
            assert abs(drawn[key] - num_sampled * p) < bound


def test_a_server_without_keys_is_not_sampled():
    with local.servers(2, 2):
        one = cases.embedding({}, capacity=512)
    words(one).write([5])
    found = tlm.ops.sample_keys(words(one), 40)
    assert as_sets(found)[0] == [5]
    assert as_sets(found)[2] == [40.0]


def test_resized_vocabularies_are_sampled():
    one = embedding()
    vocabulary = words(one)
    train(one, np.arange(30))
    vocabulary.resize(400)
    assert vocabulary.counts([3, 99]).numpy().tolist() == [1, 0]
    found = tlm.ops.sample_keys(vocabulary, 500)
    assert as_sets(found)[0] == list(range(30))


def test_exports_and_xla_raise(tmp_path):
    one = embedding()
    train(one, [3])

    @tf.function(jit_compile=True)
    def compiled():
        return words(one).counts([3])

    with pytest.raises(NotImplementedError, match="XLA.*'words'"):
        compiled()

    module = tf.Module()
    module.embedding = one
    module.sample = tf.function(
        lambda: tlm.ops.sample_keys(words(one), 5).keys, input_signature=[]
    )
    with pytest.raises(NotImplementedError, match="SavedModel.*'words'"):
        tf.saved_model.save(module, str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_sampled": 0}, ValueError, "num_sampled.*at least 1.*words"),
        ({"num_sampled": 2.5}, TypeError, "num_sampled"),
        ({"num_sampled": tf.constant(1.0)}, TypeError, "integer scalar"),
        ({"num_sampled": tf.constant([1])}, TypeError, "integer scalar"),
        (
            {"distribution": "counts"},
            ValueError,
            "distribution.*one of.*uniform.*words",
        ),
        ({"seed": [1, 2, 3]}, ValueError, "seed.*two integers.*words"),
        ({"seed": [1.0, 2.0]}, ValueError, "seed.*two integers"),
        ({"vocabulary": 3}, TypeError, "vocabulary of a table"),
    ],
)
def test_invalid_arguments_raise(arguments, error, message):
    one = embedding()
    with pytest.raises(error, match=message):
        tlm.ops.sample_keys(
            **{"vocabulary": words(one), "num_sampled": 5, **arguments}
        )


def test_the_kind_of_stored_keys_is_the_kind_of_the_labels():
    one = embedding()
    train(one, ["red"])
    sampled = tlm.ops.sample_keys(words(one), 1)
    assert sampled.ids().kind == 0
    ids = sampled.ids(tf.constant([["fox"], ["hen"]]))
    assert ids.kind == key_tensors.STRINGS
    np.testing.assert_array_equal(
        ids.values,
        key_tensors.hash_strings(tf.constant(["fox", "hen", "red"])),
    )
