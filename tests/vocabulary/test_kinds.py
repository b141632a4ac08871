"""Tests the conversion of checkpoints between closed and open vocabularies."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.host import open_table_cases as cases
from tf_layoutmap.embedding import optimizers

tpu = tf.tpu.experimental.embedding
NAME = "some/words.1"


def embedding(
    size, *, optimizer, keys=None, num_shards=1, dtype="float32", **settings
):
    """Returns an embedding with a closed table or an open vocabulary."""
    config = cases.table(size, name=NAME)
    found = tlm.TPUEmbedding(
        {"ids": tpu.FeatureConfig(config)},
        optimizer,
        table_dtypes=dtype,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        vocabularies={NAME: tlm.vocabulary.OpenVocabulary(size, **settings)}
        if keys
        else None,
    )
    found.build()
    return found, config


def train(one, ids):
    one.enqueue({"ids": tf.constant(ids)})
    found = one.dequeue()["ids"]
    one.apply_gradients({"ids": found * 0.5 + 0.125})
    return found.numpy()


def contents(one, config, rows):
    """Returns the table and its slot variables."""
    return [
        cases.rows_of(variable)[rows]
        for variable in (
            one.embedding_tables[config],
            *one.slot_variables[config].values(),
        )
    ]


@pytest.mark.parametrize(
    ("optimizer", "dtype", "settings"),
    [
        (tpu.Adam(0.25), "float32", {}),
        (
            optimizers.RowwiseAdagrad(0.25),
            "bfloat16",
            {
                "admission": "count",
                "min_count": 2,
                "oov_embedding": "trainable",
            },
        ),
    ],
    ids=["adam", "rowwise_adagrad"],
)
def test_a_closed_table_converts_to_keys(optimizer, dtype, settings, tmp_path):
    closed, config = embedding(
        300, optimizer=optimizer, num_shards=2, dtype=dtype
    )
    other = tf.Variable([1.0, 2.0])
    for first in (0, 100):
        train(closed, np.arange(first, first + 150))
    source = tf.train.Checkpoint(embedding=closed, other=other).save(
        tmp_path / "closed"
    )
    target = str(tmp_path / "open")
    opened, open_config = embedding(
        500,
        optimizer=optimizer,
        keys=True,
        num_shards=3,
        dtype=dtype,
        **settings,
    )
    fresh = contents(opened, open_config, [-1])
    found = tlm.vocabulary.convert(
        source,
        target,
        {NAME: tlm.vocabulary.OpenVocabulary(500, **settings)},
        optimizer,
    )
    assert found[NAME] == type(found[NAME])(300, 0)
    other.assign([0.0, 0.0])
    tf.train.Checkpoint(embedding=opened, other=other).restore(
        target
    ).assert_consumed()
    assert other.numpy().tolist() == [1.0, 2.0]
    vocabulary = opened.vocabularies[NAME]
    assert sorted(vocabulary.keys().numpy()) == list(range(300))
    rows = vocabulary.lookup(tf.range(300)).numpy()
    for actual, expected_values in zip(
        contents(opened, open_config, rows),
        contents(closed, config, np.arange(300)),
    ):
        np.testing.assert_array_equal(actual, expected_values)
    # The row of unknown keys must have the initial values of a new table.
    for actual, expected_values in zip(
        contents(opened, open_config, [-1]), fresh
    ):
        np.testing.assert_array_equal(actual, expected_values)
    assert vocabulary.stats()["step"] == 0
    # With other dtypes, the rounding depends on the row index.
    if dtype == "float32":
        ids = np.arange(50, 250)
        np.testing.assert_array_equal(train(opened, ids), train(closed, ids))
    train(opened, np.array([7_000_000, 7_000_000]))
    assert vocabulary.contains(7_000_000)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_keys_convert_to_rows(dtype, tmp_path):
    optimizer = tpu.Adagrad(0.25, initial_accumulator_value=0.5)
    opened, open_config = embedding(
        300, optimizer=optimizer, keys=True, num_shards=3, dtype=dtype
    )
    ids = np.array([3, -4, 99, 100, 2**40, 50])
    train(opened, ids)
    source = tf.train.Checkpoint(embedding=opened).save(tmp_path / "open")
    target = str(tmp_path / "closed")
    wanted = tpu.TableConfig(
        100,
        3,
        initializer=tf.constant_initializer(0.25),
        name=NAME,
        optimizer=optimizer,
    )
    found = tlm.vocabulary.convert(source, target, {NAME: wanted})[NAME]
    assert (found.num_kept, found.num_dropped) == (3, 3)
    closed, config = embedding(
        100, optimizer=optimizer, num_shards=2, dtype=dtype
    )
    tf.train.Checkpoint(embedding=closed).restore(target).assert_consumed()
    kept = np.array([3, 99, 50])
    rows = opened.vocabularies[NAME].lookup(kept).numpy()
    for actual, expected_values in zip(
        contents(closed, config, kept), contents(opened, open_config, rows)
    ):
        np.testing.assert_array_equal(actual, expected_values)
    others = np.setdiff1d(np.arange(100), kept)
    table, slot = contents(closed, config, others)
    assert (table == 0.25).all() and (slot == 0.5).all()
    # The conversion back to an open vocabulary keeps all 100 keys, including
    # the keys of rows that had no key before.
    again = str(tmp_path / "again")
    back = tlm.vocabulary.convert(
        target, again, {NAME: tlm.vocabulary.OpenVocabulary(300)}, optimizer
    )[NAME]
    assert back.num_kept == 100
    tf.train.Checkpoint(embedding=opened).restore(again)
    rows = opened.vocabularies[NAME].lookup(kept).numpy()
    for actual, expected_values in zip(
        contents(closed, config, kept), contents(opened, open_config, rows)
    ):
        np.testing.assert_array_equal(actual, expected_values)


def test_the_lowest_keys_are_kept_when_there_are_too_few_rows(tmp_path):
    closed, _ = embedding(300, optimizer=tpu.SGD(0.5))
    source = tf.train.Checkpoint(embedding=closed).save(tmp_path / "closed")
    found = tlm.vocabulary.convert(
        source, str(tmp_path / "open"), {NAME: tlm.vocabulary.OpenVocabulary(8)}
    )[NAME]
    assert (found.num_kept, found.num_dropped) == (8, 292)
    opened, _ = embedding(8, optimizer=tpu.SGD(0.5), keys=True)
    tf.train.Checkpoint(embedding=opened).restore(str(tmp_path / "open"))
    assert sorted(opened.vocabularies[NAME].keys().numpy()) == list(range(8))


def test_unsupported_conversions_raise(tmp_path):
    closed, config = embedding(30, optimizer=tpu.Adagrad(0.5))
    opened, open_config = embedding(30, optimizer=tpu.Adagrad(0.5), keys=True)
    words, _ = embedding(30, optimizer=tpu.SGD(0.5), keys=True)
    words.enqueue({"ids": tf.constant(["a", "b"])})
    words.reset()
    paths = {
        name: tf.train.Checkpoint(embedding=one).save(tmp_path / name)
        for name, one in (
            ("closed", closed),
            ("opened", opened),
            ("words", words),
        )
    }
    twice = tf.train.Checkpoint(one=closed, two=opened).save(tmp_path / "two")
    settings = tlm.vocabulary.OpenVocabulary(30)
    narrow = tpu.TableConfig(30, 2, name=NAME)
    for source, wanted, optimizer, message in (
        (
            paths["closed"],
            settings,
            None,
            r"`optimizer` must be the opt.*slot variables \['accumulators'\]",
        ),
        (paths["opened"], open_config, tpu.SGD(0.5), "`optimizer` must be"),
        (paths["closed"], config, None, "for a table without keys"),
        (paths["opened"], narrow, tpu.Adagrad(0.5), "must have dim=3"),
        (
            paths["words"],
            config,
            None,
            "keys that are integers. Received: hashes of strings",
        ),
        (twice, settings, tpu.Adagrad(0.5), "contains exactly once"),
    ):
        with pytest.raises(ValueError, match=message):
            tlm.vocabulary.convert(
                source, str(tmp_path / "new"), {NAME: wanted}, optimizer
            )
    assert not list(tmp_path.glob("new*"))
