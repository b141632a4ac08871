"""Tests the conversion of open-vocabulary checkpoints to another capacity."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.host import open_table_cases as cases
from tf_layoutmap.vocabulary import parts

tpu = tf.tpu.experimental.embedding
NAME = "some/words.1"


def built(capacity, evict="lru", num_shards=1, **arguments):
    config = cases.table(capacity, name=NAME)
    found = tlm.TPUEmbedding(
        {"ids": tpu.FeatureConfig(config)},
        tpu.Adagrad(0.1),
        vocabularies={
            NAME: tlm.vocabulary.OpenVocabulary(
                capacity, evict=evict, **arguments
            )
        },
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )
    found.build()
    return found, config


def train(embedding, keys):
    embedding.enqueue({"ids": tf.constant(keys)})
    found = embedding.dequeue()["ids"]
    embedding.apply_gradients({"ids": found * 0.5 + 0.125})


def contents(embedding, config, keys):
    """Returns the row and the accumulators of each key in the vocabulary."""
    rows = embedding.vocabularies[NAME].lookup(keys).numpy()
    table = cases.rows_of(embedding.embedding_tables[config])
    slot = cases.rows_of(embedding.slot_variables[config]["accumulators"])
    return {
        key: (*table[row], *slot[row])
        for key, row in zip(keys.tolist(), rows)
        if row >= 0
    }


@pytest.mark.parametrize(
    ("capacity", "num_dropped"), [(5000, 0), (300, 0), (64, None)]
)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_keys_keep_their_rows(tmp_path, capacity, num_dropped, num_shards):
    rng = np.random.default_rng(0)
    old, config = built(300, admission="count", min_count=1, num_shards=2)
    for step in range(20):
        train(old, rng.integers(0, 20, 15) + step * 10)
    keys = np.arange(300)
    expected = contents(old, config, keys)
    source = tf.train.Checkpoint(embedding=old).save(tmp_path / "old")
    target = str(tmp_path / "new")
    settings = tlm.vocabulary.OpenVocabulary(
        capacity, admission="count", min_count=1
    )
    found = tlm.vocabulary.convert(source, target, {NAME: settings})[NAME]
    assert found.num_kept + found.num_dropped == len(expected)
    new, config = built(
        capacity, admission="count", min_count=1, num_shards=num_shards
    )
    tf.train.Checkpoint(embedding=new).restore(target)
    kept = contents(new, config, keys)
    assert len(kept) == found.num_kept
    assert kept == {key: expected[key] for key in kept}
    stats = new.vocabularies[NAME].stats()
    assert stats["step"] == old.vocabularies[NAME].stats()["step"]
    if num_dropped is not None:
        assert found.num_dropped == num_dropped
    else:
        # The most recently used keys must be kept.
        assert found.num_kept == 64
        assert set(range(195, 210)) & set(expected) <= set(kept)
        assert max(set(expected) - set(kept)) < 160
    train(new, np.arange(1000, 1010))
    assert new.vocabularies[NAME].contains(np.arange(1000, 1010)).numpy().all()


def test_unsupported_conversions_raise(tmp_path):
    old, _ = built(20)
    source = tf.train.Checkpoint(embedding=old).save(tmp_path / "old")
    with pytest.raises(ValueError, match="another prefix than `source`"):
        tlm.vocabulary.convert(source, source, {})
    with pytest.raises(
        TypeError, match="tlm.vocabulary.OpenVocabulary, TableConfig or"
    ):
        tlm.vocabulary.convert(source, str(tmp_path / "new"), {NAME: 30})
    with pytest.raises(ValueError, match="checkpoint contains exactly once"):
        tlm.vocabulary.convert(
            source,
            str(tmp_path / "new"),
            {"words": tlm.vocabulary.OpenVocabulary(30)},
        )
    assert not list(tmp_path.glob("new*"))


def test_another_optimizer_than_the_one_of_the_slots_raises(tmp_path):
    old, config = built(20)
    source = tf.train.Checkpoint(embedding=old).save(tmp_path / "old")
    closed = tpu.TableConfig(20, config.dim, name=NAME, optimizer=tpu.SGD(0.1))
    with pytest.raises(ValueError, match=r"slot variables \['accumulators'\]"):
        tlm.vocabulary.convert(source, str(tmp_path / "new"), {NAME: closed})
    assert not list(tmp_path.glob("new*"))


def test_a_source_is_not_overwritten_through_links(tmp_path, monkeypatch):
    old, _ = built(20)
    source = tf.train.Checkpoint(embedding=old).save(tmp_path / "old")
    (tmp_path / "folder").symlink_to(tmp_path)
    for path in list(tmp_path.glob("old-1.*")):
        (tmp_path / path.name.replace("old", "soft")).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("old*")}
    settings = {NAME: tlm.vocabulary.OpenVocabulary(30)}
    for one, other in (
        ("old-1", source),
        (source, "old-1"),
        ("folder/old-1", source),
        (source, "folder/./old-1"),
        (source, "soft-1"),
        (".", source),
        ("./", source),
        (f"{source}/", source),
        (source, "old-1/"),
    ):
        with pytest.raises(ValueError, match="another prefix than `source`"):
            tlm.vocabulary.convert(one, other, settings)
    # The files at the target prefix may be links. The conversion replaces the
    # links, not the files that they point to.
    other = tf.train.Checkpoint(embedding=old).write(str(tmp_path / "two"))
    tlm.vocabulary.convert(other, "soft-1", settings)
    assert tf.train.list_variables("soft-1") != tf.train.list_variables(other)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("old*")}


def test_an_unreadable_source_raises(tmp_path):
    with pytest.raises(ValueError, match="`source` must be the prefix of a "):
        tlm.vocabulary.convert(tmp_path / "none", tmp_path / "new", {})
    old, _ = built(20)
    source = tf.train.Checkpoint(embedding=old).save(tmp_path / "old")
    data = tmp_path / "old-1.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:100])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        ValueError,
        match="Could not read tensor .* from the checkpoint "
        "at .*old-1', which is truncated or corrupted",
    ):
        tlm.vocabulary.convert(source, tmp_path / "new", {})
    assert sorted(tmp_path.iterdir()) == before


def test_other_tensors_are_copied(tmp_path):
    old, _ = built(20)
    other = tf.Variable([1.0, 2.0])
    source = tf.train.Checkpoint(embedding=old, other=other).save(
        tmp_path / "old"
    )
    target = str(tmp_path / "new")
    tlm.vocabulary.convert(
        source, target, {NAME: tlm.vocabulary.OpenVocabulary(100)}
    )
    before, after = (
        dict(tf.train.list_variables(one)) for one in (source, target)
    )
    assert before.keys() == after.keys()
    changed = {name for name, shape in before.items() if shape != after[name]}
    assert any(parts.KEYS in name for name in changed)
    assert not any("other" in name for name in changed)
    assert tf.train.load_variable(
        target, "other/.ATTRIBUTES/VARIABLE_VALUE"
    ).tolist() == [1.0, 2.0]


def counted(capacity, num_shards=1):
    return built(
        capacity, admission="count", min_count=4, num_shards=num_shards
    )


@pytest.mark.parametrize("capacity", [300, 64, 5000, 20])
@pytest.mark.parametrize("is_resized", [False, True])
def test_counts_of_keys_without_a_row_are_kept(tmp_path, capacity, is_resized):
    old, _ = counted(300, num_shards=2)
    keys = np.arange(10_000, 10_040)
    for _ in range(3):
        train(old, keys)
    assert not old.vocabularies[NAME].contains(keys).numpy().any()
    if is_resized:
        old.vocabularies[NAME].resize(capacity)
        new = old
    else:
        source = tf.train.Checkpoint(embedding=old).save(tmp_path / "old")
        target = str(tmp_path / "new")
        settings = tlm.vocabulary.OpenVocabulary(
            capacity, admission="count", min_count=4
        )
        tlm.vocabulary.convert(source, target, {NAME: settings})
        new, _ = counted(capacity, num_shards=3)
        tf.train.Checkpoint(embedding=new).restore(
            target
        ).assert_existing_objects_matched()
    # A window consists of at least 128 ids, so a count may decrease by one.
    train(new, keys)
    train(new, keys)
    known = new.vocabularies[NAME].contains(keys).numpy()
    assert known.sum() >= min(len(keys), capacity) * 3 // 4
    # The keys would have a count of 2 with an empty sketch.
    fresh, _ = counted(capacity)
    train(fresh, keys)
    train(fresh, keys)
    assert not fresh.vocabularies[NAME].contains(keys).numpy().any()


@pytest.mark.parametrize("had_sketch", [False, True])
def test_the_sketch_is_created_or_removed_with_the_admission(
    tmp_path, had_sketch
):
    admissions = [
        {"admission": "count", "min_count": 2},
        {"admission": "all"},
    ]
    before, after = admissions if had_sketch else admissions[::-1]
    old, _ = built(100, **before)
    train(old, np.arange(5))
    train(old, np.arange(5))
    source = tf.train.Checkpoint(embedding=old).save(tmp_path / "old")
    target = str(tmp_path / "new")
    tlm.vocabulary.convert(
        source, target, {NAME: tlm.vocabulary.OpenVocabulary(50, **after)}
    )
    names = [name for name, _ in tf.train.list_variables(target)]
    assert any(parts.SKETCH in name for name in names) != had_sketch
    new, _ = built(50, **after)
    tf.train.Checkpoint(embedding=new).restore(target).assert_consumed()
    assert new.vocabularies[NAME].contains(np.arange(5)).numpy().all()
