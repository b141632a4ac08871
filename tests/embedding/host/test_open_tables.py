"""Tests open-vocabulary tables on the host engine."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.host import open_table_cases as cases
from tf_layoutmap.embedding import optimizers

tpu = tf.tpu.experimental.embedding


def random_batch(rng, *, num_samples=20, most=60, weights=False):
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 4, num_samples))])
    keys = rng.zipf(1.3, splits[-1]) % most * 1_000_003 - 5
    found = cases.ragged(keys, splits)
    return found, found.with_values(
        tf.constant(rng.integers(1, 4, len(keys)), tf.float32)
    ) if weights else None


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "optimizer",
    [
        tpu.SGD(0.1),
        tpu.Adagrad(0.1),
        tpu.Adam(0.1),
        tpu.FTRL(0.1),
        tpu.AdagradMomentum(0.1, 0.9),
        optimizers.RowwiseAdagrad(0.1),
        optimizers.LAMB(0.1),
    ],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_open_table_trains_like_a_closed_table(optimizer, dtype):
    """Trains a table of 128 rows on more than 128 keys, so keys are evicted."""
    rng = np.random.default_rng(0)
    options = {"table_dtypes": dtype, "rounding_seed": 5}
    opened, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(100, evict="lru"),
        optimizer,
        features=("ids", "text"),
        sequence=2,
        num_shards=3,
        combiner="mean",
        **options,
    )
    opened.build()
    closed = cases.ClosedTwin(opened, config, optimizer, **options)
    for _ in range(8):
        ids, weights = random_batch(rng, most=150, weights=True)
        text, _ = random_batch(rng, most=150)
        opened.enqueue(
            {"ids": ids, "text": text}, {"ids": weights, "text": None}
        )
        closed.take_new_keys()
        closed.embedding.enqueue(
            {"ids": closed.rows(ids), "text": closed.rows(text)},
            {"ids": weights, "text": None},
        )
        found = opened.dequeue()
        expected = closed.embedding.dequeue()
        gradients = {}
        for name, value in found.items():
            assert (value.numpy() == expected[name].numpy()).all()
            gradients[name] = tf.constant(
                rng.uniform(-1, 1, value.shape), tf.float32
            )
        opened.apply_gradients(gradients)
        closed.embedding.apply_gradients(gradients)
    assert opened.vocabularies["words"].stats()["num_evicted"] > 0
    assert opened.vocabularies["words"].stats()["num_full"] == 0
    used = (
        opened.vocabularies["words"]
        .lookup(opened.vocabularies["words"].keys())
        .numpy()
    )
    for open_variable, closed_variable in [
        (
            opened.embedding_tables[config],
            closed.embedding.embedding_tables[closed.config],
        )
    ] + [
        (slot, closed.embedding.slot_variables[closed.config][name])
        for name, slot in opened.slot_variables[config].items()
    ]:
        np.testing.assert_array_equal(
            cases.rows_of(open_variable)[used],
            cases.rows_of(closed_variable)[used],
        )


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize(
    "policy",
    [{"evict": "lru"}, {"evict": "lfu"}, {"evict": "none", "ttl_steps": 2}],
    ids=lambda policy: policy["evict"],
)
def test_updates_are_applied_to_their_own_key_only(pipelined, policy):
    """Each update of a key adds a number that depends on the key to its row."""
    rng = np.random.default_rng(1)
    opened, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(64, **policy),
        tpu.SGD(1.0),
        dim=1,
        initializer=tf.zeros_initializer(),
        pipeline_execution_with_tensor_core=pipelined,
    )
    opened.build()
    vocabulary = opened.vocabularies["words"]
    expected: dict[int, float] = {}
    row_of: dict[int, int] = {}
    waiting = []

    def finish():
        keys, known = waiting.pop(0)
        opened.dequeue()
        # Each sample has one key, so the gradient of a sample is the number of
        # its key.
        opened.apply_gradients(
            {"ids": tf.constant(-(keys % 97 + 1).reshape(-1, 1), tf.float32)}
        )
        for key in keys[known].tolist():
            expected[key] += key % 97 + 1

    for step in range(60):
        keys = rng.integers(0, 400, 20) + step // 10 * 50
        opened.enqueue({"ids": tf.constant(keys)})
        rows = vocabulary.lookup(keys).numpy()
        for key, row in zip(keys.tolist(), rows.tolist()):
            if row >= 0 and row_of.get(key) != row:
                # The key that used this row before was evicted, so its expected
                # value is removed.
                for old in [k for k, r in row_of.items() if r == row]:
                    del row_of[old], expected[old]
                row_of[key], expected[key] = row, 0.0
        waiting.append((keys, rows >= 0))
        if len(waiting) == 4:
            finish()
    while waiting:
        finish()
    opened.flush()
    values = cases.rows_of(opened.embedding_tables[config])[:, 0]
    remaining = vocabulary.keys().numpy().tolist()
    assert len(remaining) == 64
    assert {key: values[row_of[key]] for key in remaining} == {
        key: expected[key] for key in remaining
    }
    # Some keys were not inserted, because all candidate rows were pinned.
    assert vocabulary.stats()["num_full"] > 0


def test_a_forward_step_in_flight_pins_its_rows():
    opened, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8),
        tpu.SGD(0.5),
        dim=1,
        initializer=tf.ones_initializer(),
    )
    first = np.arange(8)
    opened.enqueue({"ids": tf.constant(first)})
    opened.dequeue()
    opened.apply_gradients({"ids": tf.fill([8, 1], -2.0)})
    opened.enqueue({"ids": tf.constant(first)}, training=False)
    opened.enqueue({"ids": tf.constant(first + 100)})
    assert (opened.dequeue()["ids"].numpy() == 2.0).all()
    # The new keys have no rows, because all rows are pinned.
    assert (opened.dequeue()["ids"].numpy() == 0.0).all()
    opened.apply_gradients({"ids": tf.ones([8, 1])})
    opened.enqueue({"ids": tf.constant(first + 100)})
    assert (opened.dequeue()["ids"].numpy() == 1.0).all()


@pytest.mark.parametrize("oov_embedding", ["zeros", "trainable"])
def test_unknown_keys_use_zeros_or_the_shared_row(oov_embedding):
    opened, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(
            8, admission="count", min_count=2, oov_embedding=oov_embedding
        ),
        tpu.SGD(1.0),
        dim=1,
        initializer=tf.ones_initializer(),
        combiner="mean",
    )
    batch = {"ids": tf.ragged.constant([[1, 1, 2], [3]], dtype=tf.int64)}
    opened.enqueue(batch)
    np.testing.assert_allclose(
        opened.dequeue()["ids"].numpy()[:, 0], [2 / 3, 0.0]
    )
    opened.apply_gradients({"ids": tf.constant([[-3.0], [-6.0]])})
    rows = cases.rows_of(opened.embedding_tables[config])[:, 0]
    assert rows[opened.vocabularies["words"].lookup([1])[0]] == 3.0
    # The shared row increases by 7: 1/3 of 3 for key 2, plus 6 for key 3.
    assert rows[-1] == (7.0 if oov_embedding == "trainable" else 0.0)
    opened.enqueue(batch, training=False)
    for found in (opened.dequeue()["ids"], opened(batch)["ids"]):
        np.testing.assert_allclose(
            found.numpy()[:, 0],
            [2.0, 0.0] if oov_embedding == "zeros" else [13 / 3, 7.0],
            rtol=1e-6,
        )


@pytest.mark.parametrize("capacity", [8, 100, 500, 2000])
def test_frequent_keys_are_admitted_for_any_capacity(capacity):
    """For each window of ids, the count of a key is too low by at most one."""
    opened, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(
            capacity, admission="count", min_count=200
        ),
        tpu.SGD(0.1),
        dim=1,
    )
    opened.build()
    vocabulary = opened.vocabularies["words"]
    frequent = np.arange(8) * 1_000_003
    window = vocabulary._variables["vocabulary_sketch"].shape[2] // 2
    for step in range(1, 300):
        # In each step, 8 frequent keys occur twice, and 16 new keys occur once.
        once = 10**9 + 16 * step + np.arange(16)
        opened.enqueue(
            {"ids": tf.constant(np.concatenate([frequent, once, frequent]))}
        )
        opened.dequeue()
        opened.apply_gradients({"ids": tf.zeros([32, 1])})
        if 2 * step - np.ceil(32 * step / window) >= 200:
            break
        if 2 * step < 200:
            assert not len(vocabulary.keys())
    admitted = set(vocabulary.keys().numpy().tolist())
    assert set(frequent.tolist()) <= admitted
    # Up to two other keys may be admitted, because both of their sketch cells
    # are also cells of frequent keys.
    assert len(admitted) <= len(frequent) + 2


def test_forward_only_steps_change_nothing():
    opened, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8, admission="count", min_count=1),
        tpu.SGD(0.5),
    )
    opened.build()
    vocabulary = opened.vocabularies["words"]

    @tf.function
    def evaluate():
        # This function does not apply gradients, so its step is forward-only.
        opened.enqueue({"ids": tf.constant([4, 5])})
        return opened.dequeue()

    evaluate()
    opened.enqueue({"ids": tf.constant([1, 2])}, training=False)
    opened.dequeue()
    opened({"ids": tf.constant([1, 2])})
    stats = vocabulary.stats()
    assert (stats["num_keys"], stats["step"], stats["num_lookups"]) == (0, 0, 0)
    assert not any(
        tf.reduce_any(one != 0)
        for one in (
            vocabulary._variables["vocabulary_sketch"],
            vocabulary._variables["vocabulary_sketch_sums"],
        )
    )


def test_a_key_that_returns_is_initialized_again():
    opened, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8),
        tpu.Adagrad(0.1, initial_accumulator_value=0.5),
    )

    def step(keys):
        opened.enqueue({"ids": tf.constant(keys)})
        found = opened.dequeue()["ids"].numpy()
        opened.apply_gradients({"ids": tf.ones(found.shape)})
        return found

    first = step([7, 8])
    assert (step([7, 8]) != first).all()
    assert opened.vocabularies["words"].evict([7, 9]).numpy().tolist() == [7]
    again = step([7, 8])
    assert (again[0] == first[0]).all() and (again[1] != first[1]).all()
    opened.vocabularies["words"].evict([7])
    opened.enqueue({"ids": tf.constant([7])})
    row = int(opened.vocabularies["words"].lookup(7))
    slot = opened.slot_variables[config]["accumulators"]
    assert (cases.rows_of(slot)[row] == 0.5).all()


def test_keys_of_a_step_in_flight_are_not_evicted():
    opened, _ = cases.embedding(tlm.vocabulary.OpenVocabulary(8), tpu.SGD(0.1))
    opened.enqueue({"ids": tf.constant([7, 8])})
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="Key 8 cannot be evicted while a step in flight",
    ):
        opened.vocabularies["words"].evict([8])
    opened.dequeue()
    opened.apply_gradients({"ids": tf.zeros([2, 3])})
    opened.vocabularies["words"].evict([8])
    assert opened.vocabularies["words"].contains([7, 8]).numpy().tolist() == [
        True,
        False,
    ]


def test_a_step_without_a_free_row_changes_no_table():
    words = cases.table(100, name="words")
    ads = cases.table(8, name="ads")
    opened = tlm.TPUEmbedding(
        {"text": tpu.FeatureConfig(words), "ad": tpu.FeatureConfig(ads)},
        tpu.SGD(0.1),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(
                100, admission="count", min_count=2
            ),
            "ads": tlm.vocabulary.OpenVocabulary(
                8, evict="none", on_full="error"
            ),
        },
    )
    opened.enqueue({"text": tf.range(40), "ad": tf.range(40) % 8})
    opened.reset()
    before = {
        name: cases.rows_of(variable)
        for by_name in opened._variables.values()
        for name, variable in by_name.items()
    }
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=r"Key 8 has no free row.*\(table 'ads'\)",
    ):
        opened.enqueue({"text": tf.range(60), "ad": tf.range(60) % 9})
    after = {
        name: cases.rows_of(variable)
        for by_name in opened._variables.values()
        for name, variable in by_name.items()
    }
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, name)
    opened.enqueue({"text": tf.range(60), "ad": tf.range(60) % 8})
    opened.dequeue()


def test_a_rejected_batch_inserts_no_key():
    opened, _ = cases.embedding(tlm.vocabulary.OpenVocabulary(8), tpu.SGD(0.1))
    for _ in range(4):
        opened.enqueue({"ids": tf.constant([1])})
    with pytest.raises(tf.errors.FailedPreconditionError, match="4 steps are"):
        opened.enqueue({"ids": tf.constant([2])})
    opened.reset()
    with pytest.raises(tf.errors.InvalidArgumentError, match="row_splits"):
        opened.enqueue(
            {
                "ids": tf.RaggedTensor.from_row_splits(
                    tf.constant([2, 3]), [0, 2, 1], validate=False
                )
            }
        )
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="Feature 'ids': a key must not be -9223372036",
    ):
        opened.enqueue({"ids": tf.constant([2, -(2**63)])})
    assert opened.vocabularies["words"].keys().numpy().tolist() == [1]


def test_mixing_strings_and_integers_raises():
    opened, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8),
        tpu.SGD(0.1),
        features=("ids", "others"),
    )
    with pytest.raises(ValueError, match="all have integers or all have str"):
        opened.enqueue({"ids": tf.constant([1]), "others": tf.constant(["a"])})
    opened.enqueue({"ids": tf.constant([1]), "others": tf.constant([2])})
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=(
            "keys of table 'words' must be integers, as those before. "
            "Received: strings; tf.strings.to_number makes numbers of them"
        ),
    ):
        opened.enqueue(
            {"ids": tf.constant(["a"]), "others": tf.constant(["b"])}
        )
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        opened.vocabularies["words"].contains(["a"])
    assert str(caught.value) == (
        "The keys of table 'words' must be integers, as those before. "
        "Received: strings; tf.strings.to_number makes numbers of them."
    )
    with pytest.raises(TypeError, match="must be integers"):
        opened.enqueue({"ids": tf.constant([1.0]), "others": tf.constant([2])})
    with pytest.raises(TypeError, match="`keys` must be integers that int64"):
        opened.vocabularies["words"].lookup([1.5])


def test_invalid_vocabularies_raise():
    words = tlm.vocabulary.OpenVocabulary(8)
    config = cases.table(8)
    other = cases.table(8, name="other", dim=5)
    features = {
        "ids": tpu.FeatureConfig(config),
        "others": tpu.FeatureConfig(other),
    }

    def make(vocabularies, of=features):
        return tlm.TPUEmbedding(of, tpu.SGD(0.1), vocabularies=vocabularies)

    for vocabularies, message in (
        ({"word": words}, "must name tables of the feature config"),
        (
            {"words": words, config: tlm.vocabulary.OpenVocabulary(8)},
            "a table once",
        ),
        ({"words": words, "other": words}, "a separate"),
        ({"words": tlm.vocabulary.OpenVocabulary(9)}, "Received: 8 and 9"),
    ):
        with pytest.raises(ValueError, match=message):
            make(vocabularies)
    for vocabularies in ([words], {"words": 8}):
        with pytest.raises(TypeError, match="tlm.vocabulary.OpenVocabulary"):
            make(vocabularies)


def test_the_serving_lookup_requires_the_vocabularies():
    opened, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8), tpu.SGD(0.1)
    )
    feature = {"ids": tpu.FeatureConfig(config)}
    opened.build()
    with pytest.raises(ValueError, match="must be of shape"):
        tlm.serving.serving_embedding_lookup(
            {"ids": tf.constant([1])}, None, opened.embedding_tables, feature
        )
    found = tlm.serving.serving_embedding_lookup(
        {"ids": tf.constant([1])},
        None,
        opened.embedding_tables,
        feature,
        vocabularies=opened.vocabularies,
    )
    assert (found["ids"].numpy() == 0).all()


def test_a_packed_batch_looks_up_its_keys():
    found = []
    for is_packed in (False, True):
        rng = np.random.default_rng(3)
        embedding, config = cases.embedding(
            tlm.vocabulary.OpenVocabulary(100),
            tpu.Adagrad(0.1),
            features=("ids", "text"),
            combiner="mean",
        )
        embedding.build()
        for _ in range(3):
            ids, weights = random_batch(rng, weights=True)
            text, _ = random_batch(rng)
            features = {"ids": ids, "text": text}
            factors = {"ids": weights, "text": None}
            embedding.enqueue(
                *(
                    tlm.pack(features, factors)
                    if is_packed
                    else (features, factors)
                )
            )
            found.append({k: v.numpy() for k, v in embedding.dequeue().items()})
            embedding.apply_gradients(
                {k: tf.ones_like(v) for k, v in found[-1].items()}
            )
        found.append({"keys": np.sort(embedding.vocabularies["words"].keys())})
    for plain, packed in zip(found[:4], found[4:]):
        for name, value in plain.items():
            np.testing.assert_array_equal(packed[name], value)


def string_embedding(**arguments):
    """Returns an embedding with one open and one closed table."""
    words = cases.table(60)
    initializer = tf.random_uniform_initializer(-1.0, 1.0, seed=3)
    kinds = cases.table(9, name="kinds", initializer=initializer)
    found = tlm.TPUEmbedding(
        {
            "id": tpu.FeatureConfig(kinds),
            "text": tpu.FeatureConfig(words),
            "title": tpu.FeatureConfig(words, max_sequence_length=2),
        },
        tpu.Adagrad(0.5),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(
                60, admission="count", min_count=2
            )
        },
        **arguments,
    )
    return found, (kinds, words)


def string_batches(num_batches=4):
    """Returns a dataset of batches with strings, and dense ids."""
    rng = np.random.default_rng(5)
    size = 6 * num_batches
    lengths = rng.integers(0, 4, size)
    text = tf.RaggedTensor.from_row_lengths(
        tf.strings.as_string(rng.integers(0, 30, lengths.sum())), lengths
    )
    return tf.data.Dataset.from_tensor_slices(
        {
            "id": tf.constant(rng.integers(0, 9, size)),
            "text": text,
            "title": tf.strings.as_string(rng.integers(0, 30, [size, 2])),
        }
    ).batch(6)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("is_pipelined", [False, True])
def test_packed_strings_equal_unpacked_strings(is_traced, is_pipelined):
    found = []
    for is_packed in (False, True):
        embedding, configs = string_embedding(
            pipeline_execution_with_tensor_core=is_pipelined
        )
        embedding.build()

        def step(features):
            embedding.enqueue(features)
            values = embedding.dequeue()
            embedding.apply_gradients(
                {name: value * 0.5 + 1 for name, value in values.items()}
            )
            return values

        batches = string_batches()
        if is_packed:
            batches = batches.map(tlm.pack, num_parallel_calls=2)
            assert batches.element_spec.dtype == tf.int64
        call = tf.function(step) if is_traced else step
        results = [value for one in batches for value in call(one).values()]
        embedding.flush()
        # Lookups with TensorFlow's ops also accept packed batches.
        features = next(iter(batches))
        embedding.enqueue(features, training=False)
        results += list(embedding.dequeue().values())
        stats = embedding.vocabularies["words"].stats()
        assert stats["key_type"] == "strings"
        assert stats["num_keys"] > 0
        results += [
            cases.rows_of(embedding.embedding_tables[one]) for one in configs
        ]
        found.append((results, stats))
    (plain, plain_stats), (packed, packed_stats) = found
    assert plain_stats == packed_stats
    for one, other in zip(plain, packed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_packed_strings_for_a_table_of_integers_raise():
    closed = tlm.TPUEmbedding(
        {"id": tpu.FeatureConfig(cases.table(9, name="kinds"))}, tpu.SGD(0.1)
    )
    packed = tlm.pack({"id": tf.constant(["a", "b"])})
    message = "'id'.* must have integer ids, because its table does not"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        closed.enqueue(packed)
    # If another table has an open vocabulary, the batch is unpacked first.
    opened, _ = string_embedding()
    features = next(iter(string_batches()))
    features["id"] = tf.strings.as_string(features["id"])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="an open vocabulary accepts"
    ):
        opened.enqueue(tlm.pack(features))


def test_packed_keys_of_both_kinds_raise():
    opened, _ = string_embedding()
    features = next(iter(string_batches()))
    mixed = {**features, "text": tf.ragged.range(tf.zeros([6], tf.int64))}
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="must all have integers or all"
    ):
        opened.enqueue(tlm.pack(mixed))
    opened.enqueue(tlm.pack(features))
    opened.reset()
    integers = {
        **mixed,
        "title": tf.strings.to_number(features["title"], tf.int64),
    }
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="must be strings, as those before"
    ):
        opened.enqueue(tlm.pack(integers))
    # A batch without samples has no kind.
    opened.enqueue(tlm.pack(features)[:0])


def test_evicting_a_key_of_a_pending_update_raises():
    opened, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8),
        tpu.SGD(0.1),
        pipeline_execution_with_tensor_core=True,
    )
    opened.enqueue({"ids": tf.constant([1])})
    activations = opened.dequeue()
    opened.apply_gradients(activations)
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=(
            "^Key 1 cannot be evicted while a step in flight uses its row; "
            "finish the step first, and call `flush` if updates are pipel"
        ),
    ):
        opened.vocabularies["words"].evict([1])
    opened.flush()
    assert opened.vocabularies["words"].evict([1]).numpy().tolist() == [1]
